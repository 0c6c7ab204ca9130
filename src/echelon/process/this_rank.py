"""Which rank the calling thread is: the one thread-local that names it.

A simulated rank is a thread, and hooks of torch and Python are registered once in a process, so
they ask here whose call it is. A rank that is a process is the thread that has called ``init``.
Threads that a rank starts are no ranks, and find the defaults.

This package is below those that know the types, so readers annotate what they read. An attribute
is read without a call of Python, because each call of a group reads several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final


@final
class ThisRank(threading.local):
    """What the calling thread has as a rank; each default is what a thread finds that is none.

    Attributes:
        rank: the simulated rank (``comm.threads.rank_threads.RankThread``).
        hand_on: lets other ranks run in its body, while this one has its turn.
        grace_s: how long this rank may wait outside of groups before it hands on.
        world: what ``init`` returns (``comm.world.World``).
        steps: counts steps of optimizers (``diagnosis.rank_monitor.StepCounter``).
        time: measures what the rank does (``diagnosis.rank_time.RankTime``).
        printed_as: the number that stands before lines which this thread prints.
        streams: keep what a rank of a test prints and logs (``laboratory.rank_streams``).
        recorder: records a training (``laboratory.value_recorder.ValueRecorder``).
        compares_by_itself: models that are wrapped now do not compare their replicas.
        debugger: has stopped the thread before (``laboratory.debugger.RankDebugger``).
    """

    rank: Any = None
    hand_on: Callable[[], AbstractContextManager[None]] | None = None
    grace_s: float = 0.0
    world: Any = None
    steps: Any = None
    time: Any = None
    printed_as: int | None = None
    streams: Any = None
    recorder: Any = None
    compares_by_itself: bool = False
    debugger: Any = None


here = ThisRank()
