"""What all parts of ``gpu.py`` share: their arguments, their lines of results, and the device.

What only a device can tell is None on the CPU, and the page names it as left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import echelon as ec
from tests.processes import free_port

__all__ = [
    "arguments",
    "clocks",
    "forget",
    "has_streams",
    "joined",
    "median_s",
    "out_folder",
    "place_of",
    "say",
    "sm_clock",
    "synchronize",
]

_KIND = "cuda"  # a test that writes down what streams are told plays it on the CPU
_CLOCKS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "driver_version",
)


def arguments(description: str | None) -> tuple[argparse.Namespace, torch.device]:
    """What every part is started with, and its device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of some thousand parameters")
    parser.add_argument("--after", type=int, default=0, help="leave out the first lines")
    options = parser.parse_args()
    return options, place_of(options.device)


def place_of(device: str) -> torch.device:
    """The first device of a kind, made the current one."""
    if device != "cuda":
        return torch.device(device)
    place = torch.device("cuda", 0)
    torch.cuda.set_device(place)
    return place


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams."""
    return device.type == _KIND


def say(kind: str, **facts: Any) -> None:
    """Print a result for the page; what is printed is kept, whatever happens afterwards."""
    print("RESULT " + json.dumps({"kind": kind, **facts}), flush=True)


def out_folder() -> Path:
    """Where files for the reader may be put."""
    return Path(os.environ["GPU_OUT"])


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if has_streams(device):
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Give the memory of what nobody refers to any more back to the device."""
    gc.collect()
    if has_streams(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def clocks() -> dict[str, str] | None:
    """The clocks, power and temperature that nvidia-smi reads; None where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if answer.returncode:
        return {"error": (answer.stdout + answer.stderr).strip()[:300]}
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    return dict(zip(_CLOCKS, values, strict=False))


def sm_clock(device: torch.device) -> dict[str, str] | None:
    """The clock of the multiprocessors now; None without a device."""
    if not has_streams(device):
        return None
    try:
        return {"clocks.sm": f"{torch.cuda.clock_rate(device)} MHz"}
    except Exception:  # pynvml is not there, or says why it cannot: nvidia-smi is slower
        return clocks() or {}


def median_s(
    call: Callable[[], object], device: torch.device, *, count: int, warm_up: int
) -> float:
    """The median time of a call until the device has done it, in seconds."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(count):
        synchronize(device)
        start_s = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def joined(device: torch.device) -> ec.World:
    """A world of one rank over the default process group of torch.distributed, made here."""
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
        return ec.init("nccl")
    dist.init_process_group("gloo")
    return ec.init("gloo")
