"""Ranks that all tests of a file share."""

import importlib
import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch.distributed as dist

from tests.c10d.ranks import Ranks

SIZE = 4


def prepare(module: str) -> None:
    """Import the backend and the rank functions, so that each rank need not.

    ``IMPORTED_BY_RANKS`` of a module names what its rank functions import when they run.
    """
    importlib.import_module("echelon.c10d")
    for name in getattr(importlib.import_module(module), "IMPORTED_BY_RANKS", ()):
        importlib.import_module(name)


def setup(rank: int, size: int, store: dist.TCPStore) -> None:
    """Join the default process group as a script under torchrun does."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    dist.init_process_group("echelon")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Four ranks whose default process group is echelon's, made from environment variables."""
    with Ranks(SIZE, partial(prepare, request.module.__name__), setup) as ranks:
        yield ranks
