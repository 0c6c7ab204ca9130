"""Ranks that wait in vain together blame the one that hangs, and reports name lines of users."""

import threading
import time

import pytest
import torch

import echelon as ec
from echelon.comm.torch_dist import TorchGroup
from echelon.diagnosis.flight_recorder import RankStatus
from echelon.errors import CommTimeout, RankFailed
from tests.worlds import run_world

TIMEOUT_S = 2.0


def gives_up_and_computes(world: ec.World) -> None:
    """Rank 2 hangs; rank 1 waits for it in vain, and rank 0 for rank 1 a little longer."""
    world.group.barrier()
    if world.rank == 2:
        time.sleep(3 * TIMEOUT_S)
    elif world.rank == 1:
        try:
            world.group.recv(torch.zeros(1), 2)
        except CommTimeout:
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                pass  # as where it takes long to tell of the error
            raise
    else:
        time.sleep(0.5)
        world.group.recv(torch.zeros(1), 1)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_a_rank_that_has_given_up_itself_is_not_blamed(kind: str) -> None:
    with pytest.raises((CommTimeout, RankFailed)) as info:
        run_world(kind, gives_up_and_computes, 3, timeout=TIMEOUT_S)
    error = info.value
    blamed = list(error.stuck) if isinstance(error, CommTimeout) else [error.failed_rank]
    assert blamed == [2], error


def waits_twice(world: ec.World) -> None:
    """Rank 2 hangs; rank 1 waits for it, and a thread of rank 1 ends a wait meanwhile."""
    with_0 = world.group.subgroup([0, 1])
    with_2 = world.group.subgroup([1, 2])
    if world.rank == 2:
        time.sleep(3 * TIMEOUT_S)
    elif world.rank == 1:
        assert with_0 is not None
        assert with_2 is not None
        time.sleep(0.3)  # so that rank 0 is the first to give up
        with_0.all_reduce(torch.ones(1), async_op=True)  # on a thread, until rank 0 has come
        with_2.recv(torch.zeros(1), 1)
    else:
        assert with_0 is not None
        threading.Timer(0.6, with_0.all_reduce, (torch.ones(1),)).start()
        with_0.recv(torch.zeros(1), 1)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_a_rank_that_waits_is_not_blamed_when_another_of_its_threads_has_ended_a_wait(
    kind: str,
) -> None:
    with pytest.raises((CommTimeout, RankFailed)) as info:
        run_world(kind, waits_twice, 3, timeout=TIMEOUT_S)
    error = info.value
    blamed = list(error.stuck) if isinstance(error, CommTimeout) else [error.failed_rank]
    assert blamed == [2], error


def has_a_message_beside_a_collective(world: ec.World) -> tuple[int, ...]:
    """Rank 0 waits for rank 1 in a collective, and a thread of it for a message of rank 2."""
    world.group.barrier()
    missing: tuple[int, ...] = ()
    if world.rank > 0:
        time.sleep(0.5 * TIMEOUT_S)
    work = world.group.broadcast(torch.zeros(1), 1, async_op=True)
    assert work is not None
    if world.rank == 0:
        time.sleep(0.1)
        message = world.group.irecv(torch.zeros(1), 2)
        assert not message.done()  # which begins to wait for it
        time.sleep(0.1)
        with pytest.raises(CommTimeout) as info:
            work.wait(0.1)
        missing = info.value.missing
        message.wait()
    elif world.rank == 2:
        world.group.send(torch.zeros(1), 0)
    work.wait()
    return missing


def test_a_collective_that_is_waited_for_names_its_own_peer_and_not_that_of_a_message() -> None:
    found = run_world("gloo", has_a_message_beside_a_collective, 3, timeout=5 * TIMEOUT_S)
    assert found == [(1,), (), ()]


def gives_up_and_lives_on(world: ec.World) -> RankStatus:
    """Rank 1 comes too late; rank 0 catches the error."""
    world.group.barrier()
    if world.rank == 1:
        time.sleep(2 * TIMEOUT_S)
    else:
        with pytest.raises(CommTimeout):
            world.group.all_reduce(torch.ones(1))
    assert isinstance(world.group, TorchGroup)
    entry = world.group._job.monitor.status(world.rank)
    assert entry is not None
    return entry


def test_a_rank_that_has_caught_an_error_waits_for_nobody_any_more() -> None:
    """Else it could hang afterwards as long as it likes: a rank that waits is never late."""
    entry, _ = run_world("gloo", gives_up_and_lives_on, 2, timeout=TIMEOUT_S)
    assert (entry.waits_for, entry.gave_up_on) == (None, 1)
