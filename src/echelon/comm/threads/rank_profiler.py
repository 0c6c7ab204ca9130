"""Profilers of torch that simulated ranks start: each of them sees the calls of its own rank.

torch has one profiler for a process, which crashes when several threads start and end it in turn.
Its former one, which is still there, records each thread for itself. So within a rank the profilers
of torch get their events from that one. They have all operators and scopes, and the same tables
and traces; what only libkineto records, such as kernels of a GPU, is missing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from torch.autograd import profiler, profiler_legacy
from torch.profiler.profiler import _KinetoProfile

from echelon.comm.threads.replaced_names import register_replacements


def _prepare_trace(self: Any) -> None:
    self.entered = True


def _start_trace(self: Any) -> None:
    self.entered = True
    self._of_rank = profiler_legacy.profile(
        record_shapes=self.record_shapes,
        with_flops=self.with_flops,
        profile_memory=self.profile_memory,
        with_stack=self.with_stack,
        with_modules=self.with_modules,
    )
    self._start_ns, self._lane = time.time_ns(), threading.current_thread().name
    self._of_rank.__enter__()


def _end_trace(self: Any, *_: object) -> bool | None:
    if not self.enabled:
        return None
    self._of_rank.__exit__(None, None, None)
    events = self._of_rank.function_events
    if self.acc_events and self._function_events:
        shift = (self._start_ns - self._base_ns) / 1e3
        for event in events:
            event.time_range.start += shift
            event.time_range.end += shift
        events[:0] = self._function_events
    else:
        self._base_ns = self._start_ns
    self._function_events, self._needs_processing = events, False
    return False


def _export(self: Any, path: str, *_: object, **__: object) -> None:
    """Write the timeline as torch's own profiler does: with the time that its times count from."""
    events = [event for event in self.function_events if event.trace_name is not None]
    process = os.getpid()
    lanes = [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": process,
            "tid": thread,
            "args": {"name": self._lane},
        }
        for thread in sorted({event.thread for event in events})
    ]
    spans = [
        {
            "name": event.trace_name,
            "ph": "X",
            "ts": event.time_range.start,
            "dur": event.time_range.elapsed_us(),
            "pid": process,
            "tid": event.thread,
            "args": {"Input Dims": event.input_shapes} if self.record_shapes else {},
        }
        for event in events
    ]
    content = {
        "traceEvents": lanes + spans,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": self._base_ns,
    }
    with open(path, "w") as file:
        json.dump(content, file)


def _add_nothing(self: Any, *_: object) -> None:
    """The traces of ranks have no fields for more."""


register_replacements(
    "torch.profiler",
    (
        (profiler.profile, "_prepare_trace", _prepare_trace),
        (profiler.profile, "_start_trace", _start_trace),
        (profiler.profile, "__exit__", _end_trace),
        (profiler.profile, "export_chrome_trace", _export),
        (_KinetoProfile, "add_metadata_json", _add_nothing),
    ),
)
