"""Which steps can be replayed, and from which checkpoint, whatever the ranks have left."""

import shutil
from pathlib import Path

import pytest

import echelon as ec
from echelon.errors import BlackboxCorrupt, BlackboxError, StepNotKept
from echelon.laboratory.kept_run import kept_attempts, kept_steps


def count(world: ec.World, folder: Path, steps: int) -> None:
    box = ec.Blackbox(folder, every=3, keep=3)
    for step, _ in box.steps(range(100, 100 + steps)):
        box.note(square=step * step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ec.run(count, 2, args=(tmp_path, 8))
    return tmp_path


def stretch(run: Path, first_step: int) -> Path:
    return run / "blackbox/attempt-0001" / f"stretch-{first_step:09d}"


@pytest.mark.slow
def test_a_step_is_replayed_from_the_newest_checkpoint_before_it(run: Path) -> None:
    kept = kept_steps(run, 5)
    assert (kept.first_step, kept.step) == (4, 5)
    assert kept.begin(1, 5)["batch"] == 104
    assert kept.notes(1, 5) == [{"square": 25}]
    assert kept.error(1) is None
    assert kept_steps(run, 6).first_step == 4
    assert kept_steps(run, 7).first_step == 7


@pytest.mark.slow
def test_without_a_number_it_is_the_last_step(run: Path) -> None:
    assert kept_steps(run, None).step == 8


@pytest.mark.slow
def test_a_stretch_without_a_checkpoint_is_replayed_from_the_one_before(run: Path) -> None:
    shutil.rmtree(stretch(run, 7) / "checkpoint")
    kept = kept_steps(run, 8)
    assert (kept.first_step, kept.step) == (4, 8)
    assert kept.begin(0, 8)["batch"] == 107
    assert kept_attempts(run)[0].ranges() == [(1, 8)]


@pytest.mark.slow
def test_steps_before_the_first_checkpoint_are_lost(run: Path) -> None:
    shutil.rmtree(stretch(run, 1) / "checkpoint")
    with pytest.raises(StepNotKept, match=r"step 2 was not kept\. .* replayed: 4 to 8") as caught:
        kept_steps(run, 2)
    assert (caught.value.step, caught.value.kept) == (2, ((4, 8),))


@pytest.mark.slow
def test_a_gap_ends_a_range(run: Path) -> None:
    shutil.rmtree(stretch(run, 7) / "checkpoint")
    log = stretch(run, 4) / "rank-00001.steps"
    log.write_bytes(log.read_bytes()[:-1])  # the note of step 6; the step itself is there
    assert kept_attempts(run)[0].ranges() == [(1, 8)]
    for _ in range(2):  # now without the note, and without step 6
        data = log.read_bytes()
        log.write_bytes(data[: data.rindex(b"STEP")])
    assert kept_attempts(run)[0].ranges() == [(1, 5)]
    with pytest.raises(StepNotKept, match=r"step 8 was not kept\. "):
        kept_steps(run, 8)


@pytest.mark.slow
def test_a_rank_that_has_not_begun_a_step_is_named(run: Path) -> None:
    log = stretch(run, 7) / "rank-00001.steps"
    log.write_bytes(log.read_bytes()[:-6000])
    with pytest.raises(StepNotKept, match="step 8 was not kept: rank 1 did not begin it"):
        kept_steps(run, 8)
    assert kept_attempts(run)[0].lost_after(7) == (
        "step 7 is the last that was kept on all ranks. Some have begun step 8, which rank 1 did "
        "not begin, or could not keep"
    )
    assert kept_attempts(run)[0].lost_after(8) == ""
    log.unlink()
    assert kept_steps(run, None).step == 6


@pytest.mark.slow
def test_the_newest_attempt_with_the_step_is_taken(run: Path) -> None:
    (run / "blackbox/attempt-0001/closed").unlink()
    ec.run(count, 1, args=(run, 4))
    assert kept_steps(run, 3).facts.ranks == 1
    assert kept_steps(run, 8).facts.ranks == 2
    assert kept_steps(run, None).step == 4


def test_a_folder_without_a_box_is_named(tmp_path: Path) -> None:
    with pytest.raises(BlackboxError, match=r"has no black box: make an ec\.Blackbox"):
        kept_steps(tmp_path, 1)


def test_a_box_without_any_step_says_so(tmp_path: Path) -> None:
    ec.run(count, 1, args=(tmp_path, 0))
    with pytest.raises(StepNotKept, match=r"no step was kept on all ranks\. .* replayed: none"):
        kept_steps(tmp_path, None)


@pytest.mark.slow
def test_damage_names_the_file(run: Path) -> None:
    log = stretch(run, 4) / "rank-00001.steps"
    data = bytearray(log.read_bytes())
    data[300] ^= 1
    log.write_bytes(data)
    kept = kept_steps(run, 4)
    with pytest.raises(BlackboxCorrupt, match=r"rank-00001\.steps: the bytes of step 4"):
        kept.begin(1, 4)
    (run / "blackbox/attempt-0001/job.json").write_text("{}")
    with pytest.raises(BlackboxCorrupt, match=r"job\.json"):
        kept_steps(run, 4)


@pytest.mark.slow
def test_a_damaged_file_does_not_matter_for_steps_in_others(run: Path) -> None:
    log = stretch(run, 4) / "rank-00001.steps"
    log.write_bytes(b"something else")
    assert kept_steps(run, 2).first_step == 1
    assert kept_steps(run, None).step == 8
    with pytest.raises(BlackboxCorrupt, match=r"rank-00001\.steps: does not begin as the log"):
        kept_steps(run, 5)
    log.write_bytes(b"ECHELON")  # as a full disk leaves it
    with pytest.raises(StepNotKept, match="step 5 was not kept: rank 1 did not begin it"):
        kept_steps(run, 5)


@pytest.mark.slow
def test_what_cannot_be_read_is_named(run: Path) -> None:
    log = stretch(run, 4) / "rank-00001.steps"
    log.unlink()
    log.mkdir()
    with pytest.raises(BlackboxError, match=r"rank-00001\.steps: cannot be read: it is a folder"):
        kept_steps(run, 4)
