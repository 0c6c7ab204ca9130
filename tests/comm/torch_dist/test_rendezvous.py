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

import pytest
from torch.distributed import HashStore

import echelon
from echelon.comm.torch_dist import meet, open_store
from echelon.errors import CommTimeout, WorldError
from echelon.process.environment import JobEnvironment
from tests.comm.gloo_ranks import free_port

ENV = JobEnvironment(launcher="torchrun", rank=0, size=2, local_rank=0, local_size=2)

Told = tuple[JobEnvironment, str]  # what a process knows, and its backend


def outcomes(told: list[Told], timeout: float = 20.0) -> list[str]:
    """What ``meet`` says to processes that were told these things."""
    store = HashStore()

    def outcome(one: Told) -> str:
        try:
            meet(store, *one, timeout)
        except (WorldError, CommTimeout) as error:
            return f"{type(error).__name__}: {error}"
        return "met"

    with ThreadPoolExecutor(len(told)) as pool:
        return list(pool.map(outcome, told))


def test_ranks_that_agree_meet() -> None:
    assert outcomes([(replace(ENV, rank=rank), "gloo") for rank in range(2)]) == ["met"] * 2


@pytest.mark.parametrize(
    ("told", "sentence"),
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
def test_a_contradiction_is_told_to_every_rank_at_once(told: list[Told], sentence: str) -> None:
    start_s = time.monotonic()
    found = outcomes(told)
    assert all(one.startswith("WorldError: ") and sentence in one for one in found), found
    assert time.monotonic() - start_s < 5


def test_ranks_that_do_not_come_are_named() -> None:
    (found,) = outcomes([(replace(ENV, size=4), "gloo")], timeout=0.3)
    assert found == "CommTimeout: the start of the world waited 0.3 s for ranks 1, 2, 3 in vain"
    (found,) = outcomes([(replace(ENV, rank=3, size=4), "gloo")], timeout=0.3)
    assert found == "CommTimeout: the start of the world waited 0.3 s for rank 0 in vain"


def start_a_script(told: dict[str, str], errors: Path) -> None:
    """What a script does that starts its world, in a process that has torch already."""
    os.environ.update(told)
    sys.stderr = errors.open("w")  # where multiprocessing shows what was raised
    echelon.init(timeout=60)


def test_processes_that_contradict_each_other_end_with_the_same_sentence(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    context = multiprocessing.get_context("forkserver")
    ranks = []
    for rank, here in (("0", "2"), ("1", "1")):
        told = common | {"RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": here}
        ranks.append(context.Process(target=start_a_script, args=(told, tmp_path / rank)))
        ranks[-1].start()
    for rank, process in enumerate(ranks):
        process.join(60)
        assert process.exitcode == 1
        text = (tmp_path / str(rank)).read_text()
        assert "WorldError: the ranks were told different things" in text


def test_a_port_where_something_else_listens_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        env = replace(ENV, rank=1, master_addr="127.0.0.1", master_port=port)
        start_s = time.monotonic()
        with pytest.raises(WorldError, match=f"127.0.0.1:{port} within 1 s.* nothing else listens"):
            open_store(env, 1.0)
        assert time.monotonic() - start_s < 10
