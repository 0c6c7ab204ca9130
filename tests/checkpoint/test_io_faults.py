"""A disk that fails is an error on all ranks, in seconds, that names rank, path and errno.

All calls with all errors are in ``tests/long/test_io_faults.py``.
"""

import errno
import itertools
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import CheckpointError
from tests.checkpoint.disks import Call, Disk, FailAt
from tests.checkpoint.failing import ERRNOS, calls_of, check_faults

MANY = ("write", "preadv")


def some(calls: list[Call]) -> list[Call]:
    """All but the many that are alike, of which the first, the last and one between are left."""
    chosen = []
    for rank, what in itertools.product((0, 1), ("rank file", "manifest")):
        alike = [c for c in calls if (c.rank, c.what) == (rank, what) and c.op in MANY]
        chosen += alike[:1] + alike[len(alike) // 2 :][:1] + alike[-1:]
    return [call for call in calls if call.op not in (*MANY, "unlock") or call in chosen]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_a_failing_call_on_one_rank_is_an_error_on_all(call: str, tmp_path: Path) -> None:
    calls = some(calls_of("ddp2", call, tmp_path))
    assert len({(one.op, one.what) for one in calls}) >= (6 if call == "load" else 17)
    check_faults("ddp2", call, tmp_path, faults_at(calls))


@pytest.mark.slow
def test_a_first_save_that_fails_leaves_no_step(tmp_path: Path) -> None:
    calls = some(calls_of("fsdp2", "save", tmp_path, later=False))
    assert ("mkdir", "root") in {(one.op, one.what) for one in calls}
    check_faults("fsdp2", "save", tmp_path, faults_at(calls))


def faults_at(calls: list[Call]) -> list[FailAt]:
    """Each kind of error in turn."""
    return [
        FailAt(rank=one.rank, number=one.number, errno=number)
        for one, number in zip(calls, itertools.cycle(ERRNOS), strict=False)
    ]


# Disks that are full, really -------------------------------------------------------------------

BIG = 100_000  # elements of what each rank saves of its own


def fill(world: World, folder: Path, limit: int | None) -> tuple[str, int | None, int | None]:
    """Save two steps, of which the second finds no room."""
    model = ec.DDP(nn.Linear(3, 2), world.group)
    mine = torch.full((BIG,), float(world.rank))
    ec.save(folder, step=1, model=model, mine=mine)
    if limit is not None and world.rank == 1:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    for call in ("save", "async_save"):
        with pytest.raises(CheckpointError) as info:
            saving = getattr(ec, call)(folder, step=2, model=model, mine=mine)
            saving.wait()
        assert ec.steps(folder) == [1]
    ec.load(folder, model=model)
    ec.save(folder, step=3, model=model, rng=False)  # for this there is room
    return str(info.value), info.value.rank, info.value.errno


def test_a_file_that_may_not_grow_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    found = ec.run(fill, 2, "processes", args=(tmp_path, BIG * 2))
    text, rank, number = found[0]
    assert found[0] == found[1]
    assert (rank, number) == (1, errno.EFBIG)
    assert text.startswith(f"rank 1: {tmp_path}/.saving-000000002-")
    assert text.endswith(f"rank-00001.safetensors: File too large (errno {errno.EFBIG})")
    assert ec.steps(tmp_path) == [1, 3]


def test_a_full_disk_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    room = f"size={3 * BIG * 4 + 4 * 2**16}"  # of the three that two steps would need four of
    mount = ["mount", "-t", "tmpfs", "-o", room, "tmpfs", str(tmp_path)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk; a limit of files is tested everywhere")
    try:
        found = ec.run(fill, 2, args=(tmp_path / "run", None))
        text, _, number = found[0]
        assert found[0] == found[1]
        assert number == errno.ENOSPC
        assert "No space left on device" in text
        assert ec.steps(tmp_path / "run") == [1, 3]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# Interrupts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupted_save_leaves_what_was_there_and_frees_the_folder(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    ec.save(tmp_path, step=1, model=model)
    with Disk() as disk:
        ec.save(tmp_path, step=2, model=model, keep=2)
    last = next(call.number for call in disk.calls if call.op == "unlock")
    committed = next(c.number for c in disk.calls if (c.op, c.what) == ("rename", "save"))
    for number in range(last):
        step = ec.steps(tmp_path)[-1] + 1
        strike = FailAt(rank=0, number=number, error=KeyboardInterrupt())
        with Disk(strike), pytest.raises(KeyboardInterrupt):
            ec.save(tmp_path, step=step, model=model, keep=2)
        assert (step in ec.steps(tmp_path)) == (number > committed), strike
        assert ec.load(tmp_path, model=model).step == step - (number <= committed)
        ec.save(tmp_path, step=step + 1, model=model, keep=2)
        names = {path.name for path in tmp_path.iterdir()}
        assert len(names) == 3
        assert not {name for name in names if name.startswith((".saving-", ".removing-"))}
