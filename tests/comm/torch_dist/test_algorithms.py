"""The collectives over messages of gloo pass all checks of groups over c10d."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.comm.primitives import AllReduce, ReduceScatter
from echelon.comm.torch_dist import algorithms
from echelon.comm.torch_dist.algorithms import Algorithms, scratch_nbytes
from tests.comm.torch_dist.c10d_checks import CHECKS, outcome


@pytest.mark.slow_for("4 ranks, calls compared")
@pytest.mark.parametrize(
    ("ranks", "compared"),
    [(2, False), (4, True)],
    ids=["2 ranks", "4 ranks, calls compared"],
)
@pytest.mark.parametrize("name", CHECKS, ids=lambda name: name.partition("check_")[2])
def test_that(name: str, ranks: int, compared: bool) -> None:
    outcome(ranks, native=False, compared=compared).require(name)


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


Mail = dict[tuple[int, int, int], SimpleQueue[Tensor]]


class Heard(Unheard):
    """Other ranks as threads; messages from one to another arrive in their order."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        super().__init__(rank, size)
        self._mail = mail

    def send(self, tensor: Tensor, peer: int, tag: int) -> None:
        self._mail[self.rank, peer, tag].put(tensor.clone())

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Callable[[], object]:
        queue = self._mail[peer, self.rank, tag]
        return lambda: tensor.copy_(queue.get(timeout=20))

    def wait(self, posted: list[Callable[[], object] | None], deadline: float) -> None:
        for take in posted:
            if take is not None:
                take()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("numel", [1, 60, 1000])
def test_more_pieces_than_the_scratch_memory_takes_are_reduced(
    numel: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithms, "PIECE_NBYTES", 64)
    monkeypatch.setattr(algorithms, "SCRATCH_NBYTES", 512)
    monkeypatch.setattr(algorithms, "ONE_ROUND_NBYTES", 0)
    mail: Mail = defaultdict(SimpleQueue)
    parts = [numel // size] * size
    parts[-1] += numel % size
    inputs = [torch.randint(-99, 99, (numel,)) for _ in range(size)]
    expected = torch.stack(inputs).sum(0)

    def reduces(rank: int) -> tuple[Tensor, Tensor]:
        peers: Any = Heard(rank, size, mail)
        of_rank = Algorithms(peers, torch.device("cpu"))
        reduced, part = inputs[rank].clone(), torch.empty(parts[rank], dtype=torch.int64)
        of_rank.run(0, AllReduce(reduced, "sum"))
        of_rank.run(1, ReduceScatter(part, inputs[rank].clone(), parts, "sum"))
        return reduced, part

    with ThreadPoolExecutor(size) as ranks:
        results = list(ranks.map(reduces, range(size)))
    assert all(torch.equal(reduced, expected) for reduced, _ in results)
    assert torch.equal(torch.cat([part for _, part in results]), expected)
