"""Memory without a name is made, opened by other processes, and limited like files."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.diagnosis.flight_recorder import FlightRecorder
from echelon.errors import SharedMemoryError
from echelon.process.memory_files import create_memory, memory_error, open_memory


@pytest.fixture
def files_of_one_kib() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_is_opened_by_its_path_and_name_and_nothing_else_is(tmp_path: Path) -> None:
    descriptor = os.memfd_create("of a test", os.MFD_CLOEXEC)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    os.write(descriptor, b"abc")
    opened = open_memory(path, "of a test")
    assert os.pread(opened, 3, 0) == b"abc"
    os.close(opened)
    with pytest.raises(OSError, match="is no memory that is called 'of another'"):
        open_memory(path, "of another")
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="is no memory that is called 'of a test'"):
        open_memory(str(tmp_path / "link"), "of a test")
    os.close(descriptor)
    with pytest.raises(OSError, match="No such file"):
        open_memory(path, "of a test")


@pytest.mark.usefixtures("files_of_one_kib")
def test_a_limit_of_the_size_of_files_is_named_with_what_needs_more() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        SharedMemoryError,
        match=r"a test needs 3\.0 MiB of shared memory and a file of this process may have 1 "
        r"KiB at most, .* \(ulimit -f unlimited\)$",
    ) as info:
        create_memory("of a test", 3 * 2**20, what="a test")
    assert (info.value.needed, info.value.available) == (3 * 2**20, 1024)
    assert info.value.file_limit
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(SharedMemoryError, match=r"^the flight recorder of 2 ranks needs"):
        FlightRecorder.create(2)


def test_only_a_lack_of_memory_is_an_error_of_shared_memory() -> None:
    refused = OSError(1, "Operation not permitted")
    assert memory_error(refused, "a test", 10, available=0) is refused
    full = memory_error(OSError(28, "No space left on device"), "a test", 10, available=7)
    assert isinstance(full, SharedMemoryError)
    assert (full.needed, full.available, full.file_limit) == (10, 7, False)
