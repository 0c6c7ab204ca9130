"""What a rank finds out about the others of its host: who is there, and who holds up whom."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from echelon.diagnosis.flight_recorder import VARIABLE, FlightRecorder
from echelon.diagnosis.watch import Watch, _finding
from echelon.errors import CommTimeout, RankFailed
from echelon.process.environment import JobEnvironment
from tests.comm.gloo_ranks import local_job

LATE = CommTimeout("barrier (#3 of group 'world') at train.py:9 in main", [1], 10.0)


class Notes(dict[str, str]):
    """A store of this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def job(rank: int, size: int = 3, attempt: int = 0) -> JobEnvironment:
    return replace(local_job(rank, size, port=0), attempt=attempt)


@contextmanager
def ranks(size: int) -> Iterator[tuple[Watch, list[Watch]]]:
    """The watch of rank 0, and those of all ranks, which are this process."""
    book = FlightRecorder.create(size)
    watches = [Watch(book, rank, rank) for rank in range(size)]
    for watch in watches:
        watch.run()
    yield watches[0], watches


def test_a_rank_that_waits_for_another_one_is_not_the_one_to_blame() -> None:
    with ranks(4) as (mine, all_ranks):
        all_ranks[1].await_rank(2)
        all_ranks[2].await_rank(3)
        all_ranks[3].step(4)
        found = mine.explained(LATE)
    assert list(found.stuck) == [3]
    assert found.stuck[3].startswith("at step 4 ")
    assert (found.missing, found.doing, found.seconds) == (LATE.missing, LATE.doing, 10.0)
    assert str(found).startswith(f"{LATE}\n  rank 3 at step 4 ")
    assert "  its last call: none" in str(found)
    assert "in test_a_rank_that_waits_for_another_one_is_not_the_one_to_blame" in str(found)
    note = "The Python stacks of the ranks of this host:\n-- rank 0, the innermost line last --\n"
    assert found.__notes__[0].startswith(note)


def test_ranks_that_wait_in_a_circle_are_told_as_such() -> None:
    with ranks(2) as (mine, all_ranks):
        all_ranks[1].await_rank(0)
        assert mine.explained(LATE).stuck == {1: "at step 0 waits for rank 0"}


def test_a_rank_that_waited_and_goes_on_waits_no_more() -> None:
    with ranks(3) as (mine, all_ranks):
        all_ranks[1].await_rank(2)
        all_ranks[1].await_rank(None)
        assert list(mine.explained(LATE).stuck) == [1]


def test_a_rank_that_has_closed_its_world_and_one_that_has_ended_are_told_as_such() -> None:
    with ranks(2) as (mine, all_ranks):
        all_ranks[1].close()
        assert mine.explained(LATE).stuck == {1: "at step 0 has closed its world"}
    book = FlightRecorder.create(2)
    code = (
        "import sys; from echelon.diagnosis.flight_recorder import FlightRecorder; "
        "FlightRecorder.open(sys.argv[1]).pages[1].enter(1, 0)"
    )
    subprocess.run([sys.executable, "-c", code, book.path], check=True, timeout=60)
    mine = Watch(book, 0, 0)
    assert mine.explained(LATE).stuck == {1: "in echelon.init() has ended"}


def test_nothing_is_said_about_ranks_of_other_hosts() -> None:
    with ranks(1) as (mine, _):
        assert mine.explained(LATE) is LATE
    assert Watch.alone(0).explained(LATE) is LATE
    assert Watch.alone(0).entry(1) is None


def test_ranks_are_in_the_logbook_of_their_launcher() -> None:
    book = FlightRecorder.create(3)
    watches = [Watch.of_job(job(rank, attempt=2), {VARIABLE: book.path}) for rank in range(3)]
    assert all(watch.is_shared for watch in watches)
    assert sorted(book.entries(2)) == [0, 1, 2]


@pytest.mark.parametrize("path", ["/proc/0/fd/3", "/dev/null", ""])
def test_a_rank_does_without_a_logbook_that_it_cannot_reach(path: str) -> None:
    assert not Watch.of_job(job(0), {VARIABLE: path}).is_shared


def test_a_rank_does_without_a_logbook_that_has_no_page_for_it() -> None:
    book = FlightRecorder.create(1)
    assert not Watch.of_job(job(1), {VARIABLE: book.path}).is_shared


def test_ranks_without_a_launcher_share_the_logbook_of_the_first_one_of_their_host() -> None:
    store = Notes()
    watches = [Watch.of_job(job(rank), {}) for rank in range(3)]
    for rank, watch in enumerate(watches):
        watch.share(job(rank), store)
        watch.run()
        watch.step(rank)
    for watch in watches:
        entries = [watch.entry(rank) for rank in range(3)]
        assert [found.where for found in entries if found] == [f"at step {n}" for n in range(3)]


def test_a_rank_does_without_a_logbook_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.diagnosis.watch._LEADER_S", 0.05)
    watch = Watch.of_job(job(1), {})
    watch.share(job(1), Notes())
    assert not watch.is_shared


def test_a_rank_that_will_never_come_is_told_by_the_launcher() -> None:
    book = FlightRecorder.create(2)
    watch = Watch.of_job(job(0, size=2), {VARIABLE: book.path})
    watch.check("the start")
    book.pages[0].expect_no_more(1)
    with pytest.raises(RankFailed, match=r"rank 1 ended before it called echelon.init\(\)") as info:
        watch.check("the start")
    assert info.value.failed_rank == 1


def test_a_rank_whose_script_takes_the_signal_answers_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks(2) as (mine, all_ranks):
        monkeypatch.setattr("echelon.diagnosis.stacks.is_ours", lambda: False)
        all_ranks[1].step(8)
        entry = mine.entry(1)
        assert entry is not None
        assert entry.stacks is None
        rows = _finding(entry, []).lines()
        assert rows[-1] == "  its stack is not known: the script has its own use for SIGUSR2"
