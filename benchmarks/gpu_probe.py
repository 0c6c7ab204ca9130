"""What the machine is, and how fast it multiplies and copies: the scale for all other parts."""

from __future__ import annotations

import os
import platform

import torch
from gpu_device import arguments, clocks, has_streams, median_s, say

PEAK_TFLOPS = 989.0  # of an H100 or H200 (SXM) in bfloat16 without sparsity, as NVIDIA states it


def main() -> None:
    options, device = arguments(__doc__)
    is_cuda = has_streams(device)
    facts = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "name": "CPU",
    }
    if is_cuda:
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "device_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    say("machine", **facts, clocks=clocks() if is_cuda else None)
    say("speed", what="bf16 matrix product, TFLOP/s", value=matmul_tflops(device, options.tiny))
    nbytes = 2**20 if options.tiny else 2**30
    say("speed", what="copy on the device, GB/s read and written", value=copied(device, nbytes))
    if is_cuda:
        say(
            "speed", what="pinned host to device, GB/s", value=pinned(device, nbytes, to_host=False)
        )
        say("speed", what="device to pinned host, GB/s", value=pinned(device, nbytes, to_host=True))
        say("clocks", when="after the matrix products and copies", clocks=clocks())
    else:
        say("left_out", what="clocks, and copies between host and device: no CUDA device")


def matmul_tflops(device: torch.device, tiny: bool) -> float:
    """The rate of a large matrix product of random numbers, in TFLOP/s."""
    size = 256 if tiny else 8192
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    seconds = median_s(lambda: torch.mm(a, b), device, count=10, warm_up=3)
    return round(2 * size**3 / seconds / 1e12, 3)


def copied(device: torch.device, nbytes: int) -> float:
    """The bandwidth of a copy inside of the device, in GB/s of bytes read and written."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source), device, count=10, warm_up=2)
    return round(2 * nbytes / seconds / 1e9, 1)


def pinned(device: torch.device, nbytes: int, *, to_host: bool) -> float:
    """The bandwidth between pinned memory and the device, in GB/s."""
    on_host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target, source = (on_host, on_device) if to_host else (on_device, on_host)
    seconds = median_s(lambda: target.copy_(source, non_blocking=True), device, count=5, warm_up=1)
    return round(nbytes / seconds / 1e9, 1)


if __name__ == "__main__":
    main()
