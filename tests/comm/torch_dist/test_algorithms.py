"""The collectives over messages of gloo pass all checks of groups over c10d."""

from typing import Any

import pytest
import torch

from echelon.comm.primitives import AllReduce, ReduceScatter
from echelon.comm.torch_dist.algorithms import Algorithms, scratch_nbytes
from tests.comm.torch_dist.c10d_checks import CHECKS, assert_passed


@pytest.mark.slow_for("4 ranks, calls compared")
@pytest.mark.parametrize(
    ("ranks", "compared"),
    [(2, False), (4, True)],
    ids=["2 ranks", "4 ranks, calls compared"],
)
@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, ranks: int, compared: bool) -> None:
    assert_passed(name, ranks, native=False, compared=compared)


class Unheard:
    """Other ranks whose messages bring nothing and go nowhere."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def deadline(self) -> float:
        return 0.0

    def send(self, *message: Any) -> None: ...

    recv = wait = send


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("numel", [1, 1000, 300_001, 6_000_000])
def test_the_scratch_memory_of_a_reduction_is_known_before_it_runs(numel: int, size: int) -> None:
    tensor, parts = torch.zeros(numel, dtype=torch.int32), [numel // size] * size
    parts[0] += numel % size
    for rank in (0, size - 1):
        for operation in (
            AllReduce(tensor, "sum"),
            ReduceScatter(tensor.new_empty(parts[rank]), tensor, parts, "sum"),
        ):
            peers: Any = Unheard(rank, size)
            algorithms = Algorithms(peers, tensor.device)
            algorithms.run(0, operation)
            assert scratch_nbytes(operation, rank, size) == algorithms._scratch.nbytes
