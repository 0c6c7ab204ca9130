"""How much arithmetic a rank could do: what a large product of matrices reaches on it."""

from __future__ import annotations

import time

import torch

from echelon import checks
from echelon.comm.streams import device_of

_SECONDS = 0.2  # enough for a clock that has gone down to come up
_SIZES = (1024, 2048, 4096, 8192)  # rows and columns; a GPU needs large ones to be busy
_BUSY_S = 0.005  # a product that takes so long keeps a device busy


def matmul_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """The operations per second of a large product of matrices on this rank now.

    All ranks call it at the same time, because ranks of one host share its processors. As
    ``RunInfo.peak_flops`` it says what share of it a training reaches, on any device. The peak that
    a vendor states is higher.

    Example:
        >>> matmul_flops(torch.device("cpu")) > 1e8
        True
    """
    checks.instance("device", device, torch.device)
    checks.instance("dtype", dtype, torch.dtype)
    for size in _SIZES:
        factor = torch.ones(size, size, device=device, dtype=dtype)
        product = factor @ factor  # the first one also loads libraries
        best_s, start_s = float("inf"), time.perf_counter()
        while time.perf_counter() - start_s < _SECONDS:
            device_of(device).synchronize()
            before_s = time.perf_counter()
            torch.mm(factor, factor, out=product)
            device_of(device).synchronize()
            best_s = min(best_s, time.perf_counter() - before_s)
        if best_s >= _BUSY_S:
            break
    return 2 * size**3 / best_s
