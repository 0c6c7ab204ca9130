"""Asynchronous saves: the state is copied at once, and written by another thread during training.

[Note: a group for the thread]
The thread communicates with the other ranks while training communicates, so it has a group of its
own: two threads in one group could issue their collectives in different orders on different ranks.
The group is on the CPU. On a device, a wait of the thread would hold up the stream on which
training computes until the slowest rank has written its files, and two ranks whose threads and
trainings launch collectives in different orders could wait for each other for ever.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from echelon import checks
from echelon.checkpoint.saving import Saving, SkippedSave
from echelon.checkpoint.step_storage import Place
from echelon.checkpoint.tensors import copy_aside
from echelon.comm.group import Group
from echelon.comm.streams import device_of
from echelon.errors import CheckpointError
from echelon.launch.run import entered
from echelon.process.background_threads import run_in_background
from echelon.process.process_end import failing_process
from echelon.ranges import pack

# Registers a function to be called at the end of the world or the script, with the seconds that it
# may take if this rank has failed; returns its removal.
AtEnd = Callable[[Callable[[float | None], None]], Callable[[], None]]

_ALIGN_NBYTES = 64


@final
class AsyncSave:
    """A save that is under way.

    If it fails, it fails on all ranks, and its error is raised once on each, by the first of these
    calls, which all ranks make: ``wait``, ``poll``, the next save or load, and the end of the world
    or of the script, which has failed then. Nothing else raises it: ranks hear of it at different
    moments, and one that left its training alone would leave the others waiting.

    Args:
        saving: writes on another thread, which starts here; in a replay it writes nothing.
        group: the ranks that save; None: this rank alone.
        at_end: registers a function for the regular end of the world or the script.

    Attributes:
        path: the folder of the step.

    Example:
        >>> import tempfile
        >>> import echelon as ec
        >>> saving = ec.async_save(tempfile.mkdtemp(), step=3, epoch=1)
        >>> saving.wait().name
        'step-000000003'
    """

    def __init__(self, saving: Saving | SkippedSave, group: Group | None, at_end: AtEnd) -> None:
        self.path: Place = saving.target
        self._group = group
        self._error: BaseException | None = None
        self._was_raised = False
        self._thread = run_in_background("echelon save", self._run, saving)
        self._remove_at_end = at_end(self.finish)

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank, with or without an error; ranks differ in it."""
        return not self._thread.is_alive()

    def poll(self) -> bool:
        """Whether it has ended on all ranks, which agree on it in a small collective.

        A training that is to stop soon after a save has failed calls it now and then.

        Returns:
            The same on all ranks.

        Raises:
            CheckpointError: it failed, and the error was not raised before. On all ranks.
        """
        if not self._is_done_on_all():
            return False
        self.finish()
        return True

    def wait(self, timeout: float | None = None) -> Place:
        """Return when the step is committed. All ranks call it.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            The folder of the step.

        Raises:
            CheckpointError: it failed; or time is up, and it goes on on some rank. On all ranks.
        """
        if timeout is not None:
            timeout = checks.positive("timeout", timeout, threading.TIMEOUT_MAX)
        self._thread.join(timeout)
        if timeout is not None and not self._is_done_on_all():
            raise CheckpointError(f"is still being saved after {timeout} s", self.path)
        self._remove_at_end()
        if self._error is not None:
            self._was_raised = True
            raise self._error
        return self.path

    def finish(self, seconds: float | None = None) -> None:
        """Return when it has ended, or after ``seconds``; raise its error if that was not raised.

        Raises:
            CheckpointError: it failed, or time is up.
        """
        self._thread.join(seconds)
        if not self.done:
            raise CheckpointError(
                f"was given up: it was still being saved {seconds:g} s after this rank had failed",
                self.path,
            )
        self._remove_at_end()
        if self._error is not None and not self._was_raised:
            self._was_raised = True
            raise self._error

    def _run(self, saving: Saving | SkippedSave) -> None:
        try:
            saving.finish()
        except BaseException as error:  # raised by ``wait``, ``poll`` or ``finish``
            self._error = error

    def _is_done_on_all(self) -> bool:
        if self._group is None:
            return self.done
        done = self._group.all_gather_bytes(bytes([self.done]), label="end of a save")
        return all(part == b"\1" for part in done)


@final
class AsyncSaver:
    """The saves of one group, which come one at a time and share the memory of their copies.

    Args:
        group: the ranks, all of which construct it; None: this rank alone.
        at_end: registers a function for the regular end of the world or the script.

    Attributes:
        group: the same ranks on the CPU, for the thread. See [Note: a group for the thread].
    """

    _of_script: ClassVar[AsyncSaver | None] = None

    def __init__(self, group: Group | None, at_end: AtEnd) -> None:
        self.group: Group | None = None
        if group is not None and group.size > 1:
            self.group = group.subgroup(range(group.size), device="cpu")
        self._ranks, self._at_end = group, at_end
        self._device = device_of(torch.device("cpu") if group is None else group.device)
        self._last: AsyncSave | None = None
        self._memory: Tensor | None = None

    @classmethod
    def known(cls, group: Group | None) -> AsyncSaver | None:
        """The instance for a group, or for this rank alone; None if there is none yet."""
        home, key = _home(group)
        background = cls._of_script if home is None else home.belongings.get(key)
        assert background is None or isinstance(background, cls)
        return background

    @classmethod
    def of(cls, group: Group | None) -> AsyncSaver:
        """The instance for a group; all ranks call it, and the first call makes the instance."""
        background = cls.known(group)
        if background is None:
            home, key = _home(group)
            if home is None:
                background = cls._of_script = cls(None, _at_exit)
            else:
                background = home.belongings[key] = cls(group, home.before_close)
        return background

    def settle(self) -> None:
        """Wait for the save that is under way, if there is one.

        Raises:
            CheckpointError: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.finish()

    def start(self, saving: Saving) -> AsyncSave:
        """Copy what ``saving`` writes, and have it write the copies on another thread."""
        saving.hand_over(self.group)
        saving.prepare(partial(self._copy, saving))
        self._last = AsyncSave(saving, self._ranks, self._at_end)
        return self._last

    def _copy(self, saving: Saving) -> None:
        """Stage the values: copy them, so that training may go on while they are written."""
        values = saving.values()
        places = pack([tensor.nbytes for tensor in values], _ALIGN_NBYTES)
        if self._memory is None or self._memory.numel() < places.numel:
            self._memory = None  # freed before more is taken
            self._memory = self._device.host_memory(places.numel, torch.uint8)
        copies = [
            copy_aside(tensor, self._memory[start : start + tensor.nbytes])
            for start, tensor in zip(places.starts, values, strict=True)
        ]
        self._device.synchronize()
        saving.replace_values(copies)


def _home(group: Group | None) -> tuple[Group | None, object]:
    """The group that keeps the instance, and its key there; a rank alone uses its world's group."""
    if group is not None:
        return group, AsyncSaver
    world = entered()
    return (None if world is None else world.group), (AsyncSaver, "alone")


def _at_exit(finish: Callable[[float | None], None]) -> Callable[[], None]:
    """Have the script exit with an error if its last save fails."""
    end = atexit.register(failing_process(partial(finish, None)))
    return lambda: atexit.unregister(end)
