"""What PyTorch's tests expect of the profiler's events of gloo, in the words of ours.

Tests that are told to run on gloo look for events ``gloo:all_reduce``. This is the only thing of
PyTorch's tests that we adapt, and only here: which events a test gets for such a name. It then
counts them and looks at their shapes itself.

One difference is no name: gloo's events begin on one thread and end on another, which the profiler
calls asynchronous. Ours are spans on the caller's thread, one for the call and one for its wait, as
``comm/profiler_spans.py`` says. Tests get them as asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Lookup = Callable[..., list[Any]]

# Where gloo's name of an operation is not ours.
_OPS = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_to_all": "all_to_all_single",
    "recvAnySource": "recv",
}


class EventOfGloo:
    """An event of ours as a test of gloo expects it."""

    def __init__(self, event: Any, name: str) -> None:
        self._event = event
        self.name = name
        self.is_async = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def lookup_of_gloo(lookup: Lookup) -> Lookup:
    """``get_profiling_event`` of PyTorch's tests, which finds our events by gloo's names."""

    def find(name: str, profiler: Any, *args: Any, **kwargs: Any) -> list[Any]:
        backend, _, op = name.partition(":")
        if backend != "gloo":
            return lookup(name, profiler, *args, **kwargs)
        events = lookup(f"echelon:{_OPS.get(op, op)}", profiler, *args, **kwargs)
        return [EventOfGloo(event, name) for event in events]

    return find
