"""How much arithmetic a rank could do: what a large product of matrices reaches on it."""

from __future__ import annotations

import time

import torch

from echelon import checks
from echelon.comm import streams

_SECONDS = 0.2  # enough for a clock that has gone down to come up
_SIZE_ON_CPU, _SIZE = 1024, 8192  # rows and columns; a GPU needs larger ones to be busy


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
    size = _SIZE_ON_CPU if streams.is_cpu(device) else _SIZE
    left = torch.ones(size, size, device=device, dtype=dtype)
    product = left @ left
    streams.synchronize(device)
    best_s, start_s = float("inf"), time.perf_counter()
    while time.perf_counter() - start_s < _SECONDS:
        before_s = time.perf_counter()
        torch.mm(left, left, out=product)
        streams.synchronize(device)
        best_s = min(best_s, time.perf_counter() - before_s)
    return 2 * size**3 / best_s
