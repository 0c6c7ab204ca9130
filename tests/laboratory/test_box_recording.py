"""A box keeps steps at any instant, and never ends a training that goes on without it."""

import errno
import os
import shutil
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint import files
from echelon.errors import ArgumentError, RankFailed, StateError
from echelon.laboratory import step_log
from echelon.laboratory.box_folder import AttemptFolder
from echelon.laboratory.box_recording import is_finite
from echelon.laboratory.kept_run import kept_attempts
from echelon.process import time_limits
from tests.laboratory.boxed_runs import Boxed, train_ddp


def ranges(folder: Path) -> list[list[tuple[int, int]]]:
    return [attempt.ranges() for attempt in kept_attempts(folder)]


def test_the_newest_checkpoints_and_the_steps_after_them_are_kept(tmp_path: Path) -> None:
    boxed = Boxed(tmp_path / "run", steps=11)
    assert ec.run(train_ddp, 2, args=(boxed,)) == [11, 11]
    attempt = kept_attempts(boxed.folder)[0]
    assert attempt.folder.is_closed
    assert [stretch.folder.first_step for stretch in attempt.stretches] == [7, 10]
    assert attempt.ranges() == [(7, 11)]


@pytest.mark.slow
def test_another_start_in_the_same_folder_is_another_attempt(tmp_path: Path) -> None:
    failed = Boxed(tmp_path / "run", bad_step=5)
    for _ in range(2):
        with pytest.raises(ec.NonFiniteError):
            ec.run(train_ddp, 2, args=(failed,))
    assert ranges(failed.folder) == [[(1, 5)], [(1, 5)]]
    ec.run(train_ddp, 3, args=(Boxed(failed.folder, steps=2),))
    assert [attempt.facts.ranks for attempt in kept_attempts(failed.folder)] == [2, 2, 3]


def stop_at(world: ec.World, folder: Path, how: str) -> None:
    layer = nn.Linear(1, 1)
    model = ec.DDP(layer, world.group)
    box = ec.Blackbox(folder, model=model, every=2)
    for step, x in box.steps([torch.full((1, 1), float(i)) for i in range(9)]):
        model(x).sum().backward()
        if step == 6 and world.rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 6 and world.rank == 1 and how == "raise":
            raise ValueError("no")


def test_a_rank_that_is_killed_leaves_its_steps(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        ec.run(stop_at, 2, "processes", args=(tmp_path, "kill"))
    (attempt,) = kept_attempts(tmp_path)
    assert attempt.ranges()[-1][1] == 6
    assert not attempt.folder.is_closed
    # The other rank may have opened the next stretch before it noticed.
    log = next(stretch.logs[1] for stretch in reversed(attempt.stretches) if 1 in stretch.logs)
    assert log.steps()[-1] == 6
    assert log.error() is None


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_exception_is_kept_and_says_how_to_replay_it(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no") as caught:
        ec.run(stop_at, 2, kind, args=(tmp_path, "raise"))
    command = f"echelon replay {tmp_path} --step 6 --function stop_at {__file__}"
    assert f"replay it: {command}" in caught.value.__notes__
    (attempt,) = kept_attempts(tmp_path)
    assert attempt.end_of(1) == (6, {"type": "ValueError", "text": "no"})
    other = attempt.end_of(0)
    assert other is None or other[1]["type"] == "RankFailed"


def test_a_second_box_in_the_folder_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        first = ec.Blackbox(tmp_path)
        with pytest.raises(StateError, match="another black box is at work in this folder"):
            ec.Blackbox(tmp_path)
        first.close()
        first.close()
        ec.Blackbox(tmp_path)

    ec.run(main, 2)


def test_a_closed_box_keeps_nothing(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        box = ec.Blackbox(tmp_path)
        box.close()
        with pytest.raises(StateError, match="is closed"):
            next(iter(box.steps([1])))

    ec.run(main, 1)


def test_a_box_without_a_step_has_nothing_to_note_or_keep(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        box = ec.Blackbox(tmp_path)
        with pytest.raises(StateError, match="has no step yet"):
            box.keep()
        with pytest.raises(StateError, match="has no step yet"):
            box.note(loss=1.0)

    ec.run(main, 1)


def test_a_batch_that_cannot_be_kept_ends_the_first_step(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        box = ec.Blackbox(tmp_path)
        for _, _ in box.steps([{"image": object()}]):
            pass

    with pytest.raises(ArgumentError, match=r"batch\.image is a object"):
        ec.run(main, 1)


def full(*arguments: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_training_goes_on_where_steps_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(world: ec.World) -> int:
        box = ec.Blackbox(tmp_path, every=4)
        for step, _ in box.steps(range(10)):
            if step == 5:
                monkeypatch.setattr(step_log.os, "writev", full)
            if step == 8:
                monkeypatch.undo()
        return box.step

    with pytest.warns(RuntimeWarning, match=r"rank 0 could not keep .* step 6 .* No space left"):
        assert ec.run(main, 1) == [10]
    assert ranges(tmp_path) == [[(5, 5), (9, 10)]]


def test_the_end_of_a_run_waits_for_a_removal_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(time_limits, "PRUNE_S", 0.2)
    monkeypatch.setattr(AttemptFolder, "prune", lambda *_: goes_on.wait(60))

    def main(world: ec.World) -> int:
        layer = nn.Linear(1, 1)
        box = ec.Blackbox(tmp_path, model=layer, every=2)
        for _ in box.steps(range(9)):
            pass
        return box.step

    try:
        with pytest.warns(RuntimeWarning, match="still removes old stretches .* is not waited for"):
            assert ec.run(main, 1) == [9]
    finally:
        goes_on.set()


@pytest.mark.parametrize("place", ["make_temporary", "write_file"])
def test_training_goes_on_where_a_checkpoint_cannot_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(world: ec.World) -> int:
        layer = ec.DDP(nn.Linear(1, 1), world.group)
        box = ec.Blackbox(tmp_path, model=layer, every=3)
        for step, _ in box.steps(range(10)):
            world.group.barrier()
            if step == 3 and world.rank == 0:
                monkeypatch.setattr(files, place, full)
            world.group.barrier()
        return box.step

    with pytest.warns(RuntimeWarning, match="training goes on: .*No space left"):
        assert ec.run(main, 2) == [10, 10]
    assert ranges(tmp_path) == [[(1, 10)]]  # from the first checkpoint


def test_steps_whose_numbers_are_not_finite_stay_longer(tmp_path: Path) -> None:
    boxed = Boxed(tmp_path / "run", bad_step=2, steps=13, action=ec.NonFinite.SKIP)
    ec.run(train_ddp, 2, args=(boxed,))
    (attempt,) = kept_attempts(boxed.folder)
    assert attempt.ranges() == [(1, 3), (10, 13)]
    assert attempt.stretches[0].folder.is_not_finite


def test_a_guard_marks_the_steps_that_it_leaves_out(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        layer = nn.Linear(1, 1)
        guard = ec.FiniteGuard(layer, world.group, action=ec.NonFinite.SKIP)
        box = ec.Blackbox(tmp_path, guard=guard, every=2)
        for step, _ in box.steps(range(6)):
            guard.allows_step(float("nan") if step == 2 else 1.0)

    ec.run(main, 1)
    marked = [w.folder.is_not_finite for w in kept_attempts(tmp_path)[0].stretches]
    assert marked == [True, False, False]


def test_a_stretch_that_is_asked_for_stays(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        box = ec.Blackbox(tmp_path, every=2, keep=1)
        for step, _ in box.steps(range(9)):
            if step == 4:
                assert box.keep() == tmp_path / "blackbox/attempt-0001/stretch-000000003"

    ec.run(main, 1)
    assert ranges(tmp_path) == [[(3, 4), (9, 9)]]


@pytest.mark.slow
def test_stretches_are_removed_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, busy, most = shutil.rmtree, [], []

    def remove_slowly(path: Path) -> None:
        busy.append(path)
        most.append(len(busy))
        time.sleep(0.1)
        remove(path)
        busy.remove(path)

    def main(world: ec.World) -> None:
        box = ec.Blackbox(tmp_path, every=1, keep=1)
        for _ in box.steps(range(9)):
            pass

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    ec.run(main, 1)
    assert len(most) > 3
    assert max(most) == 1
    assert ranges(tmp_path) == [[(9, 9)]]


def test_a_box_neither_changes_the_bits_of_a_training_nor_its_random_streams(
    tmp_path: Path,
) -> None:
    def main(world: ec.World, folder: Path | None) -> str:
        torch.manual_seed(world.rank)
        model = ec.DDP(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), world.group)
        batches = [torch.randn(3, 4) for _ in range(7)]
        if folder is None:
            steps: Any = enumerate(batches)
        else:
            steps = ec.Blackbox(folder, model=model, every=2).steps(batches)
        for _, x in steps:
            model(x).sum().backward()
        return repr(next(iter(model.parameters())).grad) + repr(torch.rand(3))

    assert ec.run(main, 2, args=(None,)) == ec.run(main, 2, args=(tmp_path,))


def test_numbers_that_are_not_finite_are_seen() -> None:
    nan = float("nan")
    assert not any(map(is_finite, [nan, -float("inf"), torch.tensor([1.0, nan])]))
    assert all(map(is_finite, [1, 1.5, torch.tensor(3), torch.ones(2)]))


def test_nothing_is_warned_of_in_an_orderly_run(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ec.run(partial(train_ddp), 2, args=(Boxed(tmp_path / "run", steps=4),))
