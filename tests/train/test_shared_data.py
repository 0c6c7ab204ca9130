"""A data set that one rank of each host builds and all ranks map."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon as ec
from echelon.comm.world import World
from echelon.errors import RankFailed, StateError
from echelon.train import shared_data
from tests.worlds import KINDS, run_world

NUMEL = 1 << 16


def data(folder: str) -> dict[str, Any]:
    Path(folder, f"built-{time.monotonic_ns()}").touch()
    return {"x": torch.arange(NUMEL), "y": np.arange(NUMEL), "names": ["a", "bc"], "classes": 3}


def reads(world: World, folder: str) -> tuple[list[int], list[str], int]:
    shared = ec.shared_dataset(lambda: data(folder), world.group)
    assert type(shared["x"]) is torch.Tensor
    world.group.barrier()
    if world.rank == world.size - 1:
        shared["x"].zero_()
    world.group.barrier()
    return shared["x"][:3].tolist(), list(shared["names"]), int(shared["y"].sum())


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_built_once_and_read_by_all(kind: str, tmp_path: Path) -> None:
    results = run_world(kind, reads, 3, (str(tmp_path),))
    assert len(list(tmp_path.iterdir())) == 1
    total = NUMEL * (NUMEL - 1) // 2
    expected = ([0, 1, 2], ["a", "bc"], total)
    assert results == [expected, expected, ([0, 0, 0], ["a", "bc"], total)]


def on_two_hosts(world: World, folder: str) -> int:
    world.group.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_data, "_host", lambda: (world.rank // 2,))
        shared = ec.shared_dataset(lambda: {"rank": world.rank, **data(folder)}, world.group)
    return int(shared["rank"])


def test_each_host_builds_it_once(tmp_path: Path) -> None:
    assert run_world("processes", on_two_hosts, 4, (str(tmp_path),)) == [0, 0, 2, 2]
    assert len(list(tmp_path.iterdir())) == 2


def waits(world: World) -> list[int]:
    def build() -> list[torch.Tensor]:
        time.sleep(3)
        return [torch.arange(3)]

    start = time.monotonic()
    shared = ec.shared_dataset(build)
    assert time.monotonic() - start > 2.9
    return shared[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_build_may_take_longer_than_the_timeout(kind: str) -> None:
    assert run_world(kind, waits, 2, timeout=1.5) == [[0, 1, 2]] * 2


def raises(world: World, how: str) -> str:
    def build() -> Any:
        if how == "raise":
            raise KeyError("no such column")
        return {"model": torch.nn.Linear(1, 1)}

    kind = {"raise": KeyError, "refuse": ec.ArgumentError}[how] if world.rank == 0 else Exception
    with pytest.raises(kind) as info:
        ec.shared_dataset(build, world.group)
    return f"{type(info.value).__name__}: {info.value}"


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_builder_reaches_all_ranks(kind: str) -> None:
    first, second = run_world(kind, raises, 2, ("raise",))
    assert first == "KeyError: 'no such column'"
    assert second == (
        "StateError: rank 0 could not make the shared data of its host: KeyError: 'no such column'"
    )
    assert issubclass(StateError, RuntimeError)


def test_what_cannot_be_shared_is_refused_on_all_ranks() -> None:
    for text in ec.run(raises, 2, args=("refuse",)):
        assert text.startswith("ArgumentError")
        assert "the data['model'] is a Linear, which cannot be shared" in text


def shared_files() -> set[str]:
    """The files in shared memory, without semaphores: tests that run beside this one make some."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def dies(world: World) -> None:
    ec.shared_dataset(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_the_death_of_the_builder_ends_all_and_leaves_nothing() -> None:
    start, before = time.monotonic(), shared_files()
    with pytest.raises(RankFailed, match="rank 0"):
        run_world("processes", dies, 2)
    assert time.monotonic() - start < 30
    assert shared_files() == before


def test_one_process_needs_no_job() -> None:
    shared = ec.shared_dataset(lambda: [torch.ones(2), ["a"]])
    assert shared[0].tolist() == [1, 1]
    assert shared[1][0] == "a"
    with pytest.raises(ec.ArgumentError, match="build is 3; give a function"):
        ec.shared_dataset(3)  # type: ignore[arg-type]


def fails_to_map(world: World) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            refuse = PermissionError(13, "Permission denied")
            patch.setattr(shared_data.MappedValues, "map", lambda *_: (_ for _ in ()).throw(refuse))
        with pytest.raises((PermissionError, StateError)) as info:
            ec.shared_dataset(lambda: [1])
    return str(info.value)


def test_a_rank_that_cannot_map_the_memory_is_an_error_on_all() -> None:
    for text in run_world("processes", fails_to_map, 2):
        assert "Permission denied" in text
