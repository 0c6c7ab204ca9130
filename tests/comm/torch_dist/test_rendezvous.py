"""Ranks that were told different things hear of it, all of them and at once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

import echelon
from echelon.comm.torch_dist import meet, open_store
from echelon.comm.torch_dist.rendezvous import check_start
from echelon.errors import CommTimeout, StartMismatch, WorldError
from echelon.process.environment import JobEnvironment
from tests.comm.gloo_ranks import local_job
from tests.processes import free_port

ENV = JobEnvironment(launcher="torchrun", rank=0, size=2, local_rank=0, local_size=2)

Facts = tuple[JobEnvironment, str]  # the environment of a process, and its backend


def outcomes(ranks: list[Facts], timeout: float = 20.0) -> list[str]:
    """What ``meet`` says to processes with these environments and backends."""
    store = HashStore()

    def outcome(facts: Facts) -> str:
        try:
            meet(store, *facts, timeout)
        except (WorldError, CommTimeout) as error:
            return f"{type(error).__name__}: {error}"
        return "met"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(outcome, ranks))


def test_ranks_that_agree_meet() -> None:
    assert outcomes([(replace(ENV, rank=rank), "gloo") for rank in range(2)]) == ["met"] * 2


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (
            [(ENV, "gloo"), (replace(ENV, rank=1, size=3), "gloo")],
            "rank 0 of WORLD_SIZE=2, backend 'gloo'; rank 1 of WORLD_SIZE=3, backend 'gloo'",
        ),
        (
            [(ENV, "shm"), (replace(ENV, rank=1, local_size=1), "gloo")],
            "rank 0 of WORLD_SIZE=2, backend 'shm'; rank 1 of WORLD_SIZE=2, backend 'gloo'",
        ),
        (
            [(replace(ENV, size=3, rank=rank), "gloo") for rank in (0, 1, 1)],
            "RANK=1 was given to two processes",
        ),
    ],
)
def test_a_contradiction_is_told_to_every_rank_at_once(ranks: list[Facts], sentence: str) -> None:
    start_s = time.monotonic()
    texts = outcomes(ranks)
    assert all(text.startswith("WorldError: ") and sentence in text for text in texts), texts
    assert time.monotonic() - start_s < 5


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named() -> None:
    (text,) = outcomes([(replace(ENV, size=4), "gloo")], timeout=0.3)
    assert text == "CommTimeout: the start of the world waited 0.3 s for ranks 1, 2, 3 in vain"
    (text,) = outcomes([(replace(ENV, rank=3, size=4), "gloo")], timeout=0.3)
    assert text == "CommTimeout: the start of the world waited 0.3 s for rank 0 in vain"


def start_a_script(variables: dict[str, str], errors: Path) -> None:
    """What a script does that starts its world, in a process that has torch already."""
    os.environ.update(variables)
    sys.stderr = errors.open("w")  # where multiprocessing shows what was raised
    echelon.init(timeout=60)


def test_processes_that_contradict_each_other_end_with_the_same_sentence(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank, here in (("0", "2"), ("1", "1")):
        variables = common | {"RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": here}
        ranks.append(context.Process(target=start_a_script, args=(variables, tmp_path / rank)))
        ranks[-1].start()
    for rank, process in enumerate(ranks):
        process.join(60)
        assert process.exitcode == 1
        text = (tmp_path / str(rank)).read_text()
        assert "WorldError: the ranks were told different things" in text


def start_beside_a_process_group(variables: dict[str, str], errors: Path) -> None:
    """What a script does whose launcher, as Ray Train, has made the default process group."""
    os.environ.update(variables)
    sys.stderr = errors.open("w")
    dist.init_process_group("gloo")
    with echelon.init(timeout=60) as world:
        total = torch.tensor([world.rank + 1])
        world.group.all_reduce(total)
        assert (world.backend, total.item()) == ("shm", 3)
    dist.destroy_process_group()


def test_ranks_meet_in_the_store_of_a_process_group_that_has_the_port_already(
    tmp_path: Path,
) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank in ("0", "1"):
        variables = common | {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        target = start_beside_a_process_group
        ranks.append(context.Process(target=target, args=(variables, tmp_path / rank)))
        ranks[-1].start()
    for rank, process in enumerate(ranks):
        process.join(60)
        assert process.exitcode == 0, (tmp_path / str(rank)).read_text()


@pytest.mark.slow
def test_a_port_where_something_else_listens_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        env = replace(ENV, rank=1, master_addr="127.0.0.1", master_port=port)
        start_s = time.monotonic()
        with pytest.raises(WorldError, match=f"127.0.0.1:{port} within 1 s.* nothing else listens"):
            open_store(env, 1.0)
        assert time.monotonic() - start_s < 10


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(WorldError, match=rf"port {port} of 127.0.0.1 is in use.*MASTER_PORT"):
            open_store(local_job(0, 2, port), timeout=1.0)


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    with pytest.raises(WorldError, match=rf"could not reach the store of rank 0 at .*:{port}"):
        open_store(local_job(1, 2, port), timeout=0.5)


def test_a_store_on_one_host_listens_on_the_loopback_interface_only() -> None:
    port = free_port()
    store = open_store(local_job(0, 1, port), timeout=5.0)
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]
    del store


# --- the comparison of how ranks were started ----------------------------------------------------


def start_outcomes(facts: list[dict[str, Any]]) -> list[str]:
    """What ``check_start`` says to ranks that bring these."""
    store = HashStore()

    def outcome(rank: int) -> str:
        env = local_job(rank, len(facts), 1)
        try:
            check_start(store, env, facts[rank], 20.0)
        except StartMismatch as error:
            return str(error)
        return "same"

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(outcome, range(len(facts))))


def test_many_ranks_hear_the_same() -> None:
    assert start_outcomes([{"a": 1}] * 16) == ["same"] * 16
    said = set(start_outcomes([{"a": 1}] * 15 + [{"a": 2}]))
    assert len(said) == 1
    assert "rank 15: 2   <-- differs" in said.pop()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(CommTimeout, match="for rank 1 in vain"):
        check_start(HashStore(), ENV, {}, 0.2)
