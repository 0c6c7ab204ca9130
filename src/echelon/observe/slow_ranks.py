"""Which rank held up the others in this run, asked by the ranks themselves."""

from __future__ import annotations

from echelon import checks
from echelon.comm.world import World
from echelon.diagnosis.held_up import HeldUp, verdict
from echelon.diagnosis.step_rows import RankSteps


def held_up(world: World) -> list[HeldUp]:
    """The ranks that hold up the others, the most expensive first; empty where none stands out.

    All ranks call it, and all get the same. It is about the optimizer steps so far, but the first.
    Nothing is known before the fifth.

    Example:
        >>> # for cost in held_up(world):
        >>> #     print(cost)  # rank 1 cost 54 ms a step, in backward (a step took 310 ms)
    """
    checks.instance("world", world, World)
    tables = world.group.all_gather_object(world.steps.time.rows.numbers())
    return verdict([RankSteps.of(rank, numbers) for rank, numbers in enumerate(tables)])
