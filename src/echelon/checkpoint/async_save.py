"""Saves that go on while training does: a copy is made at once, and written by another thread.

[Note: ranks of their own order]
The thread exchanges facts with the other ranks while training communicates, so it has a group of
its own: two threads of one rank in one group could not agree with those of another who is first.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon import checks
from echelon.checkpoint.saving import Saving
from echelon.checkpoint.tensors import copy_aside
from echelon.comm import streams
from echelon.comm.group import Group
from echelon.errors import CheckpointError
from echelon.launch.run import entered
from echelon.process.background_threads import run_in_background

# Has a function called at the end of the world or the script; gives what takes that back.
AtEnd = Callable[[Callable[[], None]], Callable[[], None]]

_ALIGN_NBYTES = 64


@final
class AsyncSave:
    """A save that is under way.

    What went wrong is raised, on all ranks, by the first of: ``wait``, the next step of an
    optimizer that is saved, the next save, the end of the world or of the script, which then has
    failed.

    Args:
        saving: what is to be written; another thread begins with it.
        path: the folder of the step.
        optimizers: those of the save.
        at_end: has a function called when the world or the script ends in good order.
    """

    def __init__(
        self, saving: Saving, path: Path, optimizers: Sequence[Optimizer], at_end: AtEnd
    ) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._was_told = False
        self._thread = run_in_background("echelon save", self._run, saving)
        self._takers: list[Callable[[], None]] = [at_end(self.finish)]  # of what looks at it
        for optimizer in optimizers:
            hook = optimizer.register_step_pre_hook(lambda *_: self._tell())
            self._takers.append(hook.remove)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Return when the step is committed.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            the folder of the step.

        Raises:
            CheckpointError: it failed, or time is up and it goes on.
        """
        if timeout is not None:
            timeout = checks.positive("timeout", timeout, threading.TIMEOUT_MAX)
        self._thread.join(timeout)
        if not self.done:
            raise CheckpointError(f"is still being saved after {timeout} s", self.path)
        self._forget()
        if self._error is not None:
            self._was_told = True
            raise self._error
        return self.path

    def finish(self) -> None:
        """Return when it has ended; raise what nobody was told of."""
        self._thread.join()
        self._forget()
        self._tell()

    def _run(self, saving: Saving) -> None:
        try:
            saving.finish()
        except BaseException as error:  # raised by whoever asks next
            self._error = error

    def _tell(self) -> None:
        if self.done and self._error is not None and not self._was_told:
            self._was_told = True
            raise self._error

    def _forget(self) -> None:
        """Nothing need look at it any more."""
        for take_back in self._takers:
            take_back()
        self._takers.clear()


@final
class Background:
    """The saves of one group: one at a time, whose memory is used again by the next.

    Args:
        group: the ranks; None: this one alone. All of them make it.
        at_end: has a function called when the world or the script ends in good order.

    Attributes:
        group: the same ranks, for the exchange of facts. See [Note: ranks of their own order].
    """

    _of_script: ClassVar[Background | None] = None

    def __init__(self, group: Group | None, at_end: AtEnd) -> None:
        self.group: Group | None = None
        if group is not None and group.size > 1:
            self.group = group.subgroup(range(group.size))
        self._at_end = at_end
        self._last: AsyncSave | None = None
        self._memory: Tensor | None = None

    @classmethod
    def known(cls, group: Group | None) -> Background | None:
        """That of a group, or of this rank alone, if there is one."""
        home, key = _home(group)
        found = cls._of_script if home is None else home.belongings.get(key)
        assert found is None or isinstance(found, cls)
        return found

    @classmethod
    def of(cls, group: Group | None) -> Background:
        """That of a group; all ranks call it. The first call makes a group of the same ranks."""
        found = cls.known(group)
        if found is None:
            home, key = _home(group)
            if home is None:
                found = cls._of_script = cls(None, _at_exit)
            else:
                found = home.belongings[key] = cls(group, home.before_close)
        return found

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one.

        Raises:
            CheckpointError: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.finish()

    def start(
        self, saving: Saving, path: Path, optimizers: Sequence[Optimizer], device: torch.device
    ) -> AsyncSave:
        """Copy what ``saving`` is to write, and let it write on another thread."""
        saving.hand_over(self.group)
        saving.prepare(lambda: self._copy(saving, device))
        self._last = AsyncSave(saving, path, optimizers, self._at_end)
        return self._last

    def _copy(self, saving: Saving, device: torch.device) -> None:
        values = saving.values()
        starts, end = [], 0
        for one in values:
            starts.append(end)
            end += -(-one.numel() * one.itemsize // _ALIGN_NBYTES) * _ALIGN_NBYTES
        if self._memory is None or self._memory.numel() < end:
            self._memory = None  # freed before more is taken
            self._memory = streams.host_memory(end, torch.uint8, device)
        copies = [
            copy_aside(one, self._memory[start : start + one.numel() * one.itemsize])
            for start, one in zip(starts, values, strict=True)
        ]
        streams.synchronize(device)
        saving.replace_values(copies)


def _home(group: Group | None) -> tuple[Group | None, object]:
    """Where the background of a group is kept: with it; that of a rank alone, with its world."""
    if group is not None:
        return group, Background
    world = entered()
    return (None if world is None else world.group), (Background, "alone")


def _at_exit(finish: Callable[[], None]) -> Callable[[], None]:
    """Have a script fail whose last save does."""

    def end() -> None:
        try:
            finish()
        except BaseException as error:
            # The interpreter would print this and still exit with 0.
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    atexit.register(end)
    return lambda: atexit.unregister(end)
