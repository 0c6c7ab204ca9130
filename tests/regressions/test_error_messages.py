"""What ranks say of each other: who is blamed, which call all ranks make, and odd texts."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.torch_dist import TorchGroup
from echelon.diagnosis.flight_recorder import RankStatus
from echelon.errors import CommTimeout, RankFailed
from tests.cli.jobs import Job
from tests.worlds import KINDS, run_world

TIMEOUT_S = 1.0


def gives_up_and_computes(world: ec.World) -> None:
    """Rank 2 hangs; rank 1 waits for it in vain, and rank 0 for rank 1 a little longer."""
    world.group.barrier()
    if world.rank == 2:
        time.sleep(3 * TIMEOUT_S)
    elif world.rank == 1:
        try:
            world.group.recv(torch.zeros(1), 2)
        except CommTimeout:
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                pass  # as where it takes long to tell of the error
            raise
    else:
        time.sleep(0.5)
        world.group.recv(torch.zeros(1), 1)


def waits_twice(world: ec.World) -> None:
    """Rank 2 hangs; rank 1 waits for it, and a thread of rank 1 ends a wait meanwhile."""
    with_0 = world.group.subgroup([0, 1])
    with_2 = world.group.subgroup([1, 2])
    if world.rank == 2:
        time.sleep(3 * TIMEOUT_S)
    elif world.rank == 1:
        assert with_0 is not None
        assert with_2 is not None
        time.sleep(0.3)  # so that rank 0 is the first to give up
        with_0.all_reduce(torch.ones(1), async_op=True)  # on a thread, until rank 0 has come
        with_2.recv(torch.zeros(1), 1)
    else:
        assert with_0 is not None
        threading.Timer(0.6, with_0.all_reduce, (torch.ones(1),)).start()
        with_0.recv(torch.zeros(1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("main", [gives_up_and_computes, waits_twice])
def test_neither_a_rank_that_has_given_up_nor_one_that_still_waits_is_blamed(main, kind) -> None:
    with pytest.raises((CommTimeout, RankFailed)) as info:
        run_world(kind, main, 3, timeout=TIMEOUT_S)
    error = info.value
    blamed = list(error.stuck) if isinstance(error, CommTimeout) else [error.failed_rank]
    assert blamed == [2], error


def has_a_message_beside_a_collective(world: ec.World) -> tuple[int, ...]:
    """Rank 0 waits for rank 1 in a collective, and a thread of it for a message of rank 2."""
    world.group.barrier()
    missing: tuple[int, ...] = ()
    if world.rank > 0:
        time.sleep(TIMEOUT_S)
    work = world.group.broadcast(torch.zeros(1), 1, async_op=True)
    assert work is not None
    if world.rank == 0:
        time.sleep(0.1)
        message = world.group.irecv(torch.zeros(1), 2)
        assert not message.done()  # which begins to wait for it
        time.sleep(0.1)
        with pytest.raises(CommTimeout) as info:
            work.wait(0.1)
        missing = info.value.missing
        message.wait()
    elif world.rank == 2:
        world.group.send(torch.zeros(1), 0)
    work.wait()
    return missing


@pytest.mark.slow
def test_a_collective_that_is_waited_for_names_its_own_peer_and_not_that_of_a_message() -> None:
    found = run_world("gloo", has_a_message_beside_a_collective, 3, timeout=5 * TIMEOUT_S)
    assert found == [(1,), (), ()]


def gives_up_and_lives_on(world: ec.World) -> RankStatus:
    """Rank 1 comes too late; rank 0 catches the error."""
    world.group.barrier()
    if world.rank == 1:
        time.sleep(3 * TIMEOUT_S)
    else:
        with pytest.raises(CommTimeout):
            world.group.all_reduce(torch.ones(1))
    assert isinstance(world.group, TorchGroup)
    entry = world.group._job.monitor.status(world.rank)
    assert entry is not None
    return entry


@pytest.mark.slow
def test_a_rank_that_has_caught_an_error_waits_for_nobody_any_more() -> None:
    """Else it could hang afterwards as long as it likes: a rank that waits is never late."""
    entry, _ = run_world("gloo", gives_up_and_lives_on, 2, timeout=TIMEOUT_S)
    assert (entry.waits_for, entry.gave_up_on) == (None, 1)


# A save or a whole state that only rank 0 asks for ------------------------------------------------


def wrapped(world: ec.World, technique: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if technique == "FSDP":
        return ec.FSDP(model, world.group, units=ec.units.by_type(nn.Linear))
    return ec.Pipeline(list(model), world.group, microbatches=2, loss_fn=nn.functional.mse_loss)


def calls_alone(world: ec.World, technique: str, call: str, folder: str, goes_on: bool) -> str:
    model = wrapped(world, technique)
    try:
        if world.rank == 0:
            if call == "save":
                ec.save(Path(folder), model=model, step=1)
            elif call == "optimizer":
                model.optimizer_state_dict(torch.optim.SGD(model.parameters(), lr=0.1))
            else:
                model.whole_state_dict()
        if goes_on and technique == "FSDP":
            model(torch.ones(4, 2)).sum().backward()
        elif goes_on:
            model.step(torch.ones(4, 2), target=torch.ones(4, 2))
    except ec.errors.CommError as error:
        return str(error)
    return ""


SENTENCES = {
    "save": "a request to save, which all ranks make",
    "state": "whole_state_dict(), which all ranks call",
    "optimizer": "optimizer_state_dict(), which all ranks call",
}


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_call_of_one_rank_is_named_as_one_of_all_ranks(kind, goes_on, tmp_path):
    for technique in ("FSDP", "Pipeline"):
        for call, sentence in SENTENCES.items():
            if kind != "threads" and call == "optimizer":
                continue  # as the other two; each takes a start of processes
            args = technique, call, str(tmp_path / f"{technique}-{call}"), goes_on
            try:
                first = run_world(kind, calls_alone, 2, args, timeout=5.0)[0]
            except ec.errors.CommError as error:  # of simulated ranks, whose failure is one
                first = str(error)
            assert sentence in first, (technique, call, first)


# Names that are in no encoding, and exceptions whose text fails -----------------------------------

ODD = "jos\udce9"  # as the system gives a name with a byte of Latin-1

TRAINS = f"""
import sys
import echelon as ec
import torch

assert {ODD!r} in __file__
backend, folder = sys.argv[1], sys.argv[2]
world = ec.init(None if backend == "shm" else backend, timeout=20)
model = ec.DDP(torch.nn.Linear(2, 2), world.group)
model(torch.ones(1, 2)).sum().backward()
world.group.subgroup([0, 1]).barrier(label={ODD!r})
ec.save(folder, step=1, model=model)
assert ec.load(folder, model=model).step == 1
if world.rank == 1:
    raise ValueError("there is no file " + __file__)
world.group.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_script_trains_in_a_folder_whose_name_is_in_no_encoding(
    backend: str, tmp_path: Path
) -> None:
    folder = tmp_path / ODD
    os.mkdir(folder)
    with Job(folder, TRAINS, backend, str(folder / "run")) as job:
        code, _, errors = job.end()
    assert code == 1
    assert errors[0].startswith("rank 1 at step 0 raised ValueError: there is no file ")
    assert errors[0].endswith("jos\\udce9/job.py")
    heard = "then rank 0 at step 0 raised RankFailed: rank 1 raised ValueError: there is no file "
    assert any(line.startswith(heard) for line in errors), errors


class MuteError(Exception):
    """An exception whose text fails, as one with a wrong format does."""

    def __str__(self) -> str:
        raise KeyError("text")


def test_simulated_ranks_hear_of_an_exception_whose_text_fails() -> None:
    heard: list[str] = []

    def main(world: ec.World) -> None:
        if world.rank == 1:
            raise MuteError
        try:
            world.group.barrier()
        except ec.RankFailed as error:
            heard.append(str(error))
            raise

    with pytest.raises(MuteError):
        ec.run(main, 2)
    assert heard[0].startswith("rank 1 raised MuteError: (its text raised KeyError)")


RAISES = """
import sys
import echelon as ec

class MuteError(Exception):
    def __str__(self):
        raise KeyError("text")

world = ec.init(None if sys.argv[1] == "shm" else sys.argv[1], timeout=20)
world.group.barrier()
if world.rank == 1:
    raise MuteError
world.group.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_exception_whose_text_fails_is_named(backend: str, tmp_path: Path) -> None:
    with Job(tmp_path, RAISES, backend) as job:
        code, _, errors = job.end()
    assert code == 1
    expected = "raised MuteError: (its text raised KeyError)"
    assert errors[0] == f"rank 1 at step 0 {expected}"
    heard = f"then rank 0 at step 0 raised RankFailed: rank 1 {expected}"
    assert any(line.startswith(heard) for line in errors), errors
