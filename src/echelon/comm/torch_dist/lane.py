"""One order of execution for the collectives of a group, beside the thread that issues them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import final

import torch

from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommTimeout, StateError


@final
class LaneWork(Work):
    """A collective that runs, or waits for its turn, on a lane."""

    def __init__(
        self,
        call: CollectiveCall,
        run: Callable[[], None],
        awaited: Callable[[], tuple[int, ...]],
    ) -> None:
        super().__init__(call)
        if torch.is_inference_mode_enabled():  # or the worker could not write the caller's tensors
            run = torch.inference_mode()(run)
        self._run: Callable[[], None] | None = run
        self._awaited = awaited
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether ``wait`` would return (or raise) at once."""
        return self._ended.is_set()

    def _wait(self, timeout: float | None) -> None:
        # Without a timeout of the caller, the collective itself ends at the group's.
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise CommTimeout(str(self.call), self._awaited(), timeout)
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Carry it out on this thread; what it raises is kept for the one that waits."""
        run, self._run = self._run, None  # tensors are not needed any more once it ran
        assert run is not None
        try:
            run()
        except BaseException as error:
            self._error = error
        del run
        self._ended.set()

    def refuse(self, error: BaseException) -> None:
        """End it without carrying it out."""
        self._run = None
        self._error = error
        self._ended.set()


@final
class Lane:
    """Runs works in the order of their issue.

    A work that its caller waits for runs on the caller's thread when nothing else is outstanding,
    which saves two thread switches; all others run on one worker thread, started at the first.
    The worker is what makes a reduction proceed while backward computes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[LaneWork] = deque()
        self._changed = threading.Condition()
        self._busy = False  # a work runs, here or on a caller's thread
        self._closed = False
        self._worker: threading.Thread | None = None

    def issue(self, work: LaneWork) -> LaneWork:
        """Carry ``work`` out now or later, in order."""
        with self._changed:
            if self._closed:
                raise StateError(f"{work.call} was issued after its world was closed")
            inline = work.call.blocking and not self._busy and not self._queue
            if inline:
                self._busy = True
            else:
                self._queue.append(work)
                if self._worker is None:
                    self._worker = threading.Thread(
                        target=self._work, name=f"echelon lane {self._name}", daemon=True
                    )
                    self._worker.start()
                self._changed.notify_all()
        if inline:
            try:
                work.run()
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        return work

    def close(self, failed: bool, seconds: float) -> bool:
        """Refuse new works, end those outstanding (if not ``failed``) and join the worker.

        Returns:
            whether the worker has ended within ``seconds``.
        """
        with self._changed:
            self._closed = True
            if failed:
                while self._queue:
                    work = self._queue.popleft()
                    work.refuse(StateError(f"{work.call} was dropped: its world was closed"))
            self._changed.notify_all()
            worker = self._worker
        if worker is None or worker is threading.current_thread():
            return True
        worker.join(seconds)
        return not worker.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._busy or not self._queue:
                    if self._closed and not self._queue and not self._busy:
                        return
                    self._changed.wait()
                work = self._queue.popleft()
                self._busy = True
            work.run()
            del work  # or its tensors live until the next one
            with self._changed:
                self._busy = False
                self._changed.notify_all()
