"""One background thread that runs the asynchronous collectives of a group in the order of issue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch

from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommError, CommTimeout, StateError


@final
class _EngineWork(Work):
    """A collective that is queued, running or done."""

    def __init__(
        self, call: CollectiveCall, action: Callable[[], None] | None, engine: Engine
    ) -> None:
        super().__init__(call)
        self.action = action
        self.error: BaseException | None = None
        self._complete = threading.Event() if action is not None else None
        self._engine = engine

    def run(self) -> None:
        assert self.action is not None
        assert self._complete is not None
        try:
            self.action()
        except BaseException as error:  # raised again by whoever waits
            self.error = error
        self.action = None  # frees the tensors
        self._complete.set()

    def done(self) -> bool:
        return self._complete is None or self._complete.is_set()

    def _wait(self, timeout: float | None) -> None:
        engine = self._engine
        seconds = engine.timeout if timeout is None else timeout
        if self._complete is not None and not self._complete.wait(seconds):
            raise CommTimeout(str(self.call), engine.absent(), seconds)
        if self.error is not None:
            engine.is_told = True
            raise self.error


@final
class Engine:
    """Runs actions one after another: on the caller's thread if it waits, else in the background.

    Law: actions run in the order in which they were given, whatever thread runs them.

    Args:
        name: of the thread.
        timeout: seconds that ``wait`` of a work takes by default.
        absent: the ranks that the running action waits for.
    """

    def __init__(self, name: str, timeout: float, absent: Callable[[], Sequence[int]]) -> None:
        self._name = name
        self.absent = absent
        # The action itself gives up after the group's timeout and knows whom it waited for.
        self.timeout = timeout + 10.0
        self._queue: deque[_EngineWork] = deque()
        self._changed = threading.Condition()
        self._num_open = 0  # queued or running
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken: CommError | None = None
        self.is_told = False  # whether the owner has seen why it is broken

    def run(self, call: CollectiveCall, action: Callable[[], None]) -> Work:
        """Run ``action`` now if the caller blocks and nothing is outstanding; else in its turn.

        Raises:
            CommError: an earlier action failed in the background, and the owner did not know yet.
            StateError: an earlier action was left half done, so the ranks are out of step; or the
                engine is closed.
        """
        if self._broken is not None and not self.is_told:
            self.is_told = True
            raise self._broken
        if self._broken is not None:
            raise StateError(
                f"{call} cannot run, because an earlier call of this group failed "
                f"({type(self._broken).__name__}: {self._broken}): start a new world"
            )
        if self._closing:
            raise StateError(f"{call} cannot run, because this rank has closed the world")
        if call.blocking and not self._num_open:
            try:
                self._act(action)
            except CommError:
                self.is_told = True
                raise
            return _EngineWork(call, None, self)
        if torch.is_inference_mode_enabled():  # or the thread could not write the owner's tensors
            action = torch.inference_mode()(action)
        work = _EngineWork(call, lambda: self._act(action), self)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            self._queue.append(work)
            self._num_open += 1
            self._changed.notify()
        return work

    def _act(self, action: Callable[[], None]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            action()
        except CommError as error:
            self._broken = error
            raise

    def close(self) -> None:
        """End the thread after what is queued; what waits for dead ranks ends by itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                work = self._queue.popleft()
            work.run()
            with self._changed:
                self._num_open -= 1
