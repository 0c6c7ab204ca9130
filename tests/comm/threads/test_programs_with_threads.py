"""Programs by chance whose ranks communicate from several threads: none is a deadlock."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

import echelon as ec


@dataclass(frozen=True)
class Program:
    """Lane 0 of a rank is the rank itself, and each other lane a thread, with a group of its own.

    Lanes depend on one another in one direction: lane 0 waits for the end of another. So every
    program ends, whatever the order.
    """

    seed: int
    size: int
    lanes: list[list[str]]
    naps_s: list[list[list[float]]]  # by rank, lane and operation
    waits_at: int
    waits_for: int
    style: str

    @classmethod
    def drawn(cls, seed: int) -> "Program":
        chance = random.Random(seed)
        size, num_lanes = chance.randint(2, 4), chance.randint(2, 3)
        operations = ("barrier", "all_reduce", "objects", "nothing")
        lanes = [chance.choices(operations, k=chance.randint(2, 6)) for _ in range(num_lanes)]
        naps = (0.0, 0.0, 0.0, 0.05, 0.25, 0.6)
        return cls(
            seed=seed,
            size=size,
            lanes=lanes,
            naps_s=[[chance.choices(naps, k=len(lane)) for lane in lanes] for _ in range(size)],
            waits_at=chance.randrange(len(lanes[0])),
            waits_for=chance.randrange(1, num_lanes),
            style=chance.choice(("threads", "pool")),
        )


def run_lanes(world: ec.World, program: Program) -> list[float]:
    """What each lane has found."""
    everyone = range(world.size)
    groups = [world.group, *(world.group.subgroup(everyone) for _ in program.lanes[1:])]
    ended = [threading.Event() for _ in groups]
    found = [0.0] * len(groups)

    def lane(number: int) -> None:
        group = groups[number]
        assert group is not None
        naps_s = program.naps_s[world.rank][number]
        for place, operation in enumerate(program.lanes[number]):
            time.sleep(naps_s[place])
            if number == 0 and place == program.waits_at:
                ended[program.waits_for].wait()
            if operation == "barrier":
                group.barrier()
            elif operation == "all_reduce":
                value = torch.full((), float(place))
                group.all_reduce(value)
                found[number] += value.item()
            elif operation == "objects":
                found[number] += sum(group.all_gather_object(place))
        ended[number].set()

    others = range(1, len(groups))
    if program.style == "pool":
        with ThreadPoolExecutor(len(groups)) as pool:
            futures = [pool.submit(lane, number) for number in others]
            lane(0)
        for future in futures:
            future.result()
    else:
        threads = [threading.Thread(target=lane, args=(number,)) for number in others]
        for thread in threads:
            thread.start()
        lane(0)
        for thread in threads:
            thread.join()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 16))
def test_a_program_that_ends_is_no_deadlock_and_finds_the_same_on_all_ranks(seed: int) -> None:
    program = Program.drawn(seed)
    found = ec.run(run_lanes, program.size, args=(program,), timeout=60)
    assert all(each == found[0] for each in found)
