"""Saves and loads on a disk that fails at a chosen call, and what all ranks must say of it."""

from __future__ import annotations

import copy
import errno
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import echelon as ec
from echelon.checkpoint.saved_step import is_whole
from echelon.comm.world import World
from echelon.errors import CheckpointError
from tests.checkpoint.disks import Call, Disk, FailAt, Strike, lets
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.whole import check_equal, whole_state

__all__ = ["ERRNOS", "calls_of", "check_faults"]

ERRNOS = (errno.ENOSPC, errno.EIO, errno.EACCES)
MOST_S = 5.0  # until all ranks have heard
OLD, NEW = 1, 2  # steps
SAVED = "is saved; but an older step could not be removed"
CHANGED = "the model is changed in part: load again"
# Of the three times that a load opens the manifest: those that only look whether another job has
# replaced it, before and after.
LOOKS = (0, 2)
# Calls that remove older steps, after the new one is committed: who has written them counts.
RETENTION = [("scandir", "root"), ("rename", "step"), ("rmtree", "removed")]
RETENTION += [("open", "root"), ("fsync", "root")]
RETENTION += [("open", "manifest"), ("fstat", "manifest"), ("preadv", "manifest")]
RETENTION += [("scandir", "step")]


@dataclass(frozen=True)
class Raised:
    """What one rank was told.

    Attributes:
        text: the message.
        rank: that it names.
        errno: that it has.
        seconds: after the call.
    """

    text: str
    rank: int | None
    errno: int | None
    seconds: float


def save_old(world: World, layout: str, folder: Path) -> None:
    trainee = LAYOUTS[layout].trainee(world)
    trainee.train(0)
    ec.save(folder, step=OLD, model=trainee.model, optimizer=trainee.optimizer)


def attempt_saves(
    world: World, layout: str, call: str, disk: Disk, folders: Path, strikes: Sequence[Strike]
) -> list[Raised | None]:
    """Save once for each strike, in one world that goes on; each time in a folder of its own."""
    trainee = LAYOUTS[layout].trainee(world)
    for i in range(NEW):
        trainee.train(i)
    found: list[Raised | None] = []
    for i, strike in enumerate(strikes):
        if world.rank == 0:
            if (folders / "old").exists():
                shutil.copytree(folders / "old", folders / str(i))
            disk.aim(strike)
        world.group.barrier()

        def save(folder: Path = folders / str(i)) -> None:
            given = {"model": trainee.model, "optimizer": trainee.optimizer}
            saving = getattr(ec, call)(folder, step=NEW, keep=1, **given)
            if call == "async_save":
                saving.wait()

        found.append(raised(save))
        world.group.barrier()
    return found


def attempt_loads(
    world: World, layout: str, disk: Disk, folders: Path, strikes: Sequence[Strike]
) -> list[Raised | None]:
    """Load once for each strike, in one world; nothing must change, or the message says so."""
    trainee = LAYOUTS[layout].trainee(world, seed=1)
    trainee.train(5)

    def load() -> None:
        given = {"model": trainee.model, "optimizer": trainee.optimizer}
        ec.load(folders / "old", fallback=True, **given)

    found: list[Raised | None] = []
    for strike in strikes:
        before = copy.deepcopy(whole_state(trainee))
        if world.rank == 0:
            disk.aim(strike)
        world.group.barrier()
        found.append(raised(load))
        world.group.barrier()
        if found[-1] is not None and CHANGED not in found[-1].text:
            check_equal(whole_state(trainee), before)
    return found


def raised(act: Callable[[], object]) -> Raised | None:
    start_s = time.monotonic()
    try:
        act()
    except CheckpointError as error:
        return Raised(str(error), error.rank, error.errno, time.monotonic() - start_s)
    return None


def calls_of(layout: str, call: str, folder: Path, *, later: bool = True) -> list[Call]:
    """The calls of both ranks where nothing fails.

    Args:
        later: whether the folder has a step already.
    """
    if later:
        ec.run(save_old, 2, args=(layout, folder / "old"))
    with Disk() as disk:
        if call == "load":
            ec.run(attempt_loads, 2, args=(layout, disk, folder, [lets]))
        else:
            ec.run(attempt_saves, 2, args=(layout, call, disk, folder, [lets]))
            shutil.rmtree(folder / "0")
    return list(disk.calls)


def check_faults(layout: str, call: str, folder: Path, faults: Sequence[FailAt]) -> None:
    """Have each fault happen once, and check what is promised. ``calls_of`` comes first."""
    with Disk() as disk:
        if call == "load":
            by_rank = ec.run(attempt_loads, 2, args=(layout, disk, folder, faults))
        else:
            by_rank = ec.run(attempt_saves, 2, args=(layout, call, disk, folder, faults))
    for i, fault in enumerate(faults):
        struck = fault.call
        assert struck is not None, fault
        if call == "load" and struck.what == "manifest" and struck.nth in LOOKS:
            assert all(of_rank[i] is None for of_rank in by_rank), fault
            continue
        for of_rank in by_rank:
            found = of_rank[i]
            assert found is not None, fault
            assert (found.rank, found.errno) == (fault.rank, fault.errno), (fault, found)
            for part in (f"rank {fault.rank}: ", struck.path, f"rrno {fault.errno}"):
                assert part in found.text, (fault, found)
            assert found.seconds < MOST_S, (fault, found)
            if call == "load":
                assert CHANGED not in found.text or struck.op == "preadv", (fault, found)
            else:
                check_folder(folder / str(i), SAVED in found.text, struck)


def check_folder(folder: Path, is_saved: bool, struck: Call) -> None:
    """The old step is whole; or the new one is, and what failed was to remove the old one."""
    left = ec.steps(folder)
    if is_saved:
        assert (left[-1], (struck.op, struck.what) in RETENTION) == (NEW, True), struck
    else:
        assert left == ec.steps(folder.parent / "old"), struck
    assert all(is_whole(folder / f"step-{step:09}") for step in left[-1:]), struck
