"""Large collectives through shared memory."""

import pytest
import torch

import echelon as ec
from echelon.comm.shm import peer_memory, segment
from echelon.errors import SharedMemoryError


def forbid_reading() -> None:
    """As a container does that lacks the right to trace processes."""
    peer_memory._read = lambda *arguments: -1


def too_little_staging(world: ec.World) -> None:
    forbid_reading()
    segment.available_nbytes = lambda: 65 * 2**20
    world.group.all_reduce(torch.ones(100_000))


def test_too_little_memory_for_a_large_collective_ends_every_rank() -> None:
    with pytest.raises(SharedMemoryError, match=r"staging .* needs 8\.0 MiB .* 1\.0 MiB are"):
        ec.run(too_little_staging, 2, "processes")
