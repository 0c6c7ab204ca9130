"""The session check of conftest.py sees what it should, so that its silence means something."""

import multiprocessing
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests import conftest
from tests.processes import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux")


def test_a_process_that_outlives_its_parent_is_named_with_its_test() -> None:
    mark = uuid.uuid4().hex
    # The parent ends at once; the orphan waits until its standard input is closed.
    orphaned = "import subprocess as s; s.Popen(['cat'], stdout=s.DEVNULL)"
    parent = subprocess.Popen(
        [sys.executable, "-c", orphaned],
        stdin=subprocess.PIPE,
        env={**os.environ, conftest.MARK: mark},
    )
    assert parent.wait() == 0
    wait_until(lambda: conftest.leftover_processes(mark))
    [line] = conftest.leftover_processes(mark)
    assert "test_a_process_that_outlives_its_parent_is_named_with_its_test" in line
    parent.stdin.close()
    parent.stdin = None


def test_a_rank_of_the_forkserver_is_named_and_the_forkserver_is_not() -> None:
    mark = os.environ[conftest.MARK]
    before = set(conftest.leftover_processes(mark))  # ranks that other tests of the session share
    context = multiprocessing.get_context("forkserver")
    ended = context.Event()
    rank = context.Process(target=ended.wait)
    rank.start()
    wait_until(lambda: set(conftest.leftover_processes(mark)) - before)
    processes = sorted(set(conftest.leftover_processes(mark)) - before)
    ended.set()
    rank.join()
    assert [line.split()[1] for line in processes] == [str(rank.pid)]


def test_a_file_of_shared_memory_is_named() -> None:
    before = conftest.shared_memory_files()
    path = conftest.SHARED_MEMORY / f"echelon-test-{uuid.uuid4().hex}"
    path.write_bytes(b"0")
    try:
        assert f"file {path}" in conftest.leftovers("no such session", before)
    finally:
        path.unlink()


def test_a_file_that_another_session_maps_is_not_ours() -> None:
    path = conftest.SHARED_MEMORY / f"echelon-test-{uuid.uuid4().hex}"
    path.write_bytes(b"0")
    mapping = (
        "import mmap, os, sys; fd = os.open(sys.argv[1], os.O_RDWR); m = mmap.mmap(fd, 0);"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", mapping, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, conftest.MARK: "another session"},
    ) as other:
        try:
            assert other.stdout.readline() == b"\n"
            assert conftest.used_by_others(path.name, "this session")
            assert not conftest.used_by_others(path.name, "another session")
        finally:
            path.unlink()
            other.stdin.close()
