"""The bytes of tensors in row-major order, whatever their device and strides are.

[Note: memory that cannot be written]
A tensor may lie in a file that is mapped for reading only (``numpy.memmap(mode="r")``). Torch does
not know it, and the first write fails, when half of a model may have been written. So a load checks
before it changes anything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from echelon.checkpoint.checksum import Checksum
from echelon.comm.buffers import is_expanded
from echelon.comm.object_bytes import flat_bytes
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of the tensor, on the host, has the bytes as they are saved."""
    return (
        device_of(tensor.device).is_on_host(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_ordinary(tensor: Tensor) -> bool:
    """Whether each element has memory of its own, which can be written."""
    return tensor.layout == torch.strided and not tensor.is_meta and not is_expanded(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes to save of a tensor; its own memory, if that has them."""
    plain = tensor.detach()
    if not is_plain(plain):
        plain = plain.resolve_conj().resolve_neg()
        plain = device_of(plain.device).copy_to_host(plain).contiguous()
    return memory_of(plain.view(-1))


def memory_of(flat: Tensor) -> memoryview:
    """The memory of a plain tensor, 1D."""
    return flat_bytes(flat).numpy().data


def copy_aside(tensor: Tensor, memory: Tensor) -> Tensor:
    """Copy ``tensor`` into ``memory`` of the host; a copy from a device may still be under way.

    A tensor of the host is copied by one ``memcpy``, a sixth faster than torch's loop.
    """
    copy = memory.view(tensor.dtype).view(tensor.shape)
    if is_plain(tensor):
        np.copyto(memory.numpy(), memory_of(tensor.detach().view(-1)))
    else:
        copy.copy_(tensor, non_blocking=True)
    return copy


def landing(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """1D memory to read elements of ``dtype`` into: that of ``tensor`` itself, if possible."""
    if is_plain(tensor) and tensor.dtype == dtype:
        return tensor.detach().view(-1)
    return torch.empty(tensor.numel(), dtype=dtype, device="cpu")


def land(tensor: Tensor, landed: Tensor) -> None:
    """Copy what was read to ``tensor``, if it was not read into its memory."""
    if landed.data_ptr() != tensor.data_ptr() or landed.dtype != tensor.dtype:
        with torch.no_grad():
            tensor.detach().copy_(landed.view(tensor.shape))


def digest_of(tensor: Tensor) -> str:
    """A checksum that differs where dtype, shape or bits differ."""
    checksum = Checksum()
    checksum.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    checksum.update(bytes_of(tensor))
    return checksum.hexdigest()


_MAPS = Path("/proc/self/maps")


def check_writable(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse named tensors in memory that cannot be written; see the note.

    Without ``/proc``, all memory counts as writable, and so does that of devices: the addresses of
    CUDA lie in a range that is reserved without any rights.

    Raises:
        ArgumentError: names the first tensor.
    """
    pages: _Pages | None = None
    for name, tensor in tensors:
        if tensor.numel() == 0 or not device_of(tensor.device).is_host:
            continue
        pages = _Pages() if pages is None else pages
        if pages.is_read_only(tensor.data_ptr()):
            raise ArgumentError(
                f"{name!r} lies in memory that is mapped for reading only, such as a file opened "
                "with mode='r', so nothing can be loaded into it; nothing was changed. Give it "
                "memory of its own: tensor.clone()"
            )


@final
class _Pages:
    """The ranges of memory that this process may read and not write."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        text = _MAPS.read_text() if _MAPS.exists() else ""
        for line in text.splitlines():
            place, rights = line.split(maxsplit=2)[:2]
            if "w" not in rights:
                start, stop = place.split("-")
                self._starts.append(int(start, 16))
                self._stops.append(int(stop, 16))

    def is_read_only(self, address: int) -> bool:
        """Whether the memory at ``address`` cannot be written; False if it is not known."""
        i = bisect_right(self._starts, address) - 1
        return i >= 0 and address < self._stops[i]
