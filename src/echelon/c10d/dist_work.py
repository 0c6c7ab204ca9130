"""How communication under way looks to c10d: works, their futures, and receives from any rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.c10d.connection import Connection
from echelon.c10d.translate import UNSET, seconds_of
from echelon.comm.profiler_spans import NO_SPAN, caller_span, profiler_runs
from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall, caller
from echelon.errors import CommTimeout
from echelon.process.background_threads import run_on_idle_thread

# By number, the threads that fulfil a future now, and so run the callbacks that it was given.
_fulfilling: set[int] = set()


def is_in_callback() -> bool:
    """Whether this thread is not one of the program's, and runs a callback of a future."""
    return bool(_fulfilling) and threading.get_ident() in _fulfilling


def wait_for_all(works: Sequence[dist.Work]) -> None:
    """Return when the results of all works are there."""
    for work in works:
        work.wait()


@final
class C10dWork(dist.Work):
    """Operations of a group under way, as one work of c10d.

    Thread-safe, because a future is fulfilled on another thread than the user's.

    Args:
        parts: the operations; removed from the list as they end.
        result: the tensors that they write.
        finish: last step, on the thread that waits.
        timeout: seconds; None means the timeout of the group.
        kept: works that stay alive. C++ code may hold a work as a C++ object only, whose
            methods end with its Python object; so a work stays here until it is complete.
        connection: of the process group.
        source: rank in the group from which a receive gets its message.
    """

    def __init__(
        self,
        parts: list[Work],
        result: Sequence[Tensor],
        finish: Callable[[], None] | None = None,
        timeout: float | None = None,
        *,
        kept: set[C10dWork],
        connection: Connection,
        source: Callable[[], int] = lambda: -1,
    ) -> None:
        super().__init__()
        self._parts = parts  # which works of one batch share
        self._result = list(result)
        self._finish = finish
        self._timeout = timeout
        self._kept, self._connection = kept, connection
        self._source = source
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._complete = False
        self._future: torch.futures.Future[list[Tensor]] | None = None
        kept.add(self)

    def wait(self, timeout: timedelta = UNSET) -> bool:
        """Return when the result is there.

        Raises:
            CommError: the ranks disagree, one failed, or time is up.
        """
        seconds = seconds_of(timeout)
        self._wait(self._timeout if seconds is None else seconds)
        return True

    def is_completed(self) -> bool:
        """Whether the result is there, or will never be; then ``wait`` is not needed."""
        if not self._has_ended() and all(part.done() for part in list(self._parts)):
            self.exception()  # to the end, at once
        return self._has_ended()

    def is_under_way(self) -> bool:
        """Whether it has operations whose end nobody has seen; it does not look."""
        return bool(self._parts)

    def is_success(self) -> bool:
        """Whether the result is there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Why there is no result, once the operation has ended; waits for that."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        """The tensors that the operation writes."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future with the tensors that the operation writes; it needs nobody's ``wait``."""
        if self._future is None:
            ended: torch.futures.Future[None] = torch.futures.Future()
            # C++ code sees an error of a future only when it was raised in a callback.
            self._future = ended.then(lambda _: self._outcome())
            if self._connection.is_simulated:
                # C++ code would wait for the future without handing on the turn of this rank.
                self.exception()
            if self.is_completed():
                ended.set_result(None)
            else:
                # A rank that fails does not wait for what its futures wait for.
                run_on_idle_thread(partial(self._fulfil, ended))
        return self._future

    def source_rank(self) -> int:
        """Rank in the group from which a receive got its message; -1 for other operations."""
        return self._source()

    _source_rank = source_rank

    def _fulfil(self, ended: torch.futures.Future[None]) -> None:
        self.exception()
        thread = threading.get_ident()
        _fulfilling.add(thread)
        try:
            ended.set_result(None)
        finally:
            _fulfilling.discard(thread)

    def _outcome(self) -> list[Tensor]:
        self.wait()
        return self._result

    def _has_ended(self) -> bool:
        return self._complete or self._error is not None

    def _wait(self, seconds: float | None) -> None:
        if self._complete:
            return
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            assert seconds is not None  # the thread of the future waits, and longer than we may
            raise CommTimeout(str(self._parts[0].call), (), seconds)
        try:
            self._end(seconds)
        except CommTimeout:
            raise  # not the end: c10d may wait again
        except Exception as error:
            self._error = error
            self._kept.discard(self)
            raise
        finally:
            self._lock.release()

    def _end(self, seconds: float | None) -> None:
        if self._error is not None:
            raise self._error
        while self._parts:
            self._parts[0].wait(seconds)
            del self._parts[0]
        if not self._complete:
            if self._finish is not None:
                self._finish()
            self._complete = True
            self._kept.discard(self)


@final
class ReceiveFromAny(Work):
    """A receive of the next message with a tag, whichever rank sends it.

    Attributes:
        source: rank in the group that sent it; -1 until it is known.
    """

    def __init__(self, connection: Connection, tensor: Tensor, tag: int) -> None:
        group = connection.group
        call = CallSignature(
            "recv", tensor.dtype, (tensor.numel(),), None, None, f"tag {tag} from any rank"
        )
        super().__init__(
            CollectiveCall(call, caller(), 0, group.name, group.ranks[group.rank], False)
        )
        self.source = -1
        self._connection, self._tensor, self._tag = connection, tensor, tag
        self._receive: Work | None = None

    def done(self) -> bool:
        """Whether the message is there."""
        receive = self._found()
        return receive is not None and receive.done()

    def _found(self) -> Work | None:
        if self._receive is None:
            source = self._connection.probe(self._tag)
            if source is not None:
                self.source = source
                group = self._connection.group
                span = caller_span("recv", [self._tensor], group.name)
                with span if profiler_runs() else NO_SPAN:
                    self._receive = group.irecv(self._tensor, source, self._tag)
        return self._receive

    def _wait(self, timeout: float | None) -> None:
        receive = self._found()
        if receive is None:
            self._connection.await_message(self.call.signature, self._tag, timeout)
            receive = self._found()
        assert receive is not None
        receive.wait(timeout)
