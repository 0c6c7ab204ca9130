"""What every test runs in: one torch thread, and a session that leaves nothing behind.

A rank that outlives its test, or a shared-memory file that outlives its rank, is a bug of the
library. So the session fails when one is left, and names it and the test that started it.
"""

import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; child processes inherit it

import hypothesis
import pytest

# How long an example takes depends on what else the machine does, and proves nothing here.
hypothesis.settings.register_profile(
    "echelon", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("echelon")

# A shell that runs tests in the background ignores interrupts for them, and children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "ECHELON_TEST_SESSION"
PRELOADED = "ECHELON_TEST_PRELOADED"  # tests/preload.py reads it
APART = {"c10d", "children", "cli"}  # folders whose ranks come from elsewhere
GRACE_S = 5.0  # processes that were told to end may still be ending
PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
TESTS = Path(__file__).parent
# A wrapper is one code over every world. Laws and what the worlds themselves promise are tested in
# all of them each time; everything else over threads each time, and over these with what is slow.
COSTLY_WORLDS = {"processes", "gloo"}
IN_EVERY_WORLD = {"attacks", "c10d", "checkpoint", "cli", "comm", "cuda", "diagnosis", "launch"}
IN_EVERY_WORLD |= {"laws", "process"}
LONG = {"comm", "torch_dist", "cli", "c10d", "launch", "test_examples.py", "test_benchmarks.py"}
LEAVE_A_DEVICE = {"device", "notebooks"}
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# These serve all processes of a session and end with it. A rank is a child of the forkserver, not
# of pytest, and would show the same command line.
OWN_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def read(path: Path) -> bytes:
    """The content of a file of /proc; empty when its process ended or is not ours."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def processes() -> list[Path]:
    """The folders of all processes in /proc but this one."""
    return [path for path in PROC.glob("[0-9]*") if path.name != str(os.getpid())]


def is_marked(process: Path, mark: str) -> bool:
    """Whether a process inherited the mark of this session, directly or not, orphans included."""
    return f"{MARK}={mark}".encode() in read(process / "environ").split(b"\0")


def is_own_server(process: Path) -> bool:
    """Whether a process is a helper that multiprocessing keeps for this very process."""
    parent = read(process / "stat").rpartition(b")")[2].split()[1:2]
    command = read(process / "cmdline").decode(errors="replace")
    return parent == [str(os.getpid()).encode()] and any(name in command for name in OWN_SERVERS)


def leftover_processes(mark: str) -> list[str]:
    """Processes that this session started and that still run: a line for each."""
    lines = []
    for process in processes():
        if is_marked(process, mark) and not is_own_server(process):
            command = read(process / "cmdline").replace(b"\0", b" ").decode(errors="replace")
            started = [
                entry.partition(b"=")[2].decode()
                for entry in read(process / "environ").split(b"\0")
                if entry.startswith(b"PYTEST_CURRENT_TEST=")
            ]
            where = started[0] if started else "no test"
            lines.append(f"process {process.name} ({command.strip()[:80]}), started in {where}")
    return lines


def shared_memory_files() -> set[str]:
    """The names in /dev/shm of files that belong to this user."""
    names = set()
    for path in SHARED_MEMORY.glob("*"):
        try:
            if path.stat().st_uid == os.getuid():
                names.add(path.name)
        except OSError:
            continue  # it went away while we looked
    return names


def used_by_others(name: str, mark: str) -> bool:
    """Whether a process outside this session maps the file, which then is not ours."""
    needle = str(SHARED_MEMORY / name).encode()
    return any(
        needle in read(process / "maps") and not is_marked(process, mark) for process in processes()
    )


def leftovers(mark: str, before: set[str]) -> list[str]:
    """What this session has left: processes, and files in /dev/shm that were not there before."""
    files = sorted(
        name for name in shared_memory_files() - before if not used_by_others(name, mark)
    )
    return leftover_processes(mark) + [f"file {SHARED_MEMORY / name}" for name in files]


@functools.cache
def folder_of(path: Path) -> str:
    """The folder of tests that a file is in, or its own name if it is in none."""
    return path.relative_to(TESTS).parts[0]


def values_of(item: pytest.Item) -> set[str]:
    """The values that a test is given, as its name has them."""
    callspec = getattr(item, "callspec", None)
    return set(callspec.id.split("-")) if callspec else set()


def rank_modules(items: list[pytest.Item]) -> list[str]:
    """The modules whose tests run on processes; what needs hypothesis has no rank functions."""
    folders = IN_EVERY_WORLD - APART
    paths = {
        item.path
        for item in items
        if folder_of(item.path) in folders or COSTLY_WORLDS & values_of(item)
    }
    return [
        ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
        for path in sorted(paths)
        if "hypothesis" not in path.read_text()
    ]


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the session when a process or a shared-memory file outlives it."""
    if not (PROC / "self" / "environ").exists():
        yield  # no Linux: nothing to look at
        return
    mark, before = uuid.uuid4().hex, shared_memory_files()
    os.environ[MARK] = mark
    # Ranks that are processes fork from this server, so what it has imported they need not.
    multiprocessing.set_forkserver_preload(["tests.preload"])
    os.environ[PRELOADED] = " ".join(rank_modules(request.session.items))
    forkserver.ensure_running()
    del os.environ[PRELOADED]
    yield
    end = time.monotonic() + GRACE_S
    while (left := leftovers(mark, before)) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage only in what tests make.

    What is imported and collected stays until the end. To look for garbage in it takes a fifth of
    the time of an import and a tenth of the time of all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_slow(item: pytest.Item) -> bool:
    """Whether ``make test`` leaves out a test for the values that it is given."""
    named = {value for mark in item.iter_markers("slow_for") for value in mark.args}
    if folder_of(item.path) not in IN_EVERY_WORLD:
        named |= COSTLY_WORLDS
    return bool(values_of(item) & named)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a file at a time, also after a worker has crashed."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.crashed_workers import CrashedWorkers

    return CrashedWorkers(config, log)


def turn(item: pytest.Item) -> int:
    """When the file of a test is handed out, the lowest first."""
    folder = item.path.parent.name
    return 2 if folder in LEAVE_A_DEVICE else folder not in LONG and item.path.name not in LONG


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow for its values, and put long files first and those of the device last.

    Each worker takes a file at a time until none is left. Torch takes a device for the accelerator
    of a process for good: FSDP2 on the CPU would find it there.
    """
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
    items.sort(key=turn)


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Give each test one torch thread, whatever the test before it chose."""
    import torch  # the process that only hands out tests to others needs none

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_world() -> Iterator[None]:
    """End a world that the test has entered in this very process: the next test meets none."""
    yield
    this_rank = sys.modules.get("echelon.process.this_rank")
    world = this_rank.here.world if this_rank else None
    if world is not None:
        world.close()
        this_rank.here.world = None


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Put variables back, and fail a test that leaves those of a rank to the tests after it."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    for name in before.keys() | after.keys():
        if name not in before:
            del os.environ[name]
        elif before[name] != after.get(name):
            os.environ[name] = before[name]
    changed = {name: after.get(name) for name in OF_A_RANK if before.get(name) != after.get(name)}
    if changed:
        pytest.fail(f"the test left these variables changed: {changed}", pytrace=False)
