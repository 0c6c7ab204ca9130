"""A default dtype for each simulated rank.

torch has one default dtype for the whole process, which ``torch.tensor(1.0)``, ``nn.Linear(2, 2)``
and ``integers / 2`` read. Libraries set it while they build a model, so ranks that are threads
would build their models in each other's dtype. Here ``torch.set_default_dtype`` sets the dtype of
the calling rank only. As long as the dtype of any rank differs from that of the process, every call
of torch by a rank runs alone, with the dtype of the rank in place. While none differs, which is
nearly always, a call costs two stores.

[Note: calls that have begun]
A call that began before some rank set another dtype may not have read the dtype yet. So the rank
first sets ``differ``, and then waits until the calls under way have ended. A call first sets
``under_way``, and then reads ``differ``. By this order of stores, at least one of the two sees the
other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from echelon.comm.threads.installation import Installation
from echelon.errors import StateError
from echelon.process.operating_system import at_fork
from echelon.process.replacement import Replacement

# The time that a rank waits for another one to end a call of torch.
PATIENCE_S = 120.0
_LOOK_S = 0.0002

_set_of_process = torch.set_default_dtype
_get_of_process = torch.get_default_dtype
# These call hooks, which may wait for other ranks. The calls of torch in hooks are seen separately.
_CALLS_BACK = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


@final
class RankDtype:
    """The default dtype of one simulated rank.

    Attributes:
        dtype: the dtype that the rank has set, or that of the process when the rank started.
        under_way: whether the rank is in a call of torch. See [Note: calls that have begun].
    """

    __slots__ = ("dtype", "name", "under_way")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.under_way = False
        self.name = threading.current_thread().name

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``function`` of torch with the default dtype of this rank."""
        if self.under_way or function in _CALLS_BACK:  # the outer call has set the dtype
            return function(*args, **kwargs)
        self.under_way = True
        try:
            if not _ranks.differ:
                return function(*args, **kwargs)
            self.under_way = False  # else the owner of the lock would wait for this call
            with _ranks.held(self), _in_place(self.dtype):
                self.under_way = True
                return function(*args, **kwargs)
        finally:
            self.under_way = False


class _Ranks:
    """The simulated ranks of this process, and whether any of their dtypes ``differ``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.all: set[RankDtype] = set()
        self.differ = False

    @contextmanager
    def held(self, rank: RankDtype) -> Iterator[None]:
        """Keep all other ranks from calling torch or setting their dtypes in the body."""
        if not self.lock.acquire(timeout=PATIENCE_S):
            raise StateError(
                f"{rank.name} waited {PATIENCE_S:g} s to call torch with the default dtype "
                f"{rank.dtype}, while another simulated rank was in one call of torch with its "
                "own: do not wait for other ranks inside of such a call, or use "
                'world="processes"'
            )
        try:
            yield
        finally:
            self.lock.release()

    def give(self, rank: RankDtype, dtype: torch.dtype) -> None:
        """Set the default dtype of ``rank``."""
        with self.held(rank):
            with _in_place(dtype):
                pass  # torch refuses a dtype that cannot be the default
            rank.dtype = dtype
            self._compare(rank)

    def add(self, rank: RankDtype) -> None:
        """Add a rank that starts."""
        with self.lock:
            self.all.add(rank)
            self._compare(rank)

    def remove(self, rank: RankDtype) -> None:
        """Remove a rank that ends."""
        with self.lock:
            self.all.discard(rank)
            self._compare(rank)

    def _compare(self, rank: RankDtype) -> None:
        """Set ``differ``, and wait for calls under way if it becomes true; needs the lock."""
        differed = self.differ
        self.differ = any(other.dtype != _get_of_process() for other in self.all)
        if differed or not self.differ:
            return
        deadline = time.monotonic() + PATIENCE_S
        for other in self.all - {rank}:
            while other.under_way:
                if time.monotonic() > deadline:
                    raise StateError(
                        f"{rank.name} sets torch's default dtype to {rank.dtype} and has waited "
                        f"{PATIENCE_S:g} s for {other.name} to end one call of torch: do not wait "
                        'for other ranks inside of such a call, or use world="processes"'
                    )
                time.sleep(_LOOK_S)


_ranks = _Ranks()
_current = threading.local()


def _after_fork() -> None:
    """In a forked child only the forking thread lives on; the lock may belong to another."""
    _ranks.lock = threading.RLock()
    _ranks.all.clear()
    _ranks.differ = False


at_fork(after_in_child=_after_fork)


@contextmanager
def _in_place(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype of the process in the body; needs the lock."""
    before = _get_of_process()
    _set_of_process(dtype)
    try:
        yield
    finally:
        _set_of_process(before)


def _set_default_dtype(d: torch.dtype) -> None:
    """Replaces ``torch.set_default_dtype``: a simulated rank sets its own dtype."""
    rank: RankDtype | None = getattr(_current, "rank", None)
    if rank is None:
        _set_of_process(d)
    else:
        _ranks.give(rank, d)


def _get_default_dtype() -> torch.dtype:
    """Replaces ``torch.get_default_dtype``: a simulated rank gets its own dtype."""
    rank: RankDtype | None = getattr(_current, "rank", None)
    return _get_of_process() if rank is None else rank.dtype


_in_torch = Installation.of(
    Replacement(torch, "set_default_dtype", _set_default_dtype),
    Replacement(torch, "get_default_dtype", _get_default_dtype),
)


@contextmanager
def own_default_dtype(dtype: torch.dtype) -> Iterator[RankDtype]:
    """Give this thread a default dtype of its own in the body, which starts as ``dtype``."""
    rank = RankDtype(dtype)
    with _in_torch.of_rank():
        _ranks.add(rank)
        _current.rank = rank
        try:
            yield rank
        finally:
            _current.rank = None
            _ranks.remove(rank)
