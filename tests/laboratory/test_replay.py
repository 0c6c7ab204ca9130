"""A replayed step has the bits and the errors of the run on every rank, from every world."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.errors import (
    ArgumentError,
    BlackboxCorrupt,
    CollectiveMismatch,
    CommError,
    DeadlockError,
    ReplayMismatch,
    StateError,
    StepNotKept,
)
from echelon.laboratory import job_facts
from tests.laboratory.boxed_runs import Boxed, train_ddp, train_staged_shards
from tests.worlds import run_world

TRAININGS = {"ddp": (train_ddp, 2), "fsdp in a pipeline": (train_staged_shards, 4)}


def same_bits(boxed: Boxed, ranks: int, first_step: int) -> None:
    """Check that the replay wrote the bits of the run, in each step that it computed."""
    for rank in range(ranks):
        run, again = boxed.bits(rank, "run"), boxed.bits(rank, "replay")
        assert [*again] == [*range(first_step, max(again) + 1)]
        assert again == {step: run[step] for step in again}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_nan_in_the_batch_of_one_rank_is_replayed_bit_for_bit(
    name: str, kind: str, tmp_path: Path
) -> None:
    train, ranks = TRAININGS[name]
    bad_rank = 1
    boxed = Boxed(tmp_path / "run", bad_step=6, bad_rank=bad_rank)
    with pytest.raises(ec.NonFiniteError) as caught:
        run_world(kind, train, ranks, (boxed,))
    replay = ec.replay(boxed.folder, train, args=(boxed,))
    assert (replay.step, replay.ranks) == (6, ranks)
    assert replay.first_step in (1, 4)  # 1 if that before step 4 was still being written
    same_bits(boxed, ranks, replay.first_step)
    assert [str(error) for _, error in sorted(replay.errors.items())] == [str(caught.value)] * ranks
    assert replay.same
    assert replay.num_compared == (7 - replay.first_step) * ranks
    assert "as in the run" in str(replay)

    for step in (5, 2):  # which is before another checkpoint
        other = replace(boxed, folder=tmp_path / f"batch of {step}" / "run")
        other.folder.parent.mkdir()
        ec.replay(boxed.folder, train, args=(other,), batch_of=step)
        for rank in range(ranks):
            run, again = boxed.bits(rank, "run"), other.bits(rank, "replay")
            assert again[5] == run[5]
            assert again[6][1] not in (run[6][1], run[step][1])  # gradients of another batch


def test_an_earlier_step_is_replayed_without_the_error(tmp_path: Path) -> None:
    boxed = Boxed(tmp_path / "run", bad_step=6)
    with pytest.raises(ec.NonFiniteError):
        ec.run(train_ddp, 2, args=(boxed,))
    replay = ec.replay(boxed.folder, train_ddp, step=2, args=(boxed,))
    assert (replay.errors, replay.first_failed, replay.same) == ({}, None, True)
    assert "no rank failed" in str(replay)
    same_bits(boxed, 2, 1)


@pytest.mark.slow
def test_the_replay_of_a_replay_is_the_same(tmp_path: Path) -> None:
    boxed = Boxed(tmp_path / "run", steps=5)
    ec.run(train_ddp, 3, args=(boxed,))
    for _ in range(3):
        assert ec.replay(boxed.folder, train_ddp, args=(boxed,)).same
        same_bits(boxed, 3, 4)


def fail(world: ec.World, folder: Path, text: str, how: str = "raise") -> None:
    box = ec.Blackbox(folder)
    for step, _ in box.steps(range(3)):
        if step == 2 and world.rank == 1:
            if how == "raise":
                raise ValueError(text)
            if how == "skip":
                world.group.all_reduce(torch.zeros(1))
            if how != "nothing":
                return
        world.group.barrier()


def test_another_error_is_named_beside_that_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="first"):
        ec.run(fail, 2, args=(tmp_path, "first"))
    assert ec.replay(tmp_path, fail, args=(tmp_path, "first")).same
    replay = ec.replay(tmp_path, fail, args=(tmp_path, "second"))
    assert not replay.same
    assert "rank 1 raised ValueError: second" in str(replay)
    assert "in the run, rank 1 raised ValueError: first" in str(replay)
    assert isinstance(replay.errors[0], ec.RankFailed)


def test_a_deadlock_is_replayed(tmp_path: Path) -> None:
    with pytest.raises(DeadlockError):
        ec.run(fail, 2, args=(tmp_path, "", "return"))
    replay = ec.replay(tmp_path, fail, args=(tmp_path, "", "return"))
    assert replay.errors.keys() == {0}
    assert isinstance(replay.errors[0], DeadlockError)
    assert replay.same


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("how", ["skip", "return"])
def test_calls_that_differ_and_ranks_that_have_left_are_replayed(
    how: str, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(CommError) as raised:
        run_world(kind, fail, 2, (tmp_path, "", how))
    assert (how == "skip") == isinstance(raised.value, CollectiveMismatch)
    assert ec.replay(tmp_path, fail, args=(tmp_path, "", how)).same
    replay = ec.replay(tmp_path, fail, args=(tmp_path, "", "nothing"))
    assert not replay.same
    assert "no rank failed" in str(replay)
    assert f"in the run, rank 0 raised {type(raised.value).__name__}" in str(replay)


def test_an_error_before_the_steps_is_raised(tmp_path: Path) -> None:
    def main(world: ec.World, fails: bool) -> None:
        if fails:
            raise KeyError("before")
        for _ in ec.Blackbox(tmp_path).steps([1]):
            pass

    ec.run(main, 2, args=(False,))
    with pytest.raises(KeyError, match="before"):
        ec.replay(tmp_path, main, args=(True,))


def test_a_function_that_makes_no_box_is_named(tmp_path: Path) -> None:
    ec.run(fail, 1, args=(tmp_path, ""))
    with pytest.raises(StateError, match=r"the program ended before step 3: it made no ec\.Bla"):
        ec.replay(tmp_path, lambda world: None)


def test_another_version_is_refused_unless_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec.run(fail, 1, args=(tmp_path, ""))
    here = {**job_facts.versions(), "torch": "9.9"}
    monkeypatch.setattr(job_facts, "versions", lambda: here)
    with pytest.raises(ReplayMismatch, match=r"torch: .* in the run, 9\.9 here") as caught:
        ec.replay(tmp_path, fail, args=(tmp_path, ""))
    assert caught.value.differing.keys() == {"torch"}
    assert ec.replay(tmp_path, fail, args=(tmp_path, ""), anyway=True).same


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        ({"step": 0}, ArgumentError, "step is 0; give a whole number >= 1"),
        ({"batch_of": 0}, ArgumentError, "batch_of is 0; give"),
        ({"anyway": 1}, ArgumentError, "anyway is 1; use one of"),
        ({"step": 9}, StepNotKept, "step 9 was not kept"),
        ({"step": 2, "batch_of": 9}, StepNotKept, "step 9 was not kept"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    arguments: dict[str, Any], kind: type[Exception], sentence: str, tmp_path: Path
) -> None:
    ec.run(fail, 1, args=(tmp_path, ""))
    with pytest.raises(kind, match=sentence):
        ec.replay(tmp_path, fail, args=(tmp_path, ""), **arguments)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ("stretch-000000001/checkpoint/*/rank-00001.safetensors", "has a damaged checkpoint: .*"),
        ("stretch-000000001/rank-00001.steps", "the bytes of step .*are not those"),
    ],
)
def test_a_damaged_file_is_no_error_of_the_step(files: str, sentence: str, tmp_path: Path) -> None:
    # The first checkpoint is committed before step 1; a later one may still be being written.
    boxed = Boxed(tmp_path / "run", bad_step=3)
    with pytest.raises(ec.NonFiniteError):
        ec.run(train_ddp, 2, args=(boxed,))
    (path,) = (boxed.folder / "blackbox" / "attempt-0001").glob(files)
    data = path.read_bytes()
    for place in (300,) if path.suffix == ".steps" else range(300, len(data), 50):
        data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    path.write_bytes(data)
    with pytest.raises(BlackboxCorrupt, match=sentence) as caught:
        ec.replay(boxed.folder, train_ddp, args=(boxed,))
    assert str(path) in str(caught.value)


def test_a_script_that_swallows_its_end_has_still_ended(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        try:
            for _ in ec.Blackbox(tmp_path).steps([1, 2]):
                pass
        except BaseException:
            raise ValueError("something of its own") from None

    ec.run(main, 2)
    assert ec.replay(tmp_path, main).same


def test_torch_has_the_threads_of_the_run(tmp_path: Path) -> None:
    seen: list[int] = []

    def main(world: ec.World) -> None:
        for _ in ec.Blackbox(tmp_path).steps([1]):
            seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    ec.run(main, 1)
    torch.set_num_threads(1)
    ec.replay(tmp_path, main)
    assert (seen, torch.get_num_threads()) == ([2, 2], 1)
