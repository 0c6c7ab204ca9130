"""Cases that somebody came upon who tried to break checkpoints."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, CheckpointError, CheckpointNotFound

# A script that leaves ----------------------------------------------------------------------------


def leaves(world: World, folder: Path) -> None:
    model = ec.DDP(nn.Linear(500, 500), world.group)
    with world:
        ec.async_save(folder, step=1, model=model)
        sys.exit(75)


def leaves_without_a_block(world: World, folder: Path) -> None:
    ec.async_save(folder, step=1, model=ec.DDP(nn.Linear(500, 500), world.group))
    sys.exit(75)


@pytest.mark.parametrize("main", [leaves, leaves_without_a_block])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_save_under_way_is_committed_when_ranks_leave_with_a_code(
    kind: str, main: Any, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        ec.run(main, 2, kind, args=(tmp_path,))
    assert caught.value.code == 75
    assert ec.steps(tmp_path) == [1]


# Folders -----------------------------------------------------------------------------------------


def test_folders_without_a_manifest_do_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    ec.save(tmp_path, step=1, value=1)
    for step in (2, 3):
        (tmp_path / f"step-{step:09}").mkdir()
    ec.save(tmp_path, step=4, keep=2, value=4)
    assert ec.load(tmp_path, step=1).values == {"value": 1}
    ec.save(tmp_path, step=5, keep=2, value=5)
    with pytest.raises(CheckpointNotFound):
        ec.load(tmp_path, step=1)


def test_a_run_may_be_named_like_a_step(tmp_path: Path) -> None:
    ec.save(tmp_path / "step-000000005", step=1, value=1)
    assert ec.load(tmp_path / "step-000000005").step == 1


def test_a_fork_does_not_keep_the_lock_of_a_job_that_was_killed(tmp_path: Path) -> None:
    reader, writer = os.pipe()  # the fork lives until nobody holds the writing end

    def job() -> None:
        os.close(writer)
        ec.async_save(tmp_path, step=1, value=torch.zeros(30_000_000))
        while not list(tmp_path.glob(".saving-*")):
            time.sleep(0.001)
        if os.fork() == 0:
            os.read(reader, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    if not (pid := os.fork()):
        job()
    try:
        os.waitpid(pid, 0)
        start_s = time.monotonic()
        ec.save(tmp_path, step=2, value=1)
        assert time.monotonic() - start_s < 10  # the fork lives on
        assert ec.steps(tmp_path)[-1] == 2
    finally:
        os.close(reader)
        os.close(writer)


def removes(world: World, folder: Path) -> int:
    """Rank 0 saves and removes what came before, while rank 1 loads."""
    if world.rank == 0:
        for step in range(2, 60):
            ec.save(folder, step=step, keep=1, value=step)
        return 0
    return sum(ec.load(folder).step > 0 for _ in range(60))


def test_a_load_looks_again_when_its_step_goes_away(tmp_path: Path) -> None:
    ec.save(tmp_path, step=1, value=1)
    assert ec.run(removes, 2, "processes", args=(tmp_path,)) == [0, 60]


@pytest.mark.parametrize("call", [ec.save, ec.async_save])
def test_a_name_that_no_file_can_have_is_refused(call: Any) -> None:
    with pytest.raises(ArgumentError, match="give the path of a folder"):
        call("/tmp/\ud800", step=1)


def test_without_a_current_folder_a_relative_one_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="errno 2"):
        ec.save("run", step=1, value=1)


# What is given -----------------------------------------------------------------------------------


def of_two_kinds(world: World, folder: Path) -> str:
    given: Any = nn.Linear(2, 2) if world.rank else 3
    with pytest.raises(ArgumentError) as caught:
        ec.save(folder, step=1, group=world.group, x=given)
    return str(caught.value)


def test_ranks_that_give_different_kinds_are_told(tmp_path: Path) -> None:
    first, second = ec.run(of_two_kinds, 2, args=(tmp_path,))
    assert first == second
    assert "rank 0: {'x': 'value'}" in first
    assert "rank 1: {'x': 'module'}" in first


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Failing:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 1:
            raise Speechless
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def speechless(world: World, folder: Path) -> str:
    with pytest.raises((Speechless, CheckpointError)) as caught:
        ec.save(folder, step=1, group=world.group, x=Failing(world.rank))
    return type(caught.value).__name__


def test_an_error_without_a_text_is_heard_by_all(tmp_path: Path) -> None:
    assert ec.run(speechless, 2, args=(tmp_path,)) == ["CheckpointError", "Speechless"]


def test_a_class_is_no_object_with_a_state(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="x"):
        ec.save(tmp_path, step=1, x=nn.Linear)


def test_another_generator_of_numpy_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np.random, "get_state", lambda legacy: {"bit_generator": "PCG64"})
    with pytest.raises(ArgumentError, match=r"is a PCG64 .* give rng=False"):
        ec.save(tmp_path, step=1, value=1)
    ec.save(tmp_path, step=1, value=1, rng=False)
