"""An executor that runs the collectives of a group one by one, in the order of their issue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommError, CommTimeout, EchelonError, StateError
from echelon.process.background_threads import run_in_background

Action = Callable[[], None]


@final
class OrderedWork(Work):
    """A collective that is queued for the worker thread of an ``OrderedExecutor``.

    A lock is held until the collective has ended. An event does the same in 20 calls of Python.
    """

    def __init__(self, call: CollectiveCall, executor: OrderedExecutor, action: Action) -> None:
        super().__init__(call)
        self._executor = executor
        self.action: Action | None = action
        self.error: BaseException | None = None
        self._has_ended = False
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._has_ended

    def _is_over(self) -> bool:
        return self._has_ended

    def _wait(self, timeout: float | None) -> None:
        executor = self._executor
        seconds = executor.wait_s if timeout is None else timeout
        if not self._has_ended:
            if not self._under_way.acquire(timeout=-1 if seconds is None else max(seconds, 0.0)):
                assert seconds is not None
                raise CommTimeout(str(self.call), executor.awaited(), seconds)
            self._under_way.release()  # for other threads that wait
        if self.error is not None:
            executor.note_raised(self.error)
            raise self.error

    def end(self, error: BaseException | None) -> None:
        """Release the tensors and wake the threads that wait."""
        self.action, self.error = None, error
        self._has_ended = True
        self._under_way.release()


@final
class OrderedExecutor:
    """Runs actions one by one, in the order in which they were issued.

    A blocking action runs on the thread of its caller if no other is outstanding, which saves two
    thread switches. All others run on one worker thread, so that a reduction proceeds while
    backward computes.

    Law: at most one action runs at any time.

    Args:
        name: the name of the worker thread.
        awaited: returns the ranks (in the job) that the running action waits for.
        wait_s: the seconds that waiting for a work takes by default; None waits until the action
            ends by itself.
        stops_at_error: whether a ``CommError`` stops the executor, because ranks are out of step.
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
        self._error: CommError | None = None  # that stopped the executor
        self._error_was_raised = False
        self._name = name
        self._queue: deque[OrderedWork] = deque()
        self._changed = threading.Condition()
        self._num_open = 0  # works that are queued or run on the worker
        self._running = threading.Lock()  # held by the thread that runs an action
        self._closed = False
        self._worker: threading.Thread | None = None

    def issue(
        self, call: CollectiveCall, action: Callable[..., None], *args: object
    ) -> Work | None:
        """Run a blocking action, ``action(*args)``, now if no other is outstanding; else queue it.

        Returns None for one that has run.

        After an error has stopped the executor, raise the error itself if no caller has seen it
        yet, and ``StateError`` afterwards.
        """
        if self._error is not None:
            raise self._stopped(call, self._error)
        if self._closed:
            raise _closed(call)
        if not call.blocking or self._num_open or not self._running.acquire(False):
            return self._enqueue(call, partial(action, *args))
        try:
            action(*args)
        except CommError as error:
            self._stop(error)
            self.note_raised(error)
            raise
        finally:
            self._running.release()
        return None

    def close(self, *, drop: bool = False, seconds: float | None = None) -> bool:
        """Refuse new actions, run the outstanding ones (or ``drop`` them), and join the worker.

        Return whether the worker ended within ``seconds``.
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

    def _ask_to_end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def note_raised(self, error: BaseException) -> None:
        """Note that a caller has seen this error."""
        if error is self._error:
            self._error_was_raised = True

    def _stopped(self, call: CollectiveCall, error: CommError) -> EchelonError:
        """The error of a call after the executor has stopped."""
        if not self._error_was_raised:
            self._error_was_raised = True
            return error
        stopped = StateError(
            f"{call} cannot run, because an earlier call of this group failed "
            f"({type(error).__name__}: {error}): start a new world"
        )
        stopped.__cause__ = error
        return stopped

    def _stop(self, error: CommError) -> None:
        if self._stops_at_error:
            self._error = error

    def _enqueue(self, call: CollectiveCall, action: Action) -> OrderedWork:
        """Queue the action for the worker thread."""
        if torch.is_inference_mode_enabled():  # the worker writes inference tensors only in it
            action = torch.inference_mode()(action)
        work = OrderedWork(call, self, action)
        with self._changed:
            if self._closed:
                raise _closed(call)
            self._num_open += 1
            self._queue.append(work)
            if self._worker is None:
                self._worker = run_in_background(self._name, self._work, stop=self._ask_to_end)
            self._changed.notify()
        return work

    def _run(self, work: OrderedWork) -> None:
        """Run the action of a work, and keep its error for the thread that waits."""
        assert work.action is not None
        error: BaseException | None = self._error
        if error is None:
            try:
                work.action()
            except CommError as problem:
                self._stop(problem)  # before the waiting thread wakes up
                error = problem
            except BaseException as problem:
                error = problem
        work.end(error)

    def _work(self) -> None:
        # Of this thread. A view that was made without gradients is not written to with them.
        torch.set_grad_enabled(False)
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                work = self._queue.popleft()
            with self._running:
                self._run(work)
            del work  # else its tensors would live until the next one
            with self._changed:
                self._num_open -= 1


def _closed(call: CollectiveCall) -> StateError:
    return StateError(f"{call} was issued after its world was closed, or its group destroyed")
