"""Host and device as two memories on a machine that has one: the rules of two, kept by a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import echelon as ec
from echelon.comm import streams
from echelon.comm.call_arguments import Arguments

_COPIES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._foreach_copy_.default,
}
_here = threading.local()


class Memories(TorchDispatchMode):
    """Knows which tensors are on the host, and refuses what CUDA would.

    One operation takes tensors of one memory, unless it copies; single numbers may be anywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, StorageWeakRef] = {}
        self._device: dict[int, StorageWeakRef] = {}  # what was made inside

    def is_host(self, tensor: Tensor) -> bool:
        one = self._host.get(ec.local_shard(tensor).untyped_storage()._cdata)
        return one is not None and not one.expired()

    def put(self, tensor: Tensor, *, on_host: bool) -> None:
        one = StorageWeakRef(tensor.untyped_storage())
        self._device.pop(one.cdata, None)
        (self._host if on_host else self._device)[one.cdata] = one

    def device_nbytes(self) -> int:
        """Bytes of tensors that were made inside on the device, and are alive."""
        alive = [one for one in self._device.values() if not one.expired()]
        storages = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in alive]
        return sum(one.nbytes() for one in storages if one is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        where = [self.is_host(one) for one in given if one.dim()]
        mixed = {self.is_host(one) for one in given if one.numel() > 1}
        assert len(mixed) < 2 or func in _COPIES, f"{func} mixes memories"
        output = func(*args, **(kwargs or {}))
        old = {one.untyped_storage()._cdata for one in given}
        on_host = bool(where) and all(where) and func not in _COPIES
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in old:
                self.put(one, on_host=on_host)
        return output


class _Apart(streams.PlainDevice):
    """The CPU as a device whose memory is not that of the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_host = False

    def is_on_host(self, tensor: Tensor) -> bool:
        return True  # nobody asks for what ``Memories`` does not see

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        memories: Memories | None = getattr(_here, "memories", None)
        if memories is not None:
            memories.put(tensor, on_host=True)
        return tensor


def _check(
    self: Arguments, op: str, label: object, read: Any = (), written: Any = ()
) -> torch.dtype:
    memories: Memories | None = getattr(_here, "memories", None)
    for tensor in (*read, *written):
        host = memories is not None and tensor.numel() > 1 and memories.is_host(tensor)
        assert not host, f"{op} of a tensor on the host"
    return _plain_check(self, op, label, read, written)


_plain_check = Arguments.check_call


def separate(patch: pytest.MonkeyPatch | None = None) -> None:
    """Make offloaded state lie in another memory; for good, or as long as ``patch`` does."""
    patch = pytest.MonkeyPatch() if patch is None else patch
    patch.setitem(streams.kinds, "cpu", _Apart)
    patch.setattr(Arguments, "check_call", _check)


@contextmanager
def watched() -> Iterator[Memories]:
    """Inside, the tensors of this rank keep the rules of two memories, and are counted."""
    with Memories() as memories:
        _here.memories = memories
        try:
            yield memories
        finally:
            del _here.memories
