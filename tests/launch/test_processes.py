"""Ranks as processes: what cannot be sent to them or from them is refused or told by its text."""

import errno
import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.errors import ArgumentError, RankFailed, SharedMemoryError, WorldError
from echelon.launch import processes
from echelon.process import time_limits
from tests.children import environ


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raises_what_cannot_travel(world: ec.World) -> None:
    raise Stubborn(1, 2)


def test_an_exception_that_cannot_be_sent_is_told_by_its_text() -> None:
    with pytest.raises(WorldError, match="Stubborn: 1 and 2"):
        ec.run(raises_what_cannot_travel, 1, "processes")


def is_killed_while_it_sends_its_result(world: ec.World) -> str:
    def sends_half(pipe: Connection, payload: bytes) -> None:
        os.write(pipe.fileno(), struct.pack("!i", len(payload)) + payload[:1])
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        Connection.send_bytes = sends_half  # type: ignore[assignment, method-assign]
    return "whole"


def test_a_rank_that_is_killed_while_it_sends_its_result_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        ec.run(is_killed_while_it_sends_its_result, 2, "processes")


def test_nothing_is_left_where_ranks_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(ranks: int) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(processes, "create_segments", no_descriptors)
    before = open_files()
    for _ in range(3):
        with pytest.raises(OSError, match="too many open files"):
            ec.run(returns_what_cannot_travel, 2, "processes")
    assert not open_files() - before


def open_files() -> Counter[str]:
    """What the descriptors of this process are open on; threads of earlier tests may close some."""
    opened = Counter[str]()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            opened[os.readlink(link)] += 1
    return opened


def returns_what_cannot_travel(world: ec.World) -> object:
    return threading.Lock()


def returns_what_only_a_rank_can_build(world: ec.World) -> object:
    return OnlyThere(os.getpid())


class OnlyThere:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["pid"] != os.getpid():
            raise KeyError("another process")


def test_a_result_that_cannot_be_sent_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"^rank 0 returned a _thread.lock that cannot be sent .*TypeError: cannot pickle.*: "
        r"return numbers, tensors or .* world='threads'",
    ) as info:
        ec.run(returns_what_cannot_travel, 1, "processes")
    assert "raised on rank 0 of 1" in info.value.__notes__
    with pytest.raises(
        ArgumentError,
        match=r"returned cannot be rebuilt in .* run \(KeyError: 'another process'\): return",
    ) as info:
        ec.run(returns_what_only_a_rank_can_build, 1, "processes")
    assert "raised on rank 0 of 1" in info.value.__notes__


def returns_storages(world: ec.World, given: torch.UntypedStorage) -> object:
    total = torch.tensor(list(given)).sum().item()
    content = torch.tensor([1.5, world.rank]).untyped_storage()
    return total, content, torch.UntypedStorage(0), lambda: content  # a lambda needs its code sent


def test_untyped_storages_go_to_ranks_and_come_back() -> None:
    given = torch.tensor([1, 2, 3], dtype=torch.uint8).untyped_storage()
    for rank, (total, content, empty, inner) in enumerate(
        ec.run(returns_storages, 2, "processes", args=(given,))
    ):
        assert (total, empty.nbytes()) == (6, 0)
        for storage in (content, inner()):
            assert type(storage) is torch.UntypedStorage
            values = torch.empty(0).set_(storage)
            assert torch.equal(values, torch.tensor([1.5, rank]))


def nothing(world: ec.World) -> None:
    """Return at once."""


def test_where_memory_is_short_nothing_of_the_start_is_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    descriptors = set(os.listdir("/proc/self/fd"))
    try:
        for limit, what in ((2**10, "flight recorder of 2 ranks"), (2**21, "group 'world'")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(SharedMemoryError, match=f"{what} needs .* .ulimit -f unlimited"):
                ec.run(nothing, 2, "processes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(os.listdir("/proc/self/fd")) <= descriptors


def test_a_function_that_cannot_be_sent_is_refused_with_what_to_do() -> None:
    with pytest.raises(ArgumentError, match="only one process can have, or use world='threads'"):
        ec.run(returns_what_cannot_travel, 2, "processes", args=(threading.Lock(),))


def torch_threads(world: ec.World) -> int:
    return torch.get_num_threads()


def test_processes_share_the_cores_among_them(monkeypatch) -> None:
    expected = int(os.environ["OMP_NUM_THREADS"])
    assert ec.run(torch_threads, 2, "processes") == [expected] * 2


@pytest.mark.slow
def test_a_script_that_starts_ranks_while_it_is_imported_is_told_what_to_do_once(tmp_path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import echelon as ec\ndef main(world): pass\nec.run(main, 2, 'processes')\n")
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, env=environ()
    )
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "ArgumentError: the script starts ranks while it is imported" in ended.stderr
    assert 'under `if __name__ == "__main__":`' in ended.stderr


@pytest.mark.slow
def test_the_fork_server_imports_what_it_is_asked_to() -> None:
    code = (
        "import echelon as ec, sys\n"
        "from echelon.launch.processes import start_fork_server\n"
        "def main(world): return 'wave' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    start_fork_server('wave')\n"
        "    print(ec.run(main, 1, 'processes'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ()
    )
    assert done.stdout == "[True]\n"


def closes_its_pipe(world: ec.World) -> None:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and os.path.exists(f"/proc/self/fd/{name}"):
            flags = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
            if flags == os.O_WRONLY and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                os.close(number)
    time.sleep(60)


def test_a_rank_that_closes_its_pipe_and_runs_on_is_ended_and_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "EXIT_S", 0.5)
    with pytest.raises(WorldError, match=r"runs, but has closed the pipe .* close no file"):
        ec.run(closes_its_pipe, 1, "processes")


def stops_its_server(world: ec.World) -> int:
    os.kill(os.getppid(), signal.SIGSTOP)
    return os.getppid()


def test_the_end_of_a_job_is_not_delayed_by_a_rank_whose_end_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "KILL_S", 0.5)
    with pytest.warns(
        RuntimeWarning, match=r"rank 0 \(process \d+\) was killed and its end is not"
    ):
        (server,) = ec.run(stops_its_server, 1, "processes")
    os.kill(server, signal.SIGCONT)
