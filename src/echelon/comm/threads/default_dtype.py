"""A default dtype for each simulated rank.

torch has one default dtype for the whole process, which ``torch.tensor(1.0)``, ``nn.Linear(2, 2)``
and ``integers / 2`` read. Libraries set it for as long as they build a model. Ranks that are
threads would build theirs in each other's dtype. Here a rank that sets it sets its own: as long as
any rank has another one than the process, every call of torch by a rank runs alone, with the
rank's own in place. While all have the process's, which is nearly always, a call costs two stores.

[Note: calls that have begun]
A call that began before some rank set another dtype may not have read the dtype yet. So the rank
that sets it says so first, and then waits until the calls that are under way have ended. The order
of the two stores on each side makes one of the two see the other: a call first says that it is
under way, and then looks whether the dtypes differ.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from echelon.comm.threads.installation import Installation
from echelon.errors import StateError

# How long another rank may take in one call of torch while this one waits for it, in seconds.
PATIENCE_S = 120.0
_LOOK_S = 0.0002

_set_of_process = torch.set_default_dtype
_get_of_process = torch.get_default_dtype
# They call hooks, which may wait for other ranks, and what they call comes by here by itself.
_CALLS_BACK = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})


@final
class RankDtype:
    """The default dtype of one simulated rank.

    Attributes:
        dtype: what the rank has set, or what it found when it started.
        under_way: whether it is in a call of torch. See [Note: calls that have begun].
    """

    __slots__ = ("dtype", "name", "under_way")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.under_way = False
        self.name = threading.current_thread().name

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``function`` of torch returns with this rank's default dtype."""
        if self.under_way or function in _CALLS_BACK:  # a call inside another has its dtype
            return function(*args, **kwargs)
        self.under_way = True
        try:
            if not _ranks.differ:
                return function(*args, **kwargs)
            self.under_way = False  # or who holds the lock would wait for us, and we for it
            with _ranks.held(self), _in_place(self.dtype):
                self.under_way = True
                return function(*args, **kwargs)
        finally:
            self.under_way = False


class _Ranks:
    """The simulated ranks of this process that have a default dtype of their own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.all: set[RankDtype] = set()
        self.differ = False

    @contextmanager
    def held(self, rank: RankDtype) -> Iterator[None]:
        """Let no other rank call torch, or set its dtype, while the body runs."""
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
                pass  # torch itself refuses what is no default dtype
            rank.dtype = dtype
            self._compare(rank)

    def add(self, rank: RankDtype) -> None:
        """Note a rank that starts."""
        with self.lock:
            self.all.add(rank)
            self._compare(rank)

    def remove(self, rank: RankDtype) -> None:
        """Forget a rank that ends."""
        with self.lock:
            self.all.discard(rank)
            self._compare(rank)

    def _compare(self, rank: RankDtype) -> None:
        """See whether any rank has another dtype than the process; the caller holds the lock."""
        differed = self.differ
        self.differ = any(one.dtype != _get_of_process() for one in self.all)
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


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def _in_place(dtype: torch.dtype) -> Iterator[None]:
    """Put ``dtype`` in the place that torch reads; the caller holds the lock."""
    before = _get_of_process()
    _set_of_process(dtype)
    try:
        yield
    finally:
        _set_of_process(before)


def _set_default_dtype(d: torch.dtype) -> None:
    """Stands for ``torch.set_default_dtype``: a simulated rank sets its own."""
    rank: RankDtype | None = getattr(_current, "rank", None)
    if rank is None:
        _set_of_process(d)
    else:
        _ranks.give(rank, d)


def _get_default_dtype() -> torch.dtype:
    """Stands for ``torch.get_default_dtype``: a simulated rank gets its own."""
    rank: RankDtype | None = getattr(_current, "rank", None)
    return _get_of_process() if rank is None else rank.dtype


def _install() -> None:
    vars(torch)["set_default_dtype"] = _set_default_dtype
    vars(torch)["get_default_dtype"] = _get_default_dtype


def _remove() -> None:
    vars(torch)["set_default_dtype"] = _set_of_process
    vars(torch)["get_default_dtype"] = _get_of_process


_in_torch = Installation(_install, _remove)


@contextmanager
def own_default_dtype(dtype: torch.dtype) -> Iterator[RankDtype]:
    """Give this thread a default dtype of its own while the body runs; at first ``dtype``."""
    rank = RankDtype(dtype)
    with _in_torch.of_rank():
        _ranks.add(rank)
        _current.rank = rank
        try:
            yield rank
        finally:
            _current.rank = None
            _ranks.remove(rank)
