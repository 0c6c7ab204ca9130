"""Start one rank function in every kind of world that this machine has, and hear its events.

``run_world(kind, fn, ranks, args)`` is ``echelon.run`` for threads and processes, and for gloo a
set of processes that call ``echelon.init`` as a script under torchrun does. Starting processes
costs seconds, so tests put many checks into one start.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import echelon as ec
from tests.comm.gloo_ranks import run_gloo

KINDS = ("threads", "processes", "gloo")
NCCL_RULES = "threads with NCCL's rules"
TIMEOUT_S = 60.0  # of one call; a test that hangs fails before its own time is up

RankFunction = Callable[..., Any]


def run_world(
    kind: str, fn: RankFunction, ranks: int, args: Sequence[Any] = (), timeout: float = TIMEOUT_S
) -> list[Any]:
    """Call ``fn(world, *args)`` on every rank and return the results in rank order."""
    if kind == NCCL_RULES:
        return ec.run(fn, ranks, args=args, timeout=timeout, rules="nccl")
    if kind == "gloo":
        return run_gloo(fn, ranks, args=args, timeout=timeout)
    return ec.run(fn, ranks, kind, args=args, timeout=timeout)


@contextmanager
def events_of(rank: int, *names: str) -> Iterator[list[ec.events.Event]]:
    """Collect the events of a rank while the body runs: those of these names, or all."""
    events: list[ec.events.Event] = []

    def collect(event: ec.events.Event) -> None:
        if event.facts.get("rank") == rank and (not names or event.name in names):
            events.append(event)

    with ec.events.listen(collect):
        yield events
