"""How much memory a process takes at most, and how many bytes of activations graphs keep."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["PeakMemory", "SavedBytes"]

PERIOD_S = 0.005


class PeakMemory:
    """Measures from a thread how much the memory of this process grows at most while a block runs.

    A page that several processes map counts as a share for each (proportional set size), so that
    shared memory is not counted once for every rank that can see it.

    Attributes:
        mib: the largest growth seen.
    """

    def __init__(self) -> None:
        self.mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)
        self._start_mib = 0.0

    def __enter__(self) -> Self:
        self._start_mib = _mib()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.mib = max(self.mib, _mib() - self._start_mib)


def _mib() -> float:
    """The proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line 'Pss:'")


class _SavedTensor:
    """A saved tensor, counted as long as a graph has it."""

    def __init__(self, tensor: Tensor, owner: SavedBytes) -> None:
        self.tensor, self._owner = tensor, owner
        owner.change(tensor, +1)

    def __del__(self) -> None:
        self._owner.change(self.tensor, -1)


class SavedBytes:
    """Counts while its block runs, on one thread. Memory that several graph nodes keep counts once.

    Args:
        model: whose parameters do not count.

    Attributes:
        most: bytes at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = {param.untyped_storage().data_ptr() for param in model.parameters()}
        self._uses: dict[int, int] = {}
        self._now = self.most = 0
        self._hooks = saved_tensors_hooks(
            lambda t: _SavedTensor(t, self), lambda saved: saved.tensor
        )

    def change(self, tensor: Tensor, by: int) -> None:
        """A graph saved a tensor, or released it."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._params:
            return
        before = self._uses.get(address, 0)
        self._uses[address] = before + by
        if before == 0 or before + by == 0:
            self._now += by * storage.nbytes()
            self.most = max(self.most, self._now)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
