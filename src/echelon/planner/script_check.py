"""Runs a script's first steps without values, to see whether it fits on devices that are not here.

One rank of each stage runs, on a thread, beside ranks that are taken to be like it; see
``dry_run``. Checkpoints and records are not written, because ``world.is_replay`` is True.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from echelon.c10d.rank_variables import rank_variables
from echelon.comm.world import World
from echelon.diagnosis.rank_monitor import StepCounter
from echelon.errors import StateError
from echelon.laboratory.allocations import Allocations
from echelon.launch.program import Program
from echelon.launch.run import enter, run
from echelon.launch.simulated_job import run_threads
from echelon.planner.dry_run import DryRunOptions, fake_world
from echelon.planner.shapes_only import ShapesOnly
from echelon.plans.plans import Plan

# The optimizer makes its state in the first step, and DDP its final buckets in the second.
_STEPS = 3


@final
@dataclass(frozen=True, kw_only=True)
class ScriptMemory:
    """What a rank of one stage allocates in a step of a script.

    Attributes:
        stage: the position on ``pp``.
        rank: in the job.
        kept: the bytes of tensors between two steps.
        peak: the most bytes of tensors at a time.
    """

    stage: int
    rank: int
    kept: int
    peak: int


class _EnoughError(BaseException):
    """Ends a script after the last step that is looked at."""


def check_script(
    program: Program, arguments: Sequence[str], plan: Plan, *, rounding: int = 512
) -> list[ScriptMemory]:
    """The memory of the third step of a script, of one rank of each stage.

    Args:
        program: what gets its world from ``ec.init`` and calls ``optimizer.step``.
        arguments: of the script.
        plan: that the script uses, for the number of ranks and of stages.
        rounding: an allocation takes a multiple of so many bytes; PyTorch's of CUDA takes 512.

    Raises:
        StateError: the script failed, or took fewer than three steps.
    """
    seen: dict[int, ScriptMemory] = {}

    def run_ranks(main: Callable[..., None], ranks: int, args: Any, timeout: float) -> None:
        call = partial(_run_stage, plan=plan, rounding=rounding, main=main, seen=seen)
        run(call, ranks, args=(args,), timeout=timeout)

    code = run_threads(program, arguments, plan.pp, run_ranks=run_ranks)
    if code or len(seen) < plan.pp:
        reason = f"left with exit code {code}" if code else f"took fewer than {_STEPS} steps"
        raise StateError(
            f"{program.name} {reason}, so its memory is not known: it must get its world from "
            f"echelon.init() and take {_STEPS} steps of an optimizer, and {plan} must be its plan "
            "(a --plan among its arguments, or --fix pp=2 --fix shard=4 and the like)"
        )
    return [seen[stage] for stage in range(plan.pp)]


def _run_stage(
    stages: World,
    args: Sequence[Any],
    *,
    plan: Plan,
    rounding: int,
    main: Callable[..., None],
    seen: dict[int, ScriptMemory],
) -> None:
    kept = peak = 0

    def after_operation(nbytes: int) -> None:
        nonlocal peak
        peak = max(peak, nbytes)

    def after_step(number: int) -> None:
        nonlocal kept, peak
        if number == _STEPS:
            seen[stages.rank] = ScriptMemory(
                stage=stages.rank, rank=world.rank, kept=kept, peak=peak
            )
            raise _EnoughError
        kept, peak = memory.nbytes, memory.nbytes

    memory = Allocations(after_operation, rounding=rounding)
    world = fake_world(plan, stages, DryRunOptions(), StepCounter(after_step))
    world.is_replay = True
    enter(world)
    # The environment is that of this simulated rank, which is put back when another one's turn
    # comes; a script may divide its batch by WORLD_SIZE.
    port = int(os.environ.get("MASTER_PORT", 0))
    os.environ.update(rank_variables(world.rank, world.size, port))
    try:
        with ShapesOnly(), memory:
            main(world, *args)
    except _EnoughError:
        pass
