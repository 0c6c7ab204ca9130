"""Stretches and attempts stay as long as somebody may want to replay their steps."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echelon as ec
from echelon.errors import BlackboxCorrupt
from echelon.laboratory.box_folder import (
    AttemptFolder,
    StretchState,
    attempt_of,
    attempts,
    needless,
    new_attempt,
)


def test_a_stretch_whose_successors_have_no_checkpoint_stays() -> None:
    stretches = [StretchState(1, True), StretchState(4, True), StretchState(7, False)]
    assert needless(stretches, keep=1) == [1]
    assert needless(stretches, keep=2) == []
    assert needless(stretches, keep=3) == []


def test_a_pinned_stretch_stays_with_the_checkpoint_before_it() -> None:
    stretches = [
        StretchState(1, True),
        StretchState(4, False, is_pinned=True),
        StretchState(7, True),
        StretchState(10, True),
    ]
    assert needless(stretches, keep=1) == [7]


def test_only_the_newest_stretches_with_numbers_that_are_not_finite_stay() -> None:
    stretches = [StretchState(step, True, is_not_finite=step < 5) for step in range(1, 9)]
    assert needless(stretches, keep=2) == [1, 2, 5, 6]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=8), st.integers(1, 3)
)
def test_what_could_be_replayed_and_is_wanted_still_can(
    flags: list[tuple[bool, bool, bool]], keep: int
) -> None:
    stretches = [StretchState(i, *flag) for i, flag in enumerate(flags)]
    gone = set(needless(stretches, keep))
    committed = [stretch.first_step for stretch in stretches if stretch.is_committed]
    wanted = {*committed[-keep:], *(w.first_step for w in stretches if w.is_pinned)}
    for step in wanted:
        start = max((first for first in committed if first <= step), default=None)
        if start is not None:
            assert gone.isdisjoint(range(start, step + 1))


def checkpoint(attempt: AttemptFolder, first_step: int) -> None:
    ec.save(attempt.stretch(first_step).checkpoint, step=first_step - 1, epoch=1)


def test_folders_are_found_in_order_and_pruned(tmp_path: Path) -> None:
    attempt = new_attempt(tmp_path)
    for first_step in (1, 101, 201):
        checkpoint(attempt, first_step)
    (attempt.path / "notes.txt").touch()
    assert [stretch.first_step for stretch in attempt.stretches()] == [1, 101, 201]
    attempt.prune(keep=2)
    assert [stretch.first_step for stretch in attempt.stretches()] == [101, 201]
    stretch = attempt.stretch(201)
    assert stretch.state == StretchState(201, True)
    stretch.pin()
    stretch.mark_not_finite()
    assert stretch.state == StretchState(201, True, True, True)
    assert stretch.log(3).name == "rank-00003.steps"


def test_the_two_newest_attempts_that_failed_and_pinned_stretches_stay(tmp_path: Path) -> None:
    assert attempts(tmp_path / "none") == []
    pinned = new_attempt(tmp_path)
    checkpoint(pinned, 1)
    pinned.stretch(1).pin()
    for _ in range(3):
        new_attempt(tmp_path)
    new_attempt(tmp_path).close()
    assert attempts(tmp_path)[-1].is_closed
    new_attempt(tmp_path)
    assert [attempt.number for attempt in attempts(tmp_path)] == [1, 3, 4, 6]
    assert attempt_of(tmp_path, "attempt-0004") == attempts(tmp_path)[2]


def test_what_no_run_has_written_stays(tmp_path: Path) -> None:
    for name in ("notes.txt", "attempt-0009", "stretch-000000007"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
    (attempt := new_attempt(tmp_path)).close()
    for first_step in (1, 101, 201):
        checkpoint(attempt, first_step)
    (attempt.stretch(1).path / "notes.txt").touch()
    (attempt.path / "stretch-000000007").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "attempt-0009").symlink_to(tmp_path / "elsewhere")
    attempt.prune(keep=1)
    assert [stretch.first_step for stretch in attempt.stretches()] == [1, 201]
    assert new_attempt(tmp_path).number == 2
    assert [attempt.number for attempt in attempts(tmp_path)] == [1, 2]
    assert len([*(tmp_path / "elsewhere").iterdir()]) == 3


def test_a_name_with_a_path_is_no_attempt(tmp_path: Path) -> None:
    with pytest.raises(BlackboxCorrupt, match="has no attempt"):
        attempt_of(tmp_path, "../attempt-0004x")
