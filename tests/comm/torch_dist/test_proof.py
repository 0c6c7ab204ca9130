"""A process that does not know the secret of a job cannot speak as one of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import Secret
from echelon.comm.torch_dist import proof
from echelon.comm.torch_dist.peers import Engine, PeerLost, Peers, Posted
from echelon.comm.torch_dist.proof import conclude, strangers

SECRET, OTHER = Secret(b"s" * 32), Secret(b"o" * 32)
Prove = Callable[[Peers], Any]


def engines(size: int = 2) -> list[Engine]:
    """Connected engines of gloo, for threads of this process."""
    store = c10d.HashStore()

    def engine(rank: int) -> Any:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        return c10d.ProcessGroupGloo(store, rank, size, options)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(engine, range(size)))


def outcomes(*steps: Prove) -> list[Any]:
    """What each rank concludes, all at the same time."""
    size = len(steps)
    peers = [Peers(engine, r, size, 20.0) for r, engine in enumerate(engines(size))]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda step, peer: step(peer), steps, peers))


def proves(secret: Secret = SECRET, group: str = "world/0", seconds: float = 20.0) -> Prove:
    return lambda peers: strangers(peers, secret, group, seconds)


def test_ranks_of_one_job_know_one_another() -> None:
    assert outcomes(proves(), proves(), proves()) == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stranger",
    [proves(OTHER), proves(group="world/1"), lambda peers: None],
    ids=["another secret", "a proof for another group", "silence"],
)
def test_who_does_not_know_the_secret_is_found_out(stranger: Prove) -> None:
    rank_0, rank_1, _ = outcomes(proves(seconds=1.0), proves(seconds=1.0), stranger)
    assert 2 in rank_0
    assert 2 in rank_1


def answers(first: Callable[[bytes], bytes], second: Callable[[bytes], bytes]) -> Prove:
    """A stranger who makes of each message that rank 0 sends what it sends back."""

    def step(peers: Peers) -> None:
        for tag, answer in ((proof._NONCES, first), (proof._PROOFS, second)):
            heard = torch.empty(32, dtype=torch.uint8)
            peers.wait([peers.recv(heard, 0, tag)], peers.deadline())
            said = torch.frombuffer(bytearray(answer(heard.numpy().tobytes())), dtype=torch.uint8)
            peers.wait([peers.send(said, 0, tag)], peers.deadline())

    return step


def test_a_rank_that_hears_its_own_words_is_not_convinced() -> None:
    def same(heard: bytes) -> bytes:
        return heard

    assert outcomes(proves(), answers(same, same))[0] == [1]


def test_a_proof_that_was_recorded_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, int, bytes]] = []
    post = Peers.send

    def record(self: Peers, tensor: Tensor, peer: int, tag: int) -> Posted:
        recorded.append((self.rank, tag, tensor.numpy().tobytes()))
        return post(self, tensor, peer, tag)

    monkeypatch.setattr(Peers, "send", record)
    assert outcomes(proves(), proves()) == [[], []]
    monkeypatch.undo()
    said = {tag: data for rank, tag, data in recorded if rank == 1}
    replay = answers(lambda heard: said[proof._NONCES], lambda heard: said[proof._PROOFS])
    assert outcomes(proves(), replay)[0] == [1]


def test_what_one_rank_finds_all_ranks_conclude() -> None:
    store = c10d.HashStore()

    def step(rank: int) -> list[int]:
        return conclude(store, rank, 3, [0] if rank == 2 else [], 10.0, lambda: None)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(step, range(3))) == [[0]] * 3


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    def gone() -> None:
        raise PeerLost((1,), late=False)

    with pytest.raises(PeerLost) as info:
        conclude(c10d.HashStore(), 0, 2, [], 60.0, gone)
    assert info.value.missing == (1,)
