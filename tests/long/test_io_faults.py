"""Every call of a save or a load fails once on each rank, with each kind of error."""

from pathlib import Path

import pytest

from tests.checkpoint.disks import FailAt
from tests.checkpoint.failing import ERRNOS, calls_of, check_faults


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("call", ["save", "async_save", "load"])
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "pp2"])
def test_a_failing_call_on_one_rank_is_an_error_on_all(
    layout: str, call: str, number: int, tmp_path: Path
) -> None:
    calls = [one for one in calls_of(layout, call, tmp_path) if one.op != "unlock"]
    faults = [FailAt(rank=one.rank, number=one.number, errno=number) for one in calls]
    check_faults(layout, call, tmp_path, faults)


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("call", ["save", "async_save"])
def test_a_first_save_that_fails_leaves_no_step(call: str, number: int, tmp_path: Path) -> None:
    calls = [one for one in calls_of("ddp2", call, tmp_path, later=False) if one.op != "unlock"]
    faults = [FailAt(rank=one.rank, number=one.number, errno=number) for one in calls]
    check_faults("ddp2", call, tmp_path, faults)


@pytest.mark.parametrize("op", ["write", "open", "fsync"])
@pytest.mark.parametrize("call", ["save", "async_save"])
def test_a_disk_that_stays_broken_is_an_error_on_all(call: str, op: str, tmp_path: Path) -> None:
    calls = [one for one in calls_of("fsdp2", call, tmp_path) if one.op == op]
    faults = [
        FailAt(rank=one.rank, number=one.number, errno=ERRNOS[1], stays=True)
        for one in calls
        if one.rank == 1  # on rank 0 it would also be told of what it then does for all
    ]
    check_faults("fsdp2", call, tmp_path, faults)
