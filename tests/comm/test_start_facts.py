"""Ranks that were started differently are told what differs, and who has what, at the start."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.start_facts import difference, encode, start_facts
from echelon.comm.torch_dist import connect
from echelon.comm.world import World
from echelon.errors import ArgumentError, StartMismatch
from tests.children import environ
from tests.comm.gloo_ranks import local_job, start
from tests.processes import free_port
from tests.worlds import KINDS, run_world

ODD = 1
MOST_S = 5.0
VERSIONS = ("echelon", "torch", "Python", "NumPy")


def disguise(field: str) -> None:
    """Let this process look as one in which ``field`` is another."""
    versions = metadata.version
    if field == "number of torch threads":
        torch.set_num_threads(torch.get_num_threads() + 1)
    elif field == "version of torch":
        torch.__version__ = "2.11.0"
    elif field == "version of Python":
        sys.version_info = (3, 12, 1)
    else:
        other = {"version of echelon": "echelon", "version of NumPy": "numpy"}[field]
        metadata.version = lambda name: "0.0.1" if name == other else versions(name)


FIELDS = ["number of torch threads", *(f"version of {name}" for name in VERSIONS)]


def test_a_start_has_the_versions_the_threads_and_the_options() -> None:
    assert start_facts(timeout=3.0) == {
        "version of echelon": metadata.version("echelon"),
        "version of torch": torch.__version__,
        "version of Python": sys.version.split()[0],
        "version of NumPy": metadata.version("numpy"),
        "number of torch threads": torch.get_num_threads(),
        "option timeout": 3.0,
    }


# --- what is the same ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": {"x": 1, "y": [2]}}, {"a": {"y": (2,), "x": 1}}, None),
        ({"a": [{"x": 1, "y": 2}]}, {"a": [{"y": 2, "x": 1}]}, None),
        ({"a": float("nan")}, {"a": float("nan")}, None),
        ({"a": 1}, {"a": 1.0}, "a"),
        ({"a": 1}, {"a": True}, "a"),
        ({"a": 1}, {"a": "1"}, "a"),
        ({"a": None}, {}, "a"),
        ({}, {"a": {}}, "a"),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, "a"),
        ({"a": 1, "b": {"c": {"d": 2}}}, {"a": 1, "b": {"c": {"d": 3}}}, "b.c.d"),
        ({"a": 1, "b": 2}, {"a": 3, "b": 4}, "a"),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a"),
    ],
)
def test_values_are_compared_as_json(first: Any, second: Any, field: str | None) -> None:
    found = difference([encode(first), encode(second)])
    assert (found and found[0]) == field


@pytest.mark.parametrize("value", [torch.ones(1), {1, 2}, object(), b"", ec.NonFinite.SKIP])
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"model\.size is .* JSON has no word for"):
        encode({"model": {"size": value}})


def test_what_holds_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(ArgumentError, match="JSON has no word"):
        encode({"ring": ring})


# --- a user's own options ------------------------------------------------------------------------


class Unpicklable:
    """Whoever reads this from pickle runs what the sender wants."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


def agrees(world: World) -> tuple[str, dict[int, str]]:
    world.agree()
    world.agree(steps=3, text="ü", nested={"a": [1, None, False]})
    with pytest.raises(ArgumentError, match="JSON has no word"):
        world.agree(evil=Unpicklable())
    with pytest.raises(StartMismatch, match="lr is not the same") as info:
        world.agree(steps=3, lr=0.1 * (1 + (world.rank == ODD)), seed=world.rank)
    world.agree(self=1, group=2)  # any name will do
    return info.value.field, info.value.found


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compare_their_options_and_go_on(kind: str) -> None:
    expected = ("lr", {0: "0.1", 1: "0.2", 2: "0.1"})
    assert run_world(kind, agrees, 3) == [expected] * 3


def forbids_pickle(world: World) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("bytes of another rank were unpickled")

    import pickle

    pickle.loads = refuse
    world.agree(steps=3)
    ec.FiniteGuard(torch.nn.Linear(1, 1), world.group, action=ec.NonFinite.SKIP).allows_step(
        float("nan")
    )


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_nothing_of_another_rank_is_unpickled(kind: str) -> None:
    run_world(kind, forbids_pickle, 2)


# --- the start of a world ------------------------------------------------------------------------


class Disguise:
    """An argument that, in the process of one rank, disguises it when it arrives."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        if multiprocessing.current_process().name == f"rank {ODD}":
            disguise(self.field)


def starts(world: World, disguise: Disguise) -> None:
    raise AssertionError(f"{world} started with ranks that differ in {disguise.field}")


@pytest.mark.parametrize("field", FIELDS)
def test_processes_that_differ_do_not_start(field: str) -> None:
    with pytest.raises(StartMismatch) as info:
        ec.run(starts, 3, "processes", args=(Disguise(field),))
    assert info.value.field == field
    assert len(set(info.value.found.values())) == 2
    assert f"{field} is not the same" in str(info.value)
    lines = str(info.value).splitlines()
    assert [line.startswith(f"  rank {ODD}: ") for line in lines if "<-- differs" in line] == [True]


def joins_gloo(rank: int, size: int, ports: dict[str, int]) -> list[tuple[str, float]]:
    """What each start of a world of processes that differ in one field says."""
    said = []
    for field, port in ports.items():
        kept = torch.get_num_threads(), torch.__version__, sys.version_info, metadata.version
        if rank == ODD and not field.startswith("option"):
            disguise(field)
        options = {"timeout": 20.0, "check": False}
        if rank == ODD and field == "option timeout":
            options["timeout"] = 21.0
        if rank == ODD and field == "option check":
            options["check"] = True
        start_s = time.monotonic()
        with pytest.raises(StartMismatch) as info:
            connect(local_job(rank, size, port), "gloo", device=torch.device("cpu"), **options)
        said.append((str(info.value), time.monotonic() - start_s))
        torch.set_num_threads(kept[0])
        torch.__version__, sys.version_info, metadata.version = kept[1:]
        assert info.value.field == field
    return said


@pytest.mark.slow
def test_ranks_over_gloo_that_differ_do_not_start() -> None:
    ports = {field: free_port() for field in (*FIELDS, "option timeout", "option check")}
    outcomes = [outcome for outcome, _ in start(joins_gloo, 3, (3, ports))]
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    for said in zip(*outcomes, strict=True):
        texts = {text for text, _ in said}
        assert len(texts) == 1
        assert f"rank {ODD}: " in texts.pop()
        assert max(seconds for _, seconds in said) < MOST_S


def in_a_default_group(rank: int, size: int, port: int) -> str:
    """As under a launcher, where the script has made the default process group itself."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    try:
        torch.set_num_threads(1 + (rank == ODD))
        device = torch.device("cpu")
        with pytest.raises(StartMismatch) as info:
            connect(local_job(rank, size, port), "gloo", device=device)
        return info.value.field
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_in_a_process_group_of_the_script_that_differ_do_not_start() -> None:
    outcomes = [outcome for outcome, _ in start(in_a_default_group, 2, (2, free_port()))]
    assert outcomes == ["number of torch threads"] * 2


def check_script_is_refused(backend: str) -> None:
    """Refuse a script that trains with ranks of other numbers of threads, or ends otherwise."""
    script = f"import echelon; echelon.init({backend}, timeout=60)"
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environ(**common, RANK=rank, LOCAL_RANK=rank, OMP_NUM_THREADS=str(1 + int(rank))),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    for process in ranks:
        _, text = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "StartMismatch: the ranks were started differently: number of torch threads" in text
        assert "rank 0: 1\n  rank 1: 2" in text


@pytest.mark.slow
def test_a_script_whose_ranks_have_other_numbers_of_threads_ends_with_the_same_sentence() -> None:
    check_script_is_refused("None")
