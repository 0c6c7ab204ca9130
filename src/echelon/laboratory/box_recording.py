"""What a black box does in a run: it keeps each step, and a checkpoint in front of every stretch.

[Note: when the box cannot write]
A black box is there for the day on which a run fails. A run must not fail because of it: where the
disk is full or gone, a rank warns once for each stretch, training goes on, and the steps that are
not kept are missing in the folder. What is wrong with the script, such as a batch that cannot be
kept, is raised in the first step instead.

[Note: the first checkpoint]
It is written before the first step runs. If ranks fail later while a checkpoint is being written,
the one before it is still there, with all steps since; before the first there would be none.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor

from echelon.checkpoint import files
from echelon.checkpoint.async_save import AsyncSave, AsyncSaver
from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.items import CheckpointItems
from echelon.checkpoint.random_states import RandomChanges
from echelon.checkpoint.save_lock import lock
from echelon.checkpoint.saving import SaveOptions, Saving
from echelon.comm.group import Group
from echelon.comm.world import World
from echelon.diagnosis.failure_record import is_of_another
from echelon.errors import CheckpointError, CommError, StateError
from echelon.errors.message_text import message_of
from echelon.laboratory import box_folder
from echelon.laboratory.box_folder import StretchFolder
from echelon.laboratory.job_facts import JobFacts
from echelon.laboratory.kept_values import members
from echelon.laboratory.replayed_program import how_to_replay
from echelon.laboratory.step_log import MAX_TEXT, RecordKind, StepLogWriter
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background
from echelon.train.finite import FiniteGuard


@final
@dataclass(frozen=True, kw_only=True)
class BoxOptions:
    """How a black box keeps steps.

    Attributes:
        keep: how many checkpoints to leave, with the steps after them.
        every: how many steps there are from one checkpoint to the next.
        first_step: the number of the first step.
    """

    keep: int
    every: int
    first_step: int


@final
class BoxRecording:
    """Keeps the steps of one rank. All ranks make it together.

    Args:
        world: of the rank.
        group: the ranks that train together.
        folder: of the run.
        items: what is saved, by name: models, optimizers and objects with a state.
        options: how.

    Raises:
        StateError: another black box is at work in the folder.
        CheckpointError: the folder cannot be made.
    """

    def __init__(
        self,
        world: World,
        group: Group,
        folder: Path,
        items: Mapping[str, object],
        options: BoxOptions,
    ) -> None:
        self._world, self._group, self._items, self._options = world, group, items, options
        self._folder = folder
        self._root = folder / box_folder.NAME
        self._guards = {
            name: item.found for name, item in items.items() if isinstance(item, FiniteGuard)
        }
        self._facts = JobFacts.of(world)
        self._lock = ExitStack()  # on the first rank
        coordinator = Coordinator(group, self._root)
        name = coordinator.run_on_first("the folder of a black box", self._begin_attempt)
        self._attempt = box_folder.attempt_of(self._root, name)
        self._step = options.first_step - 1
        self._stretch: StretchFolder | None = None
        self._log: StepLogWriter | None = None
        self._random = RandomChanges(group.device)
        self._saves = AsyncSaver(group, self._at_end)
        self._save: AsyncSave | None = None
        self._pruning: threading.Thread | None = None
        self._is_closed = self._has_failed = False
        world.hints["black box"] = self._on_error
        self._forget = group.before_close(self._close_in_good_order)

    def begin(self, step: int, batch: object) -> None:
        """Keep what ``step`` begins with. All ranks call it.

        Raises:
            ArgumentError: the batch cannot be kept.
            StateError: the box is closed.
        """
        if self._is_closed:
            raise StateError("the black box is closed and keeps no further steps")
        self._ask_guards()
        if (step - self._options.first_step) % self._options.every == 0:
            self._open_stretch(step)
        self._finish_save()
        self._step = step
        record = {
            "batch": members(batch),
            "random": self._random.states(),
            "world_step": self._world.step,
        }
        self._append(RecordKind.BEGIN, record, "batch")

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Keep numbers of the current step; if one is not finite, mark its stretch.

        Raises:
            StateError: there is no step yet.
        """
        stretch = self._current_stretch()
        self._append(RecordKind.NOTE, dict(numbers), "note")
        if not all(map(is_finite, numbers.values())):
            self._try(stretch.mark_not_finite)

    def pin(self) -> Path:
        """Keep the stretch of the current step for good; its folder.

        Raises:
            StateError: there is no step yet.
        """
        stretch = self._current_stretch()
        self._try(stretch.pin)
        return stretch.path

    def _current_stretch(self) -> StretchFolder:
        if self._stretch is None:
            raise StateError("the black box has no step yet: call it in the loop over box.steps")
        return self._stretch

    def _close_in_good_order(self, seconds: float | None) -> None:
        if seconds is None:
            self.close()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and close the files.

        A checkpoint takes as long as any save: the ranks wait for each other in it no longer than
        their timeout. The removal of old stretches is not worth it to delay an end.
        """
        self._forget()
        if self._is_closed:
            return
        self._finish_save(waits=True)
        if self._pruning is not None:
            self._pruning.join(time_limits.PRUNE_S)
            if self._pruning.is_alive():
                warnings.warn(
                    f"the black box still removes old stretches in {self._root} after "
                    f"{time_limits.PRUNE_S:g} s and is not waited for: the next run goes on",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if self._group.rank == 0 and not self._has_failed:
            self._try(self._attempt.close)
        self._release()

    # Stretches -----------------------------------------------------------------------------------

    def _begin_attempt(self) -> str:
        """Lock the folder and make that of this attempt; its name."""
        files.make_folder(self._root)
        try:
            self._lock.enter_context(lock(self._root))
        except BlockingIOError as error:
            raise StateError(
                f"{self._root}: another black box is at work in this folder: give each run a "
                "folder of its own, and make one box in a run"
            ) from error
        attempt = box_folder.new_attempt(self._root)
        self._facts.write(attempt.facts)
        return attempt.path.name

    def _open_stretch(self, step: int) -> None:
        is_first = self._stretch is None
        if self._log is not None:
            self._log.close()
            self._log = None
        self._finish_save(waits=True)
        stretch = self._stretch = self._attempt.stretch(step)
        self._try(partial(self._open_log, stretch))
        self._try(partial(self._start_save, stretch, step - 1, waits=is_first))

    def _open_log(self, stretch: StretchFolder) -> None:
        stretch.path.mkdir(exist_ok=True)
        self._log = StepLogWriter(stretch.log(self._group.rank))
        self._random.forget()  # so that each log has all states

    def _start_save(self, stretch: StretchFolder, step: int, *, waits: bool) -> None:
        """Save the state after ``step`` in the background; with ``waits``, return when it is."""
        items = CheckpointItems.sort(self._items, self._group)
        coordinator = Coordinator(self._group, stretch.checkpoint)
        saving = Saving(coordinator, stretch.checkpoint, step, SaveOptions())
        saving.begin("Blackbox", items, rng=False)
        if waits:
            saving.finish()
        else:
            self._save = self._saves.start(saving)

    def _finish_save(self, *, waits: bool = False) -> None:
        """If the checkpoint is written, or after it is, remove stretches that nobody needs."""
        if self._save is None or not (waits or self._save.done):
            return
        self._save = None
        if self._try(self._saves.settle) and self._group.rank == 0:
            self._pruning = run_in_background("echelon black box", self._prune, self._pruning)

    def _prune(self, earlier: threading.Thread | None) -> None:
        """Remove stretches that nobody needs, once the removal before this one is over."""
        if earlier is not None:
            earlier.join()  # without a limit: nobody waits for this thread without one
        self._try(partial(self._attempt.prune, self._options.keep))

    def _at_end(self, finish: Callable[[float | None], None]) -> Callable[[], None]:
        """Nothing to register: ``close`` waits for the checkpoint."""
        return lambda: None

    # What goes wrong -----------------------------------------------------------------------------

    def _append(self, kind: RecordKind, value: object, where: str) -> None:
        log = self._log
        if log is not None and not self._try(partial(log.append, kind, self._step, value, where)):
            log.close()
            self._log = None  # until the next stretch, so that steps in it have no gaps

    def _try(self, step: Callable[[], object]) -> bool:
        """Whether ``step`` succeeds; if not, warn. See [Note: when the box cannot write]."""
        try:
            step()
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"the black box of rank {self._world.rank} could not keep all of step "
                f"{self._step} and later ones; training goes on: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return False
        return True

    def _ask_guards(self) -> None:
        """Mark the stretch if a guard has left out the step before."""
        for name, before in self._guards.items():
            guard = self._items[name]
            assert isinstance(guard, FiniteGuard)
            if guard.found is not before:
                self._guards[name] = guard.found
                if self._stretch is not None:
                    self._try(self._stretch.mark_not_finite)

    def _on_error(self, error: BaseException) -> str | None:
        """Note what ends this rank, and say how to replay it."""
        if self._is_closed or self._stretch is None or isinstance(error, SystemExit):
            return None
        self._has_failed = True
        record = {"type": type(error).__name__, "text": message_of(error)[:MAX_TEXT]}
        self._append(RecordKind.ERROR, record, "error")
        self._release()
        if isinstance(error, CommError) and is_of_another(type(error).__name__):
            return None  # it says so itself
        return f"replay it: {how_to_replay(self._folder, self._step, self._facts)}"

    def _release(self) -> None:
        self._is_closed = True
        if self._log is not None:
            self._log.close()
            self._log = None
        self._lock.close()


def is_finite(value: object) -> bool:
    """Whether a number, or each of a tensor on the host, is finite; True for anything else."""
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)
