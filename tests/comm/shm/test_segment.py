"""Shared memory without a name, of which nothing is left however its processes end."""

import gc
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.comm.buffers import available_nbytes
from echelon.comm.shm import segment
from echelon.comm.shm.segment import Segment
from echelon.errors import RankFailed, SharedMemoryError, WorldError
from tests.comm.checking import same

NAME = "memfd:echelon"


def mapped_segments() -> int:
    """How many segments this process maps."""
    return Path("/proc/self/maps").read_text().count(NAME)


def uses_memory(world: ec.World, ending: str) -> int:
    window = world.group.window(300_000)
    group = world.group.subgroup(range(world.size))
    group.all_reduce(torch.ones(300_000))
    world.group.all_reduce(window.local)
    assert mapped_segments() >= 2 * world.size
    assert "/dev/shm/" not in Path("/proc/self/maps").read_text()
    if ending == "kill -9 of all":
        world.group.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_segments_have_no_name_and_go_with_the_last_process() -> None:
    gc.collect()  # or a window of another test goes meanwhile
    names, before = set(os.listdir("/dev/shm")), mapped_segments()
    pids = ec.run(uses_memory, 3, "processes", args=("return",))
    gc.collect()
    assert mapped_segments() == before
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert {name for name in set(os.listdir("/dev/shm")) - names if "echelon" in name} == set()


def test_nothing_is_left_after_kill_9_of_all_ranks() -> None:
    gc.collect()
    before = mapped_segments()
    with pytest.raises(RankFailed, match="was killed by SIGKILL"):
        ec.run(uses_memory, 3, "processes", args=("kill -9 of all",))
    gc.collect()
    assert mapped_segments() == before
    assert [name for name in os.listdir("/dev/shm") if "echelon" in name] == []


def descriptors(world: ec.World) -> tuple[int, int]:
    kept: list[object] = [world.group.window(100), world.group.subgroup(range(world.size))]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(15):
        kept += [world.group.window(100), world.group.subgroup(range(world.size))]
    return before, len(os.listdir("/proc/self/fd"))


def test_descriptors_do_not_grow_with_windows_and_groups() -> None:
    before, after = ec.run(descriptors, 2, "processes")[1]
    assert after <= before


def test_a_segment_is_zeros_that_another_mapping_sees() -> None:
    gc.collect()
    before = mapped_segments()
    mine = Segment.create(10_000, what="a test", reserve=True)
    assert mine.nbytes == 12_288  # whole pages
    theirs = Segment.open(mine.token)
    same(theirs.tensor(0, 10_000), torch.zeros(10_000, dtype=torch.uint8))
    mine.tensor(100, 8).view(torch.float64).fill_(1.5)
    assert theirs.tensor(100, 8).view(torch.float64).item() == 1.5
    mine.unpublish()
    mine.unpublish()  # a second time does nothing
    kept = theirs.tensor(100, 8)
    del mine, theirs
    gc.collect()
    assert kept.view(torch.float64).item() == 1.5
    assert mapped_segments() == before + 1
    del kept
    gc.collect()
    assert mapped_segments() == before


def test_a_segment_that_is_not_published_cannot_be_opened() -> None:
    mine = Segment.create(10, what="a test", reserve=False)
    mine.unpublish()
    with pytest.raises(WorldError, match="cannot open the shared memory of process"):
        Segment.open(mine.token)


def test_more_memory_than_there_is_is_refused_before_it_is_touched(monkeypatch) -> None:
    with pytest.raises(
        SharedMemoryError, match=r"a test needs .* MiB of shared memory and"
    ) as info:
        Segment.create(2**50, what="a test", reserve=True)
    assert info.value.needed == 2**50
    assert 0 <= info.value.available <= available_nbytes() + 2**30
    monkeypatch.setattr(segment, "available_nbytes", lambda: 10)
    with pytest.raises(SharedMemoryError, match=r"needs 0\.0 MiB .* and 0\.0 MiB are available"):
        Segment.create(10, what="a test", reserve=True)


def limit_of_files(world: ec.World) -> None:
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    world.group.window(2**20)


def test_a_limit_of_files_is_one_of_shared_memory_and_is_named() -> None:
    with pytest.raises(
        SharedMemoryError, match=r"\(on rank 1\) .* may have 1024 KiB at most, .*ulimit -f"
    ):
        ec.run(limit_of_files, 2, "processes")
