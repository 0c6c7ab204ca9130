"""Memory of ranks: how much there is, and new memory of zeros or an error that says so."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.streams import is_cpu
from echelon.errors import SharedMemoryError

# Below this, asking how much there is costs more than it tells.
_LARGE = 2**26


def available_nbytes() -> int:
    """Memory that new segments may take: free on the machine and in the control group."""
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


def require(nbytes: int, device: torch.device, *, what: str) -> None:
    """Refuse to take more memory than there is, before anything is done.

    The kernel would promise it, and end the process when it is written.

    Raises:
        SharedMemoryError: there is not enough memory on the CPU.
    """
    if is_cpu(device) and nbytes > _LARGE and nbytes > (available := available_nbytes()):
        raise SharedMemoryError(what, nbytes, available)


def zeros(numel: int, dtype: torch.dtype, device: torch.device, *, what: str) -> Tensor:
    """A tensor that outlives the caller's inference mode. 1D.

    Raises:
        SharedMemoryError: see ``require``.
    """
    require(numel * dtype.itemsize, device, what=what)
    with torch.inference_mode(False):
        return torch.zeros(numel, dtype=dtype, device=device)
