"""A group of the simulated device, as rank 0 of four that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.testing.device.collectives import NAME
from echelon.testing.device.simulated import install
from tests.rank_zero import fake_engine


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            c10d, "ProcessGroupGloo", lambda store, rank, size, timeout: fake_engine(rank, size)
        )
        dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=4)
        yield
        dist.destroy_process_group()
