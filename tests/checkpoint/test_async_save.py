"""Saves that go on beside training: exact, never lost, and one at a time."""

from __future__ import annotations

import copy
import errno
import gc
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint.async_save import AsyncSave, AsyncSaver
from echelon.checkpoint.items import CheckpointItems
from echelon.comm import streams
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.world import World
from echelon.errors import ArgumentError, CheckpointError
from tests.checkpoint.disks import Act, Call, Disk, FailAt
from tests.checkpoint.layouts import LAYOUTS, Trainee
from tests.checkpoint.scripts import run_script
from tests.checkpoint.whole import check_equal, whole_state
from tests.worlds import KINDS, run_world

FULL = errno.ENOSPC


def given(trainee: Trainee) -> dict[str, Any]:
    return {"model": trainee.model, "optimizer": trainee.optimizer}


def ended(saving: AsyncSave) -> None:
    """Return when a save has ended, without asking it how."""
    while not saving.done:
        time.sleep(0.001)


class Gate:
    """Holds the first call that opens a file of a rank until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, call: Call, act: Act, part: Act) -> Any:
        if (call.op, call.what) == ("open", "rank file"):
            assert self.opened.wait(60.0)
        return act()


# What is saved ---------------------------------------------------------------------------------


def change_after_the_return(world: World, folder: Path, gate: Gate) -> None:
    trainee = LAYOUTS["fsdp2"].trainee(world)
    trainee.train(0)
    expected = copy.deepcopy(whole_state(trainee))
    more = torch.full((1000,), float(world.rank))
    saving = ec.async_save(folder, step=1, more=more, **given(trainee))
    more.zero_()
    trainee.train(1)  # writes to parameters and states in place
    assert not saving.done
    world.group.barrier()
    gate.opened.set()
    assert saving.wait() == folder / "step-000000001"
    found = LAYOUTS["fsdp2"].trainee(world, seed=1)
    loaded = ec.load(folder, **given(found))
    check_equal(whole_state(found), expected)
    assert torch.equal(loaded.values["more"], torch.full((1000,), float(world.rank)))


def test_what_changes_after_the_return_is_not_in_the_step(tmp_path: Path) -> None:
    gate = Gate()
    with Disk(gate):
        ec.run(change_after_the_return, 2, args=(tmp_path, gate))


def wait_in_vain(folder: Path, gate: Gate) -> None:
    saving = ec.async_save(folder, step=1, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"is still being saved after 0\.01 s"):
        saving.wait(0.01)
    for wrong in (0, -1, "1", float("nan")):
        with pytest.raises(ArgumentError, match="timeout is"):
            saving.wait(wrong)
    assert not saving.done
    assert ec.steps(folder) == []
    gate.opened.set()
    assert saving.wait(60.0) == saving.wait() == saving.path
    assert ec.steps(folder) == [1]


def test_one_can_wait_for_a_time_and_again(tmp_path: Path) -> None:
    gate = Gate()
    with Disk(gate):
        wait_in_vain(tmp_path, gate)


def save_many(world: World, folder: Path, count: int) -> int:
    """One save after another, with a step of training and its communication between."""
    trainee = LAYOUTS["fsdp2"].trainee(world)
    states = {}
    for step in range(count):
        trainee.train(step)
        states[step] = copy.deepcopy(whole_state(trainee))
        ec.async_save(folder, step=step, keep=2, **given(trainee))
    ec.save(folder, step=count, keep=3, **given(trainee))
    for step in (count - 2, count - 1):
        ec.load(folder, step=step, **given(trainee))
        check_equal(whole_state(trainee), states[step])
    return len(ec.steps(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_saves_one_after_another_go_on_during_training(kind: str, tmp_path: Path) -> None:
    assert run_world(kind, save_many, 2, (tmp_path, 6)) == [3, 3]


# What goes wrong -------------------------------------------------------------------------------


def fail(world: World, disk: Disk, folder: Path, trainee: Trainee, step: int) -> AsyncSave:
    """A save that has failed on rank 1, of which nobody was told yet."""
    world.group.barrier()
    if world.rank == 0:
        disk.aim(FailAt(rank=1, number=3, errno=FULL))
    world.group.barrier()
    saving = ec.async_save(folder, step=step, **given(trainee))
    ended(saving)
    return saving


def hear_of_it(world: World, folder: Path, disk: Disk) -> None:
    trainee = LAYOUTS["ddp2"].trainee(world)
    trainee.train(0)
    full = r"^rank 1: .*rank-00001\.safetensors: No space left on device \(errno 28\)$"
    saving = fail(world, disk, folder, trainee, 1)
    trainee.train(1)  # no step raises it: ranks hear of it at different moments
    with pytest.raises(CheckpointError, match=full):
        saving.poll()
    assert saving.poll()  # told once
    for call in (ec.save, ec.async_save):
        fail(world, disk, folder, trainee, 2)
        with pytest.raises(CheckpointError, match=full):
            call(folder, step=3, **given(trainee))
        assert ec.steps(folder) == []
    fail(world, disk, folder, trainee, 2)
    with pytest.raises(CheckpointError, match=full):
        ec.load(folder, **given(trainee))
    saving = fail(world, disk, folder, trainee, 2)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=full):
            saving.wait()
    ec.async_save(folder, step=2, **given(trainee)).wait()
    trainee.train(2)  # and nothing is told of a save that went well


@pytest.mark.slow
def test_an_error_is_told_by_whatever_comes_next(tmp_path: Path) -> None:
    with Disk() as disk:
        ec.run(hear_of_it, 2, args=(tmp_path, disk))
    assert ec.steps(tmp_path) == [2]


def ask_while_ranks_differ(world: World, folder: Path, gate: Gate) -> None:
    """The thread of rank 1 ends while that of rank 0 is held."""
    trainee = LAYOUTS["ddp2"].trainee(world)
    trainee.train(0)
    group = world.group
    saving = ec.async_save(folder, step=1, **given(trainee))
    assert not saving.poll()
    with pytest.raises(CheckpointError, match=r"is still being saved after 0\.01 s"):
        saving.wait(0.01)
    group.barrier()
    if world.rank == 0:
        gate.opened.set()
    asked = 0
    while not saving.poll():
        asked += 1
        time.sleep(0.001 * world.rank)
    assert {*group.all_gather_object(asked)} == {asked}  # all at the same call
    assert saving.wait(60.0) == saving.path


def test_all_ranks_agree_on_whether_a_save_has_ended(tmp_path: Path) -> None:
    gate = Gate()
    with Disk(gate):
        ec.run(ask_while_ranks_differ, 2, args=(tmp_path, gate))


def leave(world: World, folder: Path, fails: bool) -> None:
    """Return while a save is under way."""
    trainee = LAYOUTS["ddp2"].trainee(world)
    trainee.train(0)
    disk = Disk(FailAt(rank=1, number=3, errno=FULL))
    if fails and world.rank == 1:
        disk.__enter__()
    try:
        ec.async_save(folder, step=1, **given(trainee))
        if world.backend == "threads":
            world.close()
    finally:
        if world.backend == "threads" and world.rank == 1:
            disk.__exit__()


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_fails_after_the_end_of_a_rank_fails_the_job(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1: .*No space left on device"):
        run_world(kind, leave, 2, (tmp_path, True))
    assert ec.steps(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_ends_when_its_last_save_is_committed(kind: str, tmp_path: Path) -> None:
    run_world(kind, leave, 2, (tmp_path, False))
    assert ec.steps(tmp_path) == [1]


class DeviceWithoutMemory(streams.PlainDevice):
    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        raise MemoryError("no memory")


def no_memory_for_the_copy(world: World, folder: Path) -> str:
    trainee = LAYOUTS["ddp2"].trainee(world)
    if world.rank == 1:
        streams.kinds["cpu"] = DeviceWithoutMemory
    saving = ec.async_save(folder, step=1, **given(trainee))
    with pytest.raises((CheckpointError, MemoryError)) as info:
        saving.wait()
    ec.save(folder, step=1, **given(trainee))  # the folder is free
    return f"{type(info.value).__name__}: {info.value}"


def test_a_copy_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    found = ec.run(no_memory_for_the_copy, 2, "processes", args=(tmp_path,))
    assert found[0] == f"CheckpointError: rank 1: {tmp_path}: raised MemoryError: no memory"
    assert found[1] == "MemoryError: no memory"
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "s"] == [".lock"]


# One at a time ---------------------------------------------------------------------------------


def save_while_another_does(world: World, folder: Path, again: bool) -> str:
    trainee = LAYOUTS["ddp2"].trainee(world)
    if again:
        ec.async_save(folder, step=1, **given(trainee)).wait()
    call = ec.save if world.rank == 0 else ec.async_save
    with pytest.raises(ArgumentError) as info:
        call(folder, step=2, **given(trainee))
    ec.save(folder, step=3, **given(trainee))
    return str(info.value)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_save_in_different_ways_are_told(kind: str, again: bool, tmp_path: Path) -> None:
    first, second = run_world(kind, save_while_another_does, 2, (tmp_path, again))
    assert first == second
    assert "differ in a request to save; call:\n  rank 0: save\n  rank 1: async_save\n" in first


def alone(world: World, folder: Path) -> None:
    """Ranks that save models of their own, each alone."""
    layer = nn.Linear(40, 40)
    nn.init.constant_(layer.weight, world.rank)
    savings = []
    for step in range(5):
        savings.append(ec.async_save(folder / str(world.rank), step=step, model=layer))
        nn.init.constant_(layer.weight, world.rank + 10 * (step + 1))
        assert all(one.done for one in savings[:-1])
    for step in range(5):
        savings[step].wait()
        ec.load(folder / str(world.rank), step=step, model=layer)
        assert torch.all(layer.weight == world.rank + 10 * step)
    ec.async_save(folder / str(world.rank), step=5, model=layer)  # the end of the world waits


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_ranks_save_models_of_their_own_alone(kind: str, tmp_path: Path) -> None:
    ec.run(alone, 2, kind, args=(tmp_path,))
    assert [ec.steps(tmp_path / str(rank))[-1] for rank in (0, 1)] == [5, 5]


def fail_alone(world: World, folder: Path) -> None:
    Disk(FailAt(rank=0, number=9, errno=FULL)).__enter__()
    ec.async_save(folder / str(world.rank), step=1, model=nn.Linear(2, 2))


def test_a_save_alone_that_fails_after_the_end_of_a_rank_fails_the_job(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No space left on device \(errno 28\)"):
        ec.run(fail_alone, 2, "processes", args=(tmp_path,))


# What is kept ----------------------------------------------------------------------------------


def keep(world: World, folder: Path, kept: list[Any]) -> None:
    trainee = LAYOUTS["ddp2"].trainee(world)
    for step in range(3):
        saving = ec.async_save(folder, step=step, **given(trainee))
    background = AsyncSaver.known(CheckpointItems.sort(given(trainee), None).group)
    assert background is not None
    assert len(world.group._before_close) == 1  # the last one's, and not one a save
    kept += [weakref.ref(saving), weakref.ref(background), weakref.ref(trainee.optimizer)]


@pytest.mark.slow
def test_nothing_is_kept_after_the_end_of_the_world(tmp_path: Path) -> None:
    kept: list[Any] = []
    ec.run(keep, 2, args=(tmp_path, kept))
    gc.collect()
    assert [one() for one in kept] == [None] * 6
    assert ec.steps(tmp_path) == [0, 1, 2]


# Scripts; more of them are in tests/long/test_async.py -------------------------------------------


@pytest.mark.slow
def test_a_script_whose_save_fails_after_its_last_line_fails(tmp_path: Path) -> None:
    code, text = run_script(tmp_path, world="alone", end="leaves", full=True)
    assert code == 1
    assert f"File too large (errno {errno.EFBIG})" in text
    assert text.count("Traceback") == 2  # that of the operating system is its cause


@pytest.mark.slow
def test_a_script_ends_when_its_save_is_committed(tmp_path: Path) -> None:
    end = "is in a world that failed"
    assert run_script(tmp_path, world="alone", end=end, full=False) == (0, "")


def leaves(world: World, folder: Path) -> None:
    model = ec.DDP(nn.Linear(500, 500), world.group)
    with world:
        ec.async_save(folder, step=1, model=model)
        sys.exit(75)


def leaves_without_a_block(world: World, folder: Path) -> None:
    ec.async_save(folder, step=1, model=ec.DDP(nn.Linear(500, 500), world.group))
    sys.exit(75)


class Broken(Exception):
    """What ends the training below."""


def fails_beside_a_save(world: World, folder: Path, failing: tuple[int, ...]) -> None:
    model = nn.Linear(300, 300)
    ec.async_save(folder, step=1, model=ec.FSDP(model, world.group, min_num_params=0))
    if world.rank in failing:
        raise Broken
    world.group.barrier()


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_under_way_is_committed_although_ranks_fail(
    kind: str, failing: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(Broken):
        run_world(kind, fails_beside_a_save, 2, args=(tmp_path, failing))
    assert ec.steps(tmp_path) == [1]


@pytest.mark.parametrize("main", [leaves, leaves_without_a_block])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_save_under_way_is_committed_when_ranks_leave_with_a_code(
    kind: str, main: Any, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        ec.run(main, 2, kind, args=(tmp_path,))
    assert caught.value.code == 75
    assert ec.steps(tmp_path) == [1]


# On a device -----------------------------------------------------------------------------------


def test_only_the_thread_of_the_rank_issues_collectives_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread issues is of a group that was asked for on the CPU."""
    asked: dict[str, torch.device] = {}
    issued: list[tuple[str, bool]] = []  # the group, and whether the thread is another one
    subgroup, start = ThreadGroup._subgroup, ThreadGroup._start

    def note_device(self: ThreadGroup, call: Any, name: str, members: Any, device: Any) -> Any:
        asked[name] = device
        return subgroup(self, call, name, members, torch.device("cpu"))

    def note_thread(self: ThreadGroup, call: Any, operation: Any) -> Any:
        issued.append((self.name, threading.current_thread().name == "echelon save"))
        return start(self, call, operation)

    monkeypatch.setattr(ThreadGroup, "_subgroup", note_device)
    monkeypatch.setattr(ThreadGroup, "_start", note_thread)

    def main(world: World) -> None:
        world.group._arguments.device = torch.device("meta")  # as if it were on a device
        saver = AsyncSaver.of(world.group)
        world.group._arguments.device = torch.device("cpu")
        assert saver.group is not None
        trainee = LAYOUTS["fsdp2"].trainee(world)
        trainee.train(0)
        ec.async_save(tmp_path, step=1, **given(trainee)).wait()

    ec.run(main, 2, "threads")
    of_threads = {name for name, is_another in issued if is_another}
    assert of_threads
    assert {asked[name] for name in of_threads} == {torch.device("cpu")}
