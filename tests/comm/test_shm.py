"""Local processes: waiting costs nothing, and however they end, nothing of them is left."""

import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.comm.buffers import available_nbytes
from echelon.comm.shm import peer_memory, segment
from echelon.comm.shm.area import Area
from echelon.comm.shm.direct import Direct
from echelon.comm.shm.segment import Segment
from echelon.comm.shm.staged import Staged
from echelon.errors import CommError, RankFailed, SharedMemoryError, StateError, WorldError
from tests.children import environ
from tests.comm import path_checks
from tests.comm.checking import refuses, same
from tests.processes import becomes_true, has_ended

NAME = "memfd:echelon"
ROOT = Path(__file__).resolve().parents[2]


def mapped_segments() -> int:
    """How many segments this process maps."""
    return Path("/proc/self/maps").read_text().count(NAME)


# --- waiting -------------------------------------------------------------------------------------


def wait_in_every_way(world: ec.World) -> dict[str, float]:
    """Share of a core that this rank used while it waited for the other, by way of waiting."""
    group, output = world.group, torch.empty(1)
    long_message = torch.empty(2_000_000)
    waits: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(output),
        "recv": lambda: group.recv(output, 0),
        "work": lambda: group.all_reduce(output, async_op=True).wait(),
        "message": lambda: group.irecv(output, 0, tag=1).wait(),
        "full ring": lambda: group.send(long_message, 0, tag=2),
    }
    answers: dict[str, Callable[[], object]] = {
        **waits,
        "recv": lambda: group.send(output, 1),
        "message": lambda: group.send(output, 1, tag=1),
        "full ring": lambda: group.recv(long_message, 1, tag=2),
    }
    shares = {}
    for name in waits:
        group.barrier()
        if world.rank == 0:
            time.sleep(0.4)
            answers[name]()
            continue
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        waits[name]()
        shares[name] = (time.process_time() - start_cpu_s) / (time.perf_counter() - start_s)
    return shares


def test_a_rank_that_waits_uses_less_than_a_twentieth_of_a_core() -> None:
    shares = ec.run(wait_in_every_way, 2, "processes")[1]
    assert len(shares) == 5
    assert max(shares.values()) < 0.05, shares


# --- nothing is left -----------------------------------------------------------------------------


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


def stay(world: ec.World, folder: str) -> None:
    """Note the pid, then never end: asleep, in a wait, and stopped."""
    (Path(folder) / f"{os.getpid()}.pid").touch()
    if world.rank == 0:
        time.sleep(60.0)
    elif world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    world.group.barrier()


def test_ranks_die_with_the_process_that_started_them(tmp_path) -> None:
    code = (
        "import sys, echelon as ec; from tests.comm.test_shm import stay;"
        "ec.run(stay, 3, 'processes', args=(sys.argv[1],))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    caller = subprocess.Popen(command, cwd=ROOT, env=environ())
    try:
        assert becomes_true(lambda: len(list(tmp_path.glob("*.pid"))) == 3, 60.0)
        time.sleep(0.1)  # they do what they are meant to do
        pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert not any(map(has_ended, pids))
    finally:
        caller.kill()
        caller.wait()
    assert becomes_true(lambda: all(map(has_ended, pids)), 2.0)


def test_descriptors_do_not_grow_with_windows_and_groups() -> None:
    before, after = ec.run(descriptors, 2, "processes")[1]
    assert after <= before


def descriptors(world: ec.World) -> tuple[int, int]:
    kept: list[object] = [world.group.window(100), world.group.subgroup(range(world.size))]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(15):
        kept += [world.group.window(100), world.group.subgroup(range(world.size))]
    return before, len(os.listdir("/proc/self/fd"))


# --- segments ------------------------------------------------------------------------------------


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
    with pytest.raises(SharedMemoryError, match=r"and 1\.0 MiB are available: .*\(ulimit -f\)"):
        ec.run(limit_of_files, 2, "processes")


def too_little_staging(world: ec.World) -> None:
    forbid_reading()
    segment.available_nbytes = lambda: 65 * 2**20
    world.group.all_reduce(torch.ones(100_000))


def test_too_little_memory_for_a_large_collective_ends_every_rank() -> None:
    with pytest.raises(SharedMemoryError, match=r"staging .* needs 8\.0 MiB .* 1\.0 MiB are"):
        ec.run(too_little_staging, 2, "processes")


# --- reading each other's memory ------------------------------------------------------------------


def forbid_reading() -> None:
    """As a container does that lacks the right to trace processes."""
    peer_memory._read = lambda *arguments: -1


def every_path_of(world: ec.World, way: type[Direct | Staged]) -> None:
    if way is Staged and world.rank == world.size - 1:
        forbid_reading()  # on one rank: all must take the other way
    for name, check in vars(path_checks).items():
        if name.startswith("check_"):
            check(world.group)
    assert type(world.group._collectives._large) is way


@pytest.mark.parametrize("way", [Direct, Staged])
@pytest.mark.parametrize("ranks", [2, 3])
def test_large_collectives_are_right_whether_ranks_may_read_each_other_or_not(ranks, way) -> None:
    ec.run(every_path_of, ranks, "processes", args=(way,))


LARGE = 100_000


def dies_before_it_is_read(world: ec.World) -> None:
    tensor = torch.ones(LARGE)
    world.group.all_reduce(tensor)
    if world.rank == 1:
        Direct.all_reduce = lambda *arguments: os._exit(3)
    world.group.all_reduce(tensor, label="layer 7")


def test_a_rank_that_dies_while_others_read_its_memory_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 ended with exit code 3.*all_reduce.*layer 7"):
        ec.run(dies_before_it_is_read, 3, "processes")


def takes_its_memory_away(world: ec.World) -> None:
    if world.rank == 1:
        agree = Area.agree
        Area.agree = lambda area, call, key, address: agree(area, call, key, 8)
    world.group.all_reduce(torch.ones(LARGE))


def test_memory_that_is_gone_is_an_error_on_every_rank() -> None:
    with pytest.raises(CommError, match=r"rank 0 could not read \d+ bytes of rank 1 during all_re"):
        ec.run(takes_its_memory_away, 2, "processes")


# --- after a failure -----------------------------------------------------------------------------


def goes_on(world: ec.World) -> str:
    group = world.group.subgroup(range(world.size))
    try:
        group.all_reduce(torch.ones(2 + world.rank))
    except ec.CollectiveMismatch:
        refuses(StateError, "start a new world", lambda: group.barrier())
        refuses(
            StateError, "CollectiveMismatch", lambda: group.all_reduce(torch.ones(1), async_op=True)
        )
    return "refused"


def test_a_group_that_failed_refuses_to_go_on() -> None:
    assert ec.run(goes_on, 2, "processes") == ["refused"] * 2


def goes_on_after_the_end(world: ec.World) -> str:
    work = world.group.all_reduce(torch.ones(100_000), async_op=True)
    world.close()  # delivers what is open
    assert work.done()
    work.wait()
    refuses(StateError, "its world was closed", lambda: world.group.barrier())
    refuses(StateError, "closed", lambda: world.group.all_reduce(torch.ones(1), async_op=True))
    return "refused"


def test_a_closed_world_has_delivered_everything_and_refuses_more() -> None:
    assert ec.run(goes_on_after_the_end, 2, "processes") == ["refused"] * 2


def issues_more_before_it_has_waited(world: ec.World) -> str:
    group = world.group.subgroup(range(world.size))
    first = group.all_reduce(torch.ones(2 + world.rank), async_op=True)
    assert becomes_true(first.done, 10.0)
    refuses(ec.CollectiveMismatch, "#0 of group", lambda: group.barrier())  # the cause, once
    refuses(StateError, "start a new world", lambda: group.barrier())
    return "told"


def test_a_failure_in_the_background_is_told_by_the_next_call() -> None:
    assert ec.run(issues_more_before_it_has_waited, 2, "processes") == ["told"] * 2
