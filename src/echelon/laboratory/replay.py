"""``ec.replay``: computes a step of a run again, on simulated ranks of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from echelon import checks
from echelon.comm.world import DEFAULT_TIMEOUT_S, World
from echelon.diagnosis.failure_record import is_disagreement, is_of_another
from echelon.errors import (
    ArgumentError,
    BlackboxCorrupt,
    BlackboxError,
    CheckpointCorrupt,
    DeadlockError,
    ReplayMismatch,
    StateError,
)
from echelon.errors.message_text import message_of
from echelon.laboratory.kept_run import KeptSteps, kept_batch, kept_steps
from echelon.laboratory.rank_replay import NoteDifference, RankReplay, StepReplayed
from echelon.laboratory.replayed_program import NamedProgram
from echelon.laboratory.step_log import MAX_TEXT
from echelon.launch.rank_function import taking_world
from echelon.launch.rank_lines import printing_as
from echelon.launch.run import run


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """What a replay has shown; ``print`` it.

    Attributes:
        run: the folder of the run.
        step: the step that was computed again.
        first_step: the first of the steps that were, to get there.
        ranks: how many.
        ends: the exception with which each rank ended, by rank: an error, or the end of the step.
            Their tracebacks have the frames of the loop, for ``pdb.post_mortem``.
        first_failed: the rank that failed first; None if none did.
        recorded: class and text of the error that each rank had in this step of the run.
        num_compared: how many noted numbers were compared with those of the run.
        differences: those that are others.
    """

    run: Path
    step: int
    first_step: int
    ranks: int
    ends: Mapping[int, BaseException]
    first_failed: int | None
    recorded: Mapping[int, tuple[str, str]]
    num_compared: int
    differences: Sequence[NoteDifference]

    @property
    def errors(self) -> dict[int, BaseException]:
        """The errors of the step, by rank, also those about the failure of another rank."""
        return {
            rank: error for rank, error in self.ends.items() if not isinstance(error, StepReplayed)
        }

    @property
    def same(self) -> bool:
        """Whether the step had the errors of the run, and all noted numbers have its bits."""
        return not self.differences and self._same_errors

    @property
    def _same_errors(self) -> bool:
        now = _texts(self.errors)
        return bool(now) == bool(self.recorded) and _causes(now) == _causes(self.recorded)

    def __str__(self) -> str:
        before = self.step - self.first_step
        steps = "step before it" if before == 1 else f"{before} steps before it"
        after = f", after the {steps}" if before else ""
        lines = [f"step {self.step} of {self.run} on {self.ranks} simulated ranks{after}:"]
        lines += [f"  {line}" for line in (*self._error_lines(), *self._note_lines())]
        return "\n".join(lines)

    def _error_lines(self) -> list[str]:
        if self.first_failed is None:
            lines = ["no rank failed"]
        else:
            error = self.errors[self.first_failed]
            text = (type(error).__name__, message_of(error))
            lines = [f"rank {self.first_failed} {_raised(text)}"]
        if self._same_errors:
            return [*lines, "as in the run" if self.recorded else "as far as the run has told"]
        now, then = _texts(self.errors), self.recorded
        causes = {*_causes(now), *_causes(then)}
        for rank in sorted(causes or {*now, *then}):
            if now.get(rank) != then.get(rank):
                lines.append(f"in the run, rank {rank} {_raised(self.recorded.get(rank))}")
        return lines

    def _note_lines(self) -> list[str]:
        if self.differences:
            return [str(difference) for difference in self.differences]
        if self.num_compared:
            return [f"{self.num_compared} noted numbers have the bits of the run"]
        return ["no numbers to compare: note some by box.note(loss=loss)"]


def replay(
    directory: str | os.PathLike[str],
    fn: Callable[..., Any],
    *,
    step: int | None = None,
    args: Sequence[Any] = (),
    batch_of: int | None = None,
    anyway: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Replay:
    """Compute a step of a run again, on as many simulated ranks, and compare what was noted.

    ``fn`` is called again. Where it makes its ``ec.Blackbox``, the state before the step is loaded,
    and ``box.steps`` gives it the batches of the run. Until the step has ended, ``ec.save`` and
    ``ec.observe.Recorder`` write nothing; ``world.is_replay`` is True, so that a script can leave
    out what else it writes. Nothing that the folder names is executed.

    Args:
        directory: of the run.
        fn: called as ``fn(world, *args)`` on each rank.
        step: the number of the step; None: the last one that all ranks have begun.
        args: what ``fn`` takes after the world.
        batch_of: another kept step, whose batch the step gets: if it goes well with it, look at
            its own batch, and else at the weights.
        anyway: also with another script, torch or processor than in the run.
        timeout: seconds that a rank waits for others in one call before it raises.

    Returns:
        How each rank ended, and what is different.

    Raises:
        StepNotKept: the step was not kept; says which were.
        ReplayMismatch: a version or the processor is another one.
        BlackboxError: there is no black box, or it is damaged or cannot be read.
        ArgumentError: ``fn`` cannot be called so.
        StateError: it has ended without coming to the step.
    """
    checks.path("directory", directory)
    for name, number in (("step", step), ("batch_of", batch_of)):
        if number is not None:
            checks.integer(name, number, low=1)
    checks.flag("anyway", anyway)
    _check_call(fn, args, timeout)
    kept, batch = _kept(Path(os.path.abspath(directory)), step, batch_of)
    _refuse_other(kept, kept.facts.differing(), anyway=anyway)
    fn = taking_world(fn, len(args))
    return _Replaying(kept, fn, batch).result(tuple(args), timeout)


def replay_program(
    directory: Path,
    program: NamedProgram,
    *,
    step: int | None = None,
    batch_of: int | None = None,
    anyway: bool = False,
) -> Replay:
    """As ``replay``, with a script or a module that the user names, and its arguments.

    Raises:
        ReplayMismatch: also where the script or its arguments are others than in the run.
        ArgumentError: the program cannot be found or called.
    """
    kept, batch = _kept(Path(os.path.abspath(directory)), step, batch_of)
    with program.as_started():
        differing = program.differing(kept.facts) | kept.facts.differing()
        _refuse_other(kept, differing, anyway=anyway)
        fn = taking_world(program.called(), 0)
        return _Replaying(kept, fn, batch).result((), DEFAULT_TIMEOUT_S)


def _refuse_other(
    kept: KeptSteps, differing: Mapping[str, tuple[str, str]], *, anyway: bool
) -> None:
    if differing and not anyway:
        raise ReplayMismatch(kept.run, differing)


def _check_call(fn: object, args: object, timeout: object) -> None:
    checks.function("fn", fn, "a world")
    if not isinstance(args, list | tuple):
        raise ArgumentError(f"args is {args!r:.80}; give a tuple of what fn takes after the world")
    checks.positive("timeout", timeout, threading.TIMEOUT_MAX)


def _kept(
    folder: Path, step: int | None, batch_of: int | None
) -> tuple[KeptSteps, KeptSteps | None]:
    """What is needed for a replay, and what has the batch of another step if one is asked for."""
    kept = kept_steps(folder, step)
    return kept, None if batch_of is None else kept_batch(kept, batch_of)


@final
class _Replaying:
    """Runs the ranks of one replay, and collects how they end."""

    def __init__(self, kept: KeptSteps, fn: Callable[..., Any], batch: KeptSteps | None) -> None:
        self._kept, self._fn, self._batch = kept, fn, batch
        self._replays: dict[int, RankReplay] = {}
        self._ends: dict[int, BaseException] = {}

    def result(self, args: tuple[Any, ...], timeout: float) -> Replay:
        """Run all ranks until the step has ended, or one has failed."""
        kept, first_failed = self._kept, None
        facts, threads = kept.facts, torch.get_num_threads()
        torch.set_num_threads(facts.threads)  # on which the bits of matrix products depend
        try:
            device = facts.device_here()
            run(self._rank_main, facts.ranks, args=args, timeout=timeout, device=device)
        except StepReplayed:
            pass  # a script that leaves its world by it
        except BaseException as error:
            if isinstance(error, BlackboxError):
                raise  # of what was kept, and not of the step
            if isinstance(error, CheckpointCorrupt) and kept.run in Path(error.path).parents:
                raise BlackboxCorrupt(f"has a damaged checkpoint: {error}", kept.run) from error
            first_failed = self._rank_that_raised(error)
            if first_failed is None or not self._replays[first_failed].step:
                raise  # not in a step: the run has come further than that
        finally:
            torch.set_num_threads(threads)
        records = {rank: kept.error(rank) for rank in range(kept.facts.ranks)}
        replays = [replay for _, replay in sorted(self._replays.items())]
        return Replay(
            run=kept.run,
            step=kept.step,
            first_step=kept.first_step,
            ranks=kept.facts.ranks,
            ends=self._ends,
            first_failed=first_failed,
            recorded={
                rank: (str(record.get("type")), str(record.get("text")))
                for rank, record in records.items()
                if record is not None
            },
            num_compared=sum(replay.num_compared for replay in replays),
            differences=[line for replay in replays for line in replay.differences],
        )

    def _rank_that_raised(self, error: BaseException) -> int | None:
        # In a deadlock each rank raises a copy.
        text = (type(error), message_of(error))
        alike = [r for r, end in self._ends.items() if (type(end), message_of(end)) == text]
        return next((rank for rank in alike if self._ends[rank] is error), min(alike, default=None))

    def _rank_main(self, world: World, *args: Any) -> None:
        replay = RankReplay(self._kept, world, self._batch)
        self._replays[world.rank] = world.group.belongings[RankReplay] = replay
        world.is_replay = True
        world.backend = self._kept.facts.backend  # a script may choose by it, or name it in init
        try:
            with printing_as(world.rank):
                self._fn(world, *args)
            if replay.step < self._kept.step:  # a rank may leave its loop in the step itself
                raise StateError(
                    f"the program ended before step {self._kept.step}: it made no ec.Blackbox, or "
                    "its loop over box.steps ended early"
                )
        except StepReplayed as end:
            self._ends[world.rank] = end
        except BaseException as error:
            if not replay.has_ended:
                self._ends[world.rank] = error
                raise
        self._ends.setdefault(world.rank, StepReplayed())


def _texts(errors: Mapping[int, BaseException]) -> dict[int, tuple[str, str]]:
    return {
        rank: (type(error).__name__, message_of(error)[:MAX_TEXT]) for rank, error in errors.items()
    }


def _causes(texts: Mapping[int, tuple[str, str]]) -> dict[int, tuple[str, str]]:
    """Errors that tell of more than a rank that has not come, which each world tells in its way.

    The text of a disagreement counts the calls from the start of the program, so its class counts.
    """
    return {
        rank: (name, "" if is_disagreement(name) else text)
        for rank, (name, text) in texts.items()
        if not is_of_another(name) and name != DeadlockError.__name__
    }


def _raised(text: tuple[str, str] | None) -> str:
    if text is None:
        return "raised nothing that is known"
    return f"raised {text[0]}: {text[1]}".split("\n")[0].rstrip(": ")
