"""Ranks that all tests of a session share."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.c10d.ranks import Ranks

SIZE = 4


def prepare() -> None:
    """Import what the rank functions need."""

    import echelon.c10d  # noqa: F401  # registers the backend


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


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks whose default process group is echelon's, made from environment variables."""
    with Ranks(SIZE, prepare, setup) as ranks:
        yield ranks
