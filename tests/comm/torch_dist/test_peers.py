"""Tags keep different messages apart, and waits for peers name those that are missing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C import _distributed_c10d as c10d

import echelon as ec
from echelon.comm.torch_dist.peers import (
    MAX_TAG,
    PHASE,
    Mailroom,
    PeerLost,
    await_peers,
    collective_tag,
    sized_tag,
)
from echelon.diagnosis.collective_call import CallSignature
from echelon.errors import ArgumentError, CommTimeout, RankFailed
from tests.cli.jobs import Job
from tests.comm.gloo_ranks import gloo_outcomes

CALL = CallSignature("all_reduce", torch.float32, (10,))


def test_tags_of_collectives_differ_by_call_position_phase_and_length() -> None:
    tag = collective_tag(CALL, 3)
    other_call = collective_tag(CallSignature("all_reduce", torch.float32, (11,)), 3)
    tags = {tag, other_call, collective_tag(CALL, 4), tag | PHASE, sized_tag(tag, 5)}
    assert len(tags) == 5
    assert all(1 << 30 <= tag < 1 << 31 for tag in tags)


def test_tags_of_messages_differ_by_tag_number_and_kind_and_never_meet_a_collective() -> None:
    sender, receiver = Mailroom(), Mailroom()
    tensors = [(torch.empty(2), 0), (torch.empty(2), 0), (torch.empty(3), 1), (torch.empty(2), 9)]
    sent = [sender.tag("send", tensor, 1, tag) for tensor, tag in tensors]
    assert len(set(sent)) == 4
    assert sent == [receiver.tag("send", tensor, 1, tag) for tensor, tag in tensors]
    assert all(1 << 29 <= tag < 1 << 30 for tag in sent)
    with pytest.raises(ArgumentError, match=f"tag {MAX_TAG}"):
        sender.tag("send", torch.empty(1), 1, MAX_TAG)


def test_peers_that_all_come_are_awaited_by_all() -> None:
    store, waits = c10d.HashStore(), [[] for _ in range(3)]  # type: list[list[int | None]]

    def come(rank: int) -> None:
        time.sleep(0.4 * (rank == 2))
        await_peers(store, rank, 3, 20.0, check=lambda: None, on_wait=waits[rank].append)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(come, range(3)))
    assert set(waits[0]) == {2, None}  # it says whom it waits for
    assert [said[-1] for said in waits] == [None] * 3


def test_peers_that_do_not_come_are_named_at_the_timeout() -> None:
    with pytest.raises(PeerLost) as info:
        await_peers(c10d.HashStore(), 1, 3, 0.2, check=lambda: None, on_wait=lambda peer: None)
    assert (info.value.missing, info.value.late) == ((0, 2), True)


def test_a_peer_that_has_ended_is_not_awaited() -> None:
    def check() -> None:
        raise PeerLost((2,), late=False)

    start_s = time.monotonic()
    with pytest.raises(PeerLost) as info:
        await_peers(c10d.HashStore(), 1, 3, 60.0, check=check, on_wait=lambda peer: None)
    assert (info.value.missing, info.value.late) == ((2,), False)
    assert time.monotonic() - start_s < 5


# --- new groups with a rank that has ended --------------------------------------------------------

ENDS = {
    "raise": "raised ValueError: boom",
    "return": "left",
    "sys.exit(0)": "raised SystemExit: 0",
    "sys.exit(1)": "raised SystemExit: 1",
    "os._exit(0)": "died",
    "os._exit(1)": "died",
    "SIGKILL": "died",
    "SIGSEGV": "died",
}


def ends(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("boom")
        case "sys.exit(0)" | "sys.exit(1)":
            sys.exit(int(how[-2]))
        case "os._exit(0)" | "os._exit(1)":
            os._exit(int(how[-2]))
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSEGV":
            ctypes.string_at(0)


def makes_a_mesh(world: ec.World, how: str) -> float:
    weight = torch.full((2,), world.rank + 1.0, requires_grad=True)
    weight.square().sum().backward()
    world.group.all_reduce(weight.grad)
    if world.rank == 1:
        ends(how)
        return 0.0
    start_s = time.monotonic()
    try:
        world.mesh(pp=2, dp=2)
    except RankFailed as error:
        error.seconds = time.monotonic() - start_s  # type: ignore[attr-defined]
        raise
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_while_others_make_a_mesh_is_named_by_all_of_them(how: str) -> None:
    outcomes = gloo_outcomes(makes_a_mesh, 4, args=(how,), timeout=40.0)
    for rank in (0, 2, 3):
        error = outcomes[rank][0]
        assert isinstance(error, RankFailed), (rank, error)
        assert error.failed_rank == 1
        assert ENDS[how] in error.cause
        assert error.seconds < 5.0  # type: ignore[attr-defined]


SCRIPT = """
import os, sys
import echelon as ec

with ec.init("gloo", timeout=40) as world:
    world.group.barrier()
    if world.rank == 1:
        {}
    world.mesh(pp=2, dp=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sys.exit(0)", "sys.exit(1)", "os._exit(0)", "os._exit(1)"])
def test_in_a_script_the_first_line_is_of_the_rank_that_has_ended(how: str, tmp_path: Path) -> None:
    with Job(tmp_path, SCRIPT.format(how), options=("--ranks", "4")) as job:
        code, _, lines = job.end()
        assert job.processes() == {}
    assert code == 1
    assert lines[0].startswith(f"rank 1 at step 0 exited with code {how[-2]}")


@pytest.mark.slow_for("processes")
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_returns_is_named_in_other_worlds(kind: str) -> None:
    with pytest.raises(ec.CommError, match=r"rank 1 (returned|closed)"):
        ec.run(makes_a_mesh, 4, kind, args=("return",), timeout=40.0)


def does_not_come(world: ec.World) -> None:
    world.group.barrier()
    if world.rank == 1:
        time.sleep(6.0)
    else:
        world.group.subgroup([0, 1, 2])


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_new_group_is_named_alone() -> None:
    outcomes = gloo_outcomes(does_not_come, 3, timeout=2.0)
    for rank in (0, 2):
        error = outcomes[rank][0]
        assert isinstance(error, CommTimeout), (rank, error)
        assert error.missing == (1,)
        assert list(error.stuck) == [1]
