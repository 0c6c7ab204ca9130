"""One rank of ``planned_memory.py``: takes steps of a plan, and prints what was allocated.

The allocator itself is asked, through the memory events of the profiler, so buffers inside of
operations and of communication count, too. It is started by ``planned_memory.py``.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from memory_cases import MemoryCase
from torch.profiler import ProfilerActivity, profile

import echelon as ec

WARM_UP = 2  # as in the dry run


def count_allocations() -> None:
    """Have the allocator count from now on, in all threads.

    Otherwise it counts in threads that are profiled: the bytes of a gradient that gloo's thread is
    the last to hold would never be taken off.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def peak_of(step: Callable[[], None]) -> int:
    """The most bytes that are allocated in a step, of all that have been counted."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    peak, events = 0, list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.typed[0].name == "Allocation":
            peak = max(peak, event.typed[1].total_allocated)
    return peak


def main(world: ec.World, case: MemoryCase) -> None:
    count_allocations()
    step = case.step(world)
    for _ in range(WARM_UP):
        step()
    peaks = world.group.all_gather_object(peak_of(step))
    if world.rank == 0:
        print("PEAKS", json.dumps(peaks))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ec.init("gloo") as world:
        main(world, MemoryCase(**json.loads(sys.argv[1])))
