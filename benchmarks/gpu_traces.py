"""Where a step waits and what holds memory at its peak: files for the profiler's viewers.

Rank 0 of 8 ranks that are not there, over a network of 50 GB/s: ``trace_*.json.gz`` is for
Perfetto, ``memory_*.pickle.gz``, unpacked, for pytorch.org/memory_viz.
"""

from __future__ import annotations

import gzip
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_device import arguments, forget, has_streams, out_folder, synchronize
from gpu_many_ranks import GB_S, VARIANTS
from gpu_network import Network
from gpu_step import WARM_UP, Trainee, config_of
from llama import LlamaConfig
from torch.profiler import ProfilerActivity

from tests.cuda.lines import LeftOut, Line, run_lines

RANKS = 8
LINE_S = 40.0
MOST_NBYTES = 15 * 2**20  # of a file that travels back
TRACED = {"echelon": "echelon FSDP, prefetch 1", "fsdp2": "FSDP2"}


def traced(variant: str, path: Path, config: LlamaConfig, device: torch.device) -> dict[str, Any]:
    """Write what one step does on the host and on the device."""
    forget(device)
    network = Network(device, GB_S)
    with VARIANTS[variant](RANKS, network) as wrap:
        trainee = Trainee(config, wrap, device)
        trainee.steps(WARM_UP)
        activities = [ProfilerActivity.CPU]
        if has_streams(device):
            activities.append(ProfilerActivity.CUDA)
        synchronize(device)
        with torch.profiler.profile(activities=activities) as profiler:
            trainee.step()
            synchronize(device)
        profiler.export_chrome_trace(str(path))
        del trainee
    forget(device)
    return kept(path)


def remembered(
    variant: str, path: Path, config: LlamaConfig, device: torch.device
) -> dict[str, Any]:
    """Write all allocations of one step, and which line of Python made what is held."""
    if not has_streams(device):
        raise LeftOut("memory snapshots, which are of a device")
    forget(device)
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=100_000)
    try:
        with VARIANTS[variant](RANKS, Network(device, GB_S)) as wrap:
            trainee = Trainee(config, wrap, device)
            trainee.steps(WARM_UP)
            snapshot = torch.cuda.memory._snapshot()
            del trainee
    finally:
        torch.cuda.memory._record_memory_history(None)
    with gzip.open(path, "wb", compresslevel=6) as file:
        pickle.dump(snapshot, file)
    forget(device)
    return kept(path)


def kept(path: Path) -> dict[str, Any]:
    """The size of a file, which is removed if it is too large to travel."""
    nbytes = path.stat().st_size
    if nbytes > MOST_NBYTES:
        path.unlink()
        raise LeftOut(f"{path.name}, which has {nbytes / 2**20:.0f} MiB, more than 15")
    return {"kind": "file", "name": path.name, "nbytes": nbytes}


def lines_of(config: LlamaConfig, device: torch.device) -> list[tuple[str, Line]]:
    """Traces, then snapshots."""
    out = out_folder()
    lines: list[tuple[str, Line]] = []
    for title, act, ending in (("trace", traced, "json"), ("memory", remembered, "pickle")):
        for name, variant in TRACED.items():
            path = out / f"{title}_{name}.{ending}.gz"
            lines.append((f"{title} of {variant}", partial(act, variant, path, config, device)))
    return lines


def main() -> int:
    options, device = arguments(__doc__)
    lines = lines_of(config_of(options.tiny), device)
    return run_lines(lines, device.type, options.after, LINE_S)


if __name__ == "__main__":
    sys.exit(main())
