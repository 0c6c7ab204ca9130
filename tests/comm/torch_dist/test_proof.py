"""Who does not know the secret of a job cannot speak as one of its ranks."""

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
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.peers import Engine, PeerLost, Peers, Posted
from echelon.comm.torch_dist.proof import conclude, strangers
from echelon.comm.torch_dist.rendezvous import Rendezvous, meet
from echelon.comm.torch_dist.sealed_store import SealedStore
from echelon.comm.torch_dist.start import _Maker
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import AuthenticationError, WorldError
from echelon.process.environment import JobEnvironment

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
        return list(pool.map(lambda step, one: step(one), steps, peers))


def proves(secret: Secret = SECRET, group: str = "world/0", seconds: float = 20.0) -> Prove:
    return lambda peers: strangers(peers, secret, group, seconds)


def test_ranks_of_one_job_know_one_another() -> None:
    assert outcomes(proves(), proves(), proves()) == [[], [], []]


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


# --- stores that others can write to -------------------------------------------------------------


def sealed(inner: c10d.Store, secret: Secret = SECRET, scope: str = "job") -> SealedStore:
    return SealedStore(inner, secret, scope)


def test_ranks_read_what_ranks_have_written() -> None:
    inner = c10d.HashStore()
    store = sealed(inner)
    store.set("a", "text")
    store.set("b", b"\0\xff")
    assert sealed(inner).multi_get(["a", "b"]) == [b"text", b"\0\xff"]
    assert store.compare_set("c", "", "mine") == b"mine"
    assert sealed(inner).compare_set("c", "", "yours") == b"mine"


@pytest.mark.parametrize("value", ["", "text", "00" * 40, "é", "zz" * 40])
def test_a_value_that_no_rank_has_written_is_refused_by_its_key(value: str) -> None:
    inner = c10d.HashStore()
    inner.set("segments", value)
    with pytest.raises(AuthenticationError, match="the value of 'segments' in the store was not"):
        sealed(inner).get("segments")


def test_a_value_of_a_rank_is_refused_under_another_key_scope_or_secret() -> None:
    inner = c10d.HashStore()
    sealed(inner).set("rank 0", "address")
    inner.set("rank 1", inner.get("rank 0").decode())
    for store, key in (
        (sealed(inner), "rank 1"),
        (sealed(inner, scope="another attempt"), "rank 0"),
        (sealed(inner, OTHER), "rank 0"),
    ):
        with pytest.raises(AuthenticationError):
            store.get(key)


def meeting(inner: c10d.Store) -> list[Rendezvous]:
    def one(rank: int) -> Rendezvous:
        env = JobEnvironment(launcher="slurm", rank=rank, size=2, local_rank=0, local_size=1)
        return meet(sealed(inner), env, "gloo", 10.0)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_values_of_an_earlier_job_with_the_same_secret_are_refused() -> None:
    """A user may give each of his jobs one secret; what was recorded of one is worth nothing."""
    before, inner = c10d.HashStore(), c10d.HashStore()
    first, _ = meeting(before)
    first.store.set("group/world/0/0/1", "an address that a stranger has now")
    mine, other = meeting(inner)
    inner.set("group/world/0/0/1", before.get("group/world/0/0/1").decode())
    with pytest.raises(AuthenticationError):
        mine.store.get("group/world/0/0/1")
    mine.store.set("x", "y")
    assert other.store.get("x") == b"y"


def test_an_engine_starts_over_a_sealed_store_and_refuses_an_address_of_a_stranger() -> None:
    inner = c10d.HashStore()
    stores = [sealed(inner), sealed(inner)]

    def start(rank: int) -> object:
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=10)
        return c10d.ProcessGroupGloo(c10d.PrefixStore("p", stores[rank]), rank, 2, options)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(start, range(2)))
    inner.set("p/0/1", "61" * 100)
    with pytest.raises(AuthenticationError, match="'p/0/1' in the store"):
        start(0)


@pytest.mark.parametrize("text", ["short", "g" * 64, "0" * 63])
def test_a_secret_that_is_none_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(WorldError, match=r"ECHELON_SECRET has \d+ characters and must") as info:
        Secret.of({"ECHELON_SECRET": text})
    assert text not in str(info.value)
    assert Secret.of({}) is None
    assert "5c" not in repr(Secret.of({"ECHELON_SECRET": "5c" * 32}))


def test_a_stranger_who_wins_each_race_ends_the_start_of_all_ranks_by_name() -> None:
    """Each of three trials has new connections; here the other one has another secret in all."""
    store = c10d.HashStore()

    def outcome(rank: int) -> str:
        maker = _Maker(
            job=Job(c10d.PrefixStore("job", store), RankMonitor.alone(rank)),
            secret=(SECRET, OTHER)[rank],
            backend="gloo",
            device=torch.device("cpu"),
            timeout=20.0,
            check=False,
            loopback=True,
            one_host=True,
        )
        try:
            maker.make("world", (0, 1))
        except AuthenticationError as error:
            return f"{error.ranks} {error}"
        return "made"

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(outcome, range(2)))
    assert all(text.startswith("(0, 1) what speaks as ranks 0, 1 in") for text in found)
    assert store.check(["job/group/world/2/strangers"])  # it was tried three times
    assert not store.check(["job/group/world/3/strangers"])
