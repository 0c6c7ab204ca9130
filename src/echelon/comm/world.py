"""The job as a script sees it: its ranks, its step counter, and its end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final

import torch

from echelon.comm import start_facts as shared_facts
from echelon.comm.group import Group
from echelon.comm.mesh import Mesh
from echelon.comm.threads.rank_breakpoints import stop_caller
from echelon.diagnosis.rank_monitor import StepCounter
from echelon.errors import CommError, RankError, UnsupportedError
from echelon.errors.message_text import line_of
from echelon.process import time_limits
from echelon.process.forks import mark
from echelon.process.offered_debugger import DEBUG_INSTEAD, no_debugger

# The time that a rank waits for others in one call before it raises. It is longer than a slow first
# step, and short enough that a user still watches.
DEFAULT_TIMEOUT_S = 300.0


_NO_PROCESS_GROUP = "Default process group has not been initialized"  # torch's own words
_INSTEAD = (
    "ec.init() makes no process group of torch.distributed: sample with "
    "ec.ResumableSampler(len(dataset), batch_size, world.group), or give what asks for it the rank "
    "and the size, as in DistributedSampler(dataset, world.size, world.rank), and communicate by "
    "world.group"
)


@final
class World:
    """All ranks of a job, seen from one of them. A context manager; closing it ends communication.

    Attributes:
        group: the group of all ranks.
        local_rank: the position of this rank among the ranks of its host.
        backend: ``"threads"``, ``"shm"``, ``"gloo"``, ``"nccl"`` or ``"single"``.
        steps: counts the optimizer steps of this rank.
        hints: functions that explain an error of the user's code if they know its cause, by name.
        is_asked: whether the script has asked for it by ``ec.init``.
        is_replay: whether a step of another run is computed again, so that nothing is to be written
            into the folder of that run.
    """

    def __init__(
        self,
        group: Group,
        *,
        backend: str,
        local_rank: int | None = None,
        close: Callable[[BaseException | None], None] = lambda error: None,
        steps: StepCounter | None = None,
    ) -> None:
        self.group = group
        self.backend = backend
        self.local_rank = group.rank if local_rank is None else local_rank
        self.steps = StepCounter() if steps is None else steps
        self._close = close
        self._closed = False
        self._mark = mark()
        self.is_asked = False
        self.is_replay = False
        self.hints: dict[str, Callable[[BaseException], str | None]] = {}

    @property
    def rank(self) -> int:
        """This rank in the job."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks in the job."""
        return self.group.size

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self.group.device

    @property
    def step(self) -> int:
        """The number of optimizer steps that this rank has made; failure reports show it.

        Steps of every ``torch.optim.Optimizer`` on the thread of this rank are counted. Of several
        optimizers, the one with the most steps counts. Set the number after a resume, or in a loop
        without an optimizer.

        Raises:
            ArgumentError: it is set to something other than an integer.
        """
        return self.steps.number

    @step.setter
    def step(self, number: int) -> None:
        self.steps.number = number

    @property
    def is_open(self) -> bool:
        """Whether the world has not been closed."""
        return not self._closed

    def mesh(self, **axes: int) -> Mesh:
        """Arrange all ranks on named axes; one length may be -1.

        Raises:
            ArgumentError: the lengths do not multiply to the number of ranks.
        """
        return Mesh(self.group, axes)

    def agree(self, /, **facts: Any) -> None:
        """Compare facts such as the options of a script between ranks. All ranks call it.

        Two values are the same if their JSON is: 1 is neither 1.0 nor True, a tuple equals a list,
        and the order of a dict does not matter.

        Raises:
            ArgumentError: a value cannot be written as JSON.
            StartMismatch: on every rank, with the first field that differs and all its values.

        Example:
            >>> def main(world):
            ...     try:
            ...         world.agree(steps=100, lr=0.001 if world.rank else 0.002)
            ...     except StartMismatch as error:
            ...         return error.field, error.found
            >>> from echelon.errors import StartMismatch
            >>> from echelon.launch.run import run
            >>> run(main, ranks=2)
            [('lr', {0: '0.002', 1: '0.001'}), ('lr', {0: '0.002', 1: '0.001'})]
        """
        shared_facts.agree(self.group, facts)

    def breakpoint(self, rank: int | None = None) -> None:
        """Stop all simulated ranks, and open the debugger in the line that has called this.

        ``docs/laboratory/debugger.md`` has its commands.

        Args:
            rank: the only rank that stops here; others go on, and need not call it. None: each
                rank that comes here stops.

        Raises:
            RankError: there is no such rank.
            UnsupportedError: the ranks are processes, which cannot be stopped together.
        """
        if rank is not None and not (isinstance(rank, int) and 0 <= rank < self.size):
            raise RankError("rank", rank, self.size)
        if self.size > 1 and self.backend != "threads":
            raise UnsupportedError(
                "world.breakpoint() stops simulated ranks, and these are processes: "
                + DEBUG_INSTEAD
            )
        if rank is None or rank == self.rank:
            stop_caller()

    def explain(self, error: BaseException) -> None:
        """Add notes with the known causes of an error of the user's code to the error."""
        hints = [no_process_group, *self.hints.values()]
        if self.size > 1 and self.backend != "threads":
            hints.append(no_debugger)
        for hint in hints:
            text = hint(error)
            if text is not None and text not in getattr(error, "__notes__", ()):
                error.add_note(text)

    def close(self, error: BaseException | None = None) -> None:
        """End communication. A second call does nothing.

        Args:
            error: the reason why this rank leaves early; the other ranks raise it as the cause.

        Raises:
            Exception: something that was under way, such as an asynchronous save, failed.
        """
        if self._closed:
            return
        self._closed = True
        self.steps.stop()
        if self._mark is not mark():  # this process is a fork, and the world is its parent's
            return
        if error is not None:
            self.explain(error)
        if error is None or isinstance(error, SystemExit):  # scripts end by ``sys.exit``, too
            try:
                self.group.prepare_close()
            except BaseException as problem:
                self._close(problem)
                raise
        else:
            self.end_what_is_begun(error)
        self._close(error)

    def end_what_is_begun(self, error: BaseException) -> None:
        """Give an asynchronous save some time to end when ``error`` has failed this rank.

        Where another rank has failed, or the user wants an end, it gets none.
        """
        if isinstance(error, CommError | KeyboardInterrupt):
            return
        try:
            self.group.prepare_close(time_limits.SAVE_S)
        except Exception as problem:  # the rank has failed already
            error.add_note(line_of(problem))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.backend}, on {self.device})"


def no_process_group(error: BaseException) -> str | None:
    """What to do where torch has no process group, because ``ec.init()`` makes none.

    Example:
        >>> no_process_group(KeyError("Default process group")) is None
        True
    """
    is_torchs = isinstance(error, ValueError | RuntimeError) and _NO_PROCESS_GROUP in str(error)
    return _INSTEAD if is_torchs else None
