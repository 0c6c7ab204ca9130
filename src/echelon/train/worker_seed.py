"""The seed that a ``DataLoader`` draws for its workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_workers(*place: object) -> Iterator[None]:
    """Give a loader that is iterated a seed that depends on ``place`` alone.

    The global generator is as before afterwards. Otherwise a job that is resumed inside an epoch
    would draw once more than one without a stop.
    """
    digest = hashlib.shake_256(f"workers {place}".encode()).digest(8)
    generator = vars(torch.random)["default_generator"]  # every simulated rank has one
    before = generator.get_state()
    generator.manual_seed(int.from_bytes(digest, "little"))
    try:
        yield
    finally:
        generator.set_state(before)
