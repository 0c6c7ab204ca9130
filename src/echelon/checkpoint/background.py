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
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon import streams
from echelon.checkpoint.saving import Saving
from echelon.errors import CheckpointError
from echelon.world.group import Group

__all__ = ["AsyncSave", "Background"]

_ALIGN_NBYTES = 64


@final
class AsyncSave:
    """A save that is under way.

    What went wrong is raised, on all ranks, by the first of: ``wait``, the next step of an
    optimizer that is saved, the next save, the end of the world or of the script, which then has
    failed.
    """

    def __init__(self, saving: Saving, path: Path) -> None:
        self.path = path
        self._saving = saving
        self._error: BaseException | None = None
        self._was_told = False
        self._hooks: list[Any] = []
        self._thread = threading.Thread(target=self._run, name="echelon save", daemon=True)

    def start(self, optimizers: Sequence[Optimizer]) -> None:
        """Begin to write."""
        for optimizer in optimizers:
            hook = optimizer.register_step_pre_hook(lambda *_: self._look())
            self._hooks.append(hook)
        atexit.register(self._end_script)
        self._thread.start()

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
        self._thread.join(timeout)
        if not self.done:
            raise CheckpointError(f"is still being saved after {timeout} s", self.path)
        self._settle()
        if self._error is not None:
            self._was_told = True
            raise self._error
        return self.path

    def _run(self) -> None:
        try:
            self._saving.finish()
        except BaseException as error:  # raised by whoever asks next
            self._error = error

    def _look(self) -> None:
        if self.done:
            self._settle()
            if self._error is not None and not self._was_told:
                self.wait()

    def _settle(self) -> None:
        """Nothing need look at it any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        atexit.unregister(self._end_script)

    def finish(self) -> None:
        """Return when it has ended; raise what nobody was told of."""
        self._thread.join()
        self._settle()
        if self._error is not None and not self._was_told:
            self.wait()

    def _end_script(self) -> None:
        try:
            self.finish()
        except BaseException as error:
            # The interpreter would print this and still exit with 0.
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@final
class Background:
    """The saves of one group: one at a time, whose memory is used again by the next.

    Attributes:
        group: the same ranks, for the exchange of facts. See [Note: ranks of their own order].
    """

    _known: ClassVar[weakref.WeakKeyDictionary[Group, Background]] = weakref.WeakKeyDictionary()
    _alone: ClassVar[Background | None] = None

    def __init__(self, group: Group | None) -> None:
        self.group: Group | None = None
        if group is not None and group.size > 1:
            self.group = group.subgroup(range(group.size))
        self._last: AsyncSave | None = None
        self._memory: Tensor | None = None

    @classmethod
    def of(cls, group: Group | None) -> Background:
        """That of a group; all ranks call it. The first call makes a group of the same ranks."""
        if group is None:
            cls._alone = cls._alone or cls(None)
            return cls._alone
        if group not in cls._known:
            cls._known[group] = cls(group)
        return cls._known[group]

    @classmethod
    def settle(cls, group: Group | None) -> None:
        """Wait for the save of ``group`` that is under way, if there is one.

        Raises:
            CheckpointError: it failed.
        """
        found = cls._alone if group is None else cls._known.get(group)
        if found is not None and found._last is not None:
            last, found._last = found._last, None
            last.finish()

    def start(
        self, saving: Saving, path: Path, optimizers: Sequence[Optimizer], device: torch.device
    ) -> AsyncSave:
        """Copy what ``saving`` is to write, and let it write on another thread."""
        self._copy(saving, device)
        self._last = AsyncSave(saving, path)
        if self.group is not None:
            self.group.before_close(self._last.finish)
        self._last.start(optimizers)
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
        copies = []
        for start, one in zip(starts, values, strict=True):
            flat = self._memory[start : start + one.numel() * one.itemsize].view(one.dtype)
            copies.append(flat.view(one.shape))
            copies[-1].copy_(one, non_blocking=True)
        streams.synchronize(device)
        saving.replace_values(copies)
