"""One order of execution for the collectives of a group, on its callers' threads and one more."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch

from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommError, CommTimeout, EchelonError, StateError

Action = Callable[[], None]


@final
class CompletedWork(Work):
    """A collective that its caller has run, so there is nothing to wait for."""

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return True

    def _wait(self, timeout: float | None) -> None:
        pass  # it was complete when it was made


@final
class OrderedWork(Work):
    """A collective that the worker of an ``OrderedExecutor`` runs in its turn."""

    def __init__(self, call: CollectiveCall, executor: OrderedExecutor, action: Action) -> None:
        super().__init__(call)
        self._executor = executor
        self.action: Action | None = action
        self.error: BaseException | None = None
        self._ended = threading.Event()

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._ended.is_set()

    def _wait(self, timeout: float | None) -> None:
        executor = self._executor
        seconds = executor.wait_s if timeout is None else timeout
        if not self._ended.wait(seconds):
            assert seconds is not None
            raise CommTimeout(str(self.call), executor.awaited(), seconds)
        if self.error is not None:
            executor.note_raised(self.error)
            raise self.error

    def end(self, error: BaseException | None) -> None:
        """Let go of the tensors and wake who waits."""
        self.action, self.error = None, error
        self._ended.set()


@final
class OrderedExecutor:
    """Runs actions one after another, in the order in which they were issued.

    An action whose caller waits for it runs on the caller's thread when nothing else is
    outstanding, which saves two thread switches; all others run on one worker thread, started at
    the first. The worker is what makes a reduction proceed while backward computes.

    Law: at any time at most one action runs.

    Args:
        name: of the worker thread.
        awaited: the ranks (in the job) that the running action waits for.
        wait_s: seconds that the wait for a work takes by default; None: until the action ends,
            which it does itself after the timeout of the group.
        stops_at_error: whether no action runs after one that ended with a ``CommError``, because
            the ranks are out of step then.
    """

    def __init__(
        self,
        name: str,
        awaited: Callable[[], Sequence[int]],
        *,
        wait_s: float | None = None,
        stops_at_error: bool = False,
    ) -> None:
        self.awaited = awaited
        self.wait_s = wait_s
        self._stops_at_error = stops_at_error
        self._error: CommError | None = None  # at which it has stopped
        self._error_was_raised = False  # to somebody who waited
        self._name = name
        self._queue: deque[OrderedWork] = deque()
        self._changed = threading.Condition()
        self._num_open = 0  # works that are queued or run on the worker
        self._running = threading.Lock()  # held by the thread that runs an action
        self._closed = False
        self._worker: threading.Thread | None = None

    def issue(self, call: CollectiveCall, action: Action) -> Work:
        """Run ``action`` now, if the caller waits for it and nothing is outstanding; else in turn.

        Raises:
            StateError: the executor is closed, or has stopped at an error.
            CommError: the one at which it has stopped, if nobody has seen it yet.
            Exception: what an action raises that runs here.
        """
        if self._error is not None:
            raise self._stopped(call, self._error)
        if self._closed:
            raise StateError(f"{call} was issued after its world was closed")
        if not call.blocking or self._num_open or not self._running.acquire(False):
            return self._enqueue(call, action)
        try:
            action()
        except CommError as error:
            self._stop(error)
            self.note_raised(error)
            raise
        finally:
            self._running.release()
        return CompletedWork(call)

    def close(self, *, drop: bool = False, seconds: float | None = None) -> bool:
        """Refuse new actions, run those outstanding (or ``drop`` them) and join the worker.

        Returns:
            Whether the worker has ended within ``seconds``.
        """
        with self._changed:
            self._closed = True
            while drop and self._queue:
                work = self._queue.popleft()
                self._num_open -= 1
                work.end(StateError(f"{work.call} was dropped: its world was closed"))
            self._changed.notify_all()
            worker = self._worker
        if worker is None or worker is threading.current_thread():
            return True
        worker.join(seconds)
        return not worker.is_alive()

    def note_raised(self, error: BaseException) -> None:
        """Note that somebody sees this error."""
        if error is self._error:
            self._error_was_raised = True

    def _stopped(self, call: CollectiveCall, error: CommError) -> EchelonError:
        """What to raise for a call after the executor has stopped."""
        if not self._error_was_raised:
            self._error_was_raised = True
            return error
        return StateError(
            f"{call} cannot run, because an earlier call of this group failed "
            f"({type(error).__name__}: {error}): start a new world"
        )

    def _stop(self, error: CommError) -> None:
        if self._stops_at_error:
            self._error = error

    def _enqueue(self, call: CollectiveCall, action: Action) -> OrderedWork:
        """Leave the action to the worker."""
        if torch.is_inference_mode_enabled():  # or the worker could not write the caller's tensors
            action = torch.inference_mode()(action)
        work = OrderedWork(call, self, action)
        with self._changed:
            if self._closed:
                raise StateError(f"{call} was issued after its world was closed")
            self._num_open += 1
            self._queue.append(work)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()
            self._changed.notify()
        return work

    def _run(self, work: OrderedWork) -> None:
        """Carry a work out; what it raises is kept for the one that waits."""
        assert work.action is not None
        error: BaseException | None = self._error
        if error is None:
            try:
                work.action()
            except CommError as problem:
                self._stop(problem)  # before anybody hears of it
                error = problem
            except BaseException as problem:
                error = problem
        work.end(error)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                work = self._queue.popleft()
            with self._running:
                self._run(work)
            del work  # or its tensors live until the next one
            with self._changed:
                self._num_open -= 1
