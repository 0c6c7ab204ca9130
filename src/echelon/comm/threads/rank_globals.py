"""What is one for a whole process and what each simulated rank needs for its own.

A process that is one rank has its own random stream, default dtype and functions. So has a rank
that is a thread: what it seeds, sets or replaces is its own, and the others do not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from echelon.comm.threads.default_dtype import own_default_dtype
from echelon.comm.threads.own_functions import own_functions
from echelon.comm.threads.randomness import random_stream
from echelon.comm.threads.transformers_contexts import own_contexts


@contextmanager
def own_globals(dtype: torch.dtype) -> Iterator[None]:
    """Let this thread be a simulated rank while the body runs, with ``dtype`` as its default."""
    with (
        own_default_dtype(dtype) as rank_dtype,
        own_functions(),
        own_contexts(),
        random_stream(rank_dtype),
    ):
        yield
