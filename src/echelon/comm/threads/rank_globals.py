"""Global state of a process that each simulated rank has for itself.

A rank that is a process has its own random stream, default dtype and functions. Here a rank that is
a thread has them, too: other ranks do not see what it seeds, sets or replaces.
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
    """Give this thread global state of its own in the body, with ``dtype`` as default dtype."""
    with (
        own_default_dtype(dtype) as rank_dtype,
        own_functions(),
        own_contexts(),
        random_stream(rank_dtype),
    ):
        yield
