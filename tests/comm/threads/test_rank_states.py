"""What each simulated rank does while a debugger has stopped them."""

import threading
import time

import pytest
import torch

import echelon as ec
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.rank_states import RankState, rank_states


def states(world: ec.World) -> list[RankState]:
    assert isinstance(world.group, ThreadGroup)
    return rank_states(world.group.thread_world)


def test_states_say_what_ranks_wait_for_and_which_have_not_started_or_have_returned() -> None:
    def main(world: ec.World) -> list[str]:
        if world.rank == 0:
            world.group.recv(torch.zeros(3), 3)
        texts = [state.doing for state in states(world)]
        if world.rank == 3:
            world.group.send(torch.zeros(3), 0)
        return texts

    _, early, _, late = ec.run(main, 4)
    wait = "waits in recv float32[3] peer=3 tag 0 (#0 of group 'world') for rank 3"
    assert [early[0], *early[2:]] == [wait, "has not started", "has not started"]
    assert late[:3] == [wait, "has returned", "has returned"]


def test_the_frame_of_a_rank_is_where_it_waits() -> None:
    def main(world: ec.World) -> bool:
        mark = world.rank
        if world.rank == 0:
            world.group.barrier()
            return mark == 0
        frame = states(world)[0].frame
        names = set()
        while frame is not None:
            names.add((frame.f_code.co_name, frame.f_locals.get("mark")))
            frame = frame.f_back
        world.group.barrier()
        return ("main", 0) in names

    assert ec.run(main, 2) == [True, True]


@pytest.mark.slow
def test_a_rank_that_has_failed_has_its_error_and_others_have_its_number() -> None:
    texts: list[str] = []

    def main(world: ec.World) -> None:
        if world.rank == 0:
            raise ValueError("early\nand more")
        if world.rank == 1:
            world.group.barrier()
        time.sleep(1)
        others = [threading.Thread(target=time.sleep, args=(1,)) for _ in range(4)]
        for thread in others:  # which may have the numbers of those that have ended
            thread.start()
        texts.extend(state.doing for state in states(world))
        for thread in others:
            thread.join()

    with pytest.raises(ValueError, match="early"):
        ec.run(main, 3)
    assert texts[0] == "has raised ValueError: early"
    assert texts[1] == "has ended, because rank 0 failed"
