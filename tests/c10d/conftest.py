"""Ranks that all tests of a session share."""

import importlib
import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.c10d.ranks import Ranks

SIZE = 4
MODULES = (
    "echelon.c10d",  # registers the backend
    "torch._dynamo",  # optimizers and DDP import it when they are first used
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "tests.c10d.test_errors",
    "tests.c10d.test_process_group",
    "tests.c10d.test_training",
)


def prepare() -> None:
    """Import what the rank functions need, so that each rank need not."""
    for name in MODULES:
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


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four ranks whose default process group is echelon's, made from environment variables."""
    with Ranks(SIZE, prepare, setup) as ranks:
        yield ranks
