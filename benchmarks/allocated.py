"""One rank of ``planned_memory.py``: takes steps of a plan, and prints what was allocated.

The allocator itself is asked, through the memory events of the profiler, so buffers inside of
operations and of communication count, too. It is started by ``planned_memory.py``.
"""

from __future__ import annotations

import json
import sys

import torch
from memory_cases import MemoryCase
from torch.profiler import ProfilerActivity, profile, record_function

import echelon as ec

STEPS = 4
LAST = "the last step"


def main(world: ec.World, case: MemoryCase) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = case.step(world)
        for number in range(STEPS):
            with record_function(LAST if number == STEPS - 1 else "a step"):
                step()
    allocated, span = [], (0, 0)
    assert profiler.profiler is not None
    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.name == LAST:
            span = event.start_time_ns, event.end_time_ns
        elif event.typed[0].name == "Allocation":
            allocated.append((event.start_time_ns, event.typed[1].total_allocated))
    peak = max(nbytes for when, nbytes in allocated if span[0] <= when <= span[1])
    peaks = world.group.all_gather_object(peak)
    if world.rank == 0:
        print("PEAKS", json.dumps(peaks))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with ec.init("gloo") as world:
        main(world, MemoryCase(**json.loads(sys.argv[1])))
