"""Buffers of collectives: tensors and bytes as 1D buffers, and new memory that is really there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.comm.streams import device_of
from echelon.errors import DeviceMemoryError, SharedMemoryError

# Smaller requests are granted unasked: reading how much memory is free would take longer.
_LARGE_NBYTES = 2**26


def flattened(tensor: Tensor) -> tuple[Tensor, tuple[Callable[[], None], ...]]:
    """``tensor`` as a 1D buffer, and the steps that copy the buffer back if it is a copy."""
    data = writable(tensor)
    if data.is_contiguous() and not data.is_conj() and not data.is_neg():
        return data if data.dim() == 1 else data.view(-1), ()
    buffer = data.resolve_conj().resolve_neg().contiguous().view(-1)

    def copy_back() -> None:
        data.copy_(buffer.view(data.shape))

    return buffer, (copy_back,)


def writable(tensor: Tensor) -> Tensor:
    """``tensor`` as a transport writes it: without a graph, and without marking other elements.

    A view and its base count their writes together. So a write into a part, such as a chunk for
    one microbatch, would have autograd refuse the elements beside it, which nobody has written.
    """
    # Autograd refuses to write to some tensors; to detach the others would take 0.3 µs.
    if tensor._is_view():
        base = tensor._base
        if base is not None and base.numel() > tensor.numel():
            return tensor.data  # which counts its writes for itself
        return tensor.detach()
    return tensor.detach() if tensor.requires_grad else tensor


def disjoint_input(input: Tensor, outputs: Sequence[Tensor], in_place: int | None = None) -> Tensor:
    """``input``, or a copy of it where an output overlaps it, because peers may still read it.

    ``in_place`` is the address of this rank's output. ``input`` may begin there, because it is
    overwritten with the same values.
    """
    if input.data_ptr() != in_place:
        for output in outputs:
            if overlap(input, output):
                return input.clone()
    return input


def overlap(flat: Tensor, other: Tensor) -> bool:
    """Whether two 1D buffers have memory in common."""
    start, other_start = flat.data_ptr(), other.data_ptr()
    return start < other_start + other.nbytes and other_start < start + flat.nbytes


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory, as after ``expand``."""
    return not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1


def from_bytes(data: bytes) -> Tensor:
    """A copy of the bytes. 1D uint8."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def zeros(numel: int, dtype: torch.dtype, device: torch.device, *, what: str) -> Tensor:
    """A new 1D tensor that stays an ordinary one when the caller's inference mode ends."""
    require_memory(numel * dtype.itemsize, device, what=what)
    with torch.inference_mode(False):
        return torch.zeros(numel, dtype=dtype, device=device)


def require_memory(nbytes: int, device: torch.device, *, what: str) -> None:
    """Raise ``SharedMemoryError`` if the CPU has less memory than this.

    The kernel would grant it all the same, and kill the process when it writes to it.
    """
    if (
        device_of(device).is_host
        and nbytes > _LARGE_NBYTES
        and nbytes > (available := available_nbytes())
    ):
        raise SharedMemoryError(what, nbytes, available)


def out_of_memory(
    what: str, nbytes: int, device: torch.device, error: torch.OutOfMemoryError
) -> DeviceMemoryError:
    """The error that says for what ``device`` had no memory, where torch has raised ``error``."""
    return DeviceMemoryError(what, nbytes, str(device), str(error).partition("\n")[0])


def available_nbytes() -> int:
    """Memory of the host that is free, on the machine and in this process's control group.

    Only Linux tells; elsewhere there is no limit.
    """
    if sys.platform != "linux":
        return sys.maxsize
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        with (
            open("/sys/fs/cgroup/memory.max") as limit,
            open("/sys/fs/cgroup/memory.current") as used,
        ):
            text = limit.read().strip()
            if text != "max":
                available = min(available, int(text) - int(used.read()))
    except FileNotFoundError:
        pass  # no control group limits this process
    return available
