"""What a rank finds out about the others of its host: who is there, and who holds up whom."""

import concurrent.futures
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.diagnosis.flight_recorder import VARIABLE, FlightRecorder, Phase
from echelon.diagnosis.rank_monitor import RankMonitor, StepCounter
from echelon.diagnosis.step_rows import RankSteps
from echelon.diagnosis.stuck_ranks import StuckRank
from echelon.errors import ArgumentError, CommTimeout, DeadlockError, RankFailed
from echelon.process.environment import JobEnvironment
from echelon.testing import run_faulty, slow
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
def ranks(size: int) -> Iterator[tuple[RankMonitor, list[RankMonitor]]]:
    """The monitor of rank 0, and those of all ranks, which are this process."""
    recorder = FlightRecorder.create(size)
    monitors = [RankMonitor(recorder, rank, rank) for rank in range(size)]
    for monitor in monitors:
        monitor.set_phase(Phase.RUNNING)
    yield monitors[0], monitors


def test_a_rank_that_waits_for_another_one_is_not_the_one_to_blame() -> None:
    with ranks(4) as (mine, all_ranks):
        all_ranks[1].wait_for(2)
        all_ranks[2].wait_for(3)
        all_ranks[3].record_step(4)
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
        all_ranks[1].wait_for(0)
        error = mine.explained(LATE)
        assert isinstance(error, DeadlockError)
        assert {rank: missing for rank, (_, missing) in error.waits.items()} == {0: (1,), 1: (0,)}


def test_a_circle_in_which_a_script_goes_on_is_no_deadlock() -> None:
    with ranks(2) as (mine, all_ranks):
        thread = threading.Thread(target=all_ranks[1].wait_for, args=(0,))
        thread.start()
        thread.join()
        error = mine.explained(LATE)
        assert isinstance(error, CommTimeout)
        assert error.stuck == {1: "at step 0 waits for rank 0"}


def test_a_rank_that_waited_and_goes_on_waits_no_more() -> None:
    with ranks(3) as (mine, all_ranks):
        all_ranks[1].wait_for(2)
        all_ranks[1].wait_for(None)
        assert list(mine.explained(LATE).stuck) == [1]


def test_a_rank_that_has_closed_its_world_and_one_that_has_ended_are_told_as_such() -> None:
    with ranks(2) as (mine, all_ranks):
        all_ranks[1].set_phase(Phase.CLOSED)
        assert mine.explained(LATE).stuck == {1: "at step 0 has closed its world"}
    recorder = FlightRecorder.create(2)
    code = (
        "import sys; from echelon.diagnosis.flight_recorder import FlightRecorder; "
        "FlightRecorder.open(sys.argv[1]).rank_records[1].begin(1, 0)"
    )
    subprocess.run([sys.executable, "-c", code, recorder.path], check=True, timeout=60)
    mine = RankMonitor(recorder, 0, 0)
    assert mine.explained(LATE).stuck == {1: "in echelon.init() has ended"}


def test_nothing_is_said_about_ranks_of_other_hosts() -> None:
    with ranks(1) as (mine, _):
        assert mine.explained(LATE) is LATE
    assert RankMonitor.alone(0).explained(LATE) is LATE
    assert RankMonitor.alone(0).status(1) is None


def test_ranks_are_in_the_flight_recorder_of_their_launcher() -> None:
    recorder = FlightRecorder.create(3)
    monitors = [
        RankMonitor.of_job(job(rank, attempt=2), {VARIABLE: recorder.path}) for rank in range(3)
    ]
    assert all(monitor.is_shared for monitor in monitors)
    assert sorted(recorder.statuses(2)) == [0, 1, 2]


@pytest.mark.parametrize("path", ["/proc/0/fd/3", "/dev/null", ""])
def test_a_rank_does_without_a_flight_recorder_that_it_cannot_reach(path: str) -> None:
    assert not RankMonitor.of_job(job(0), {VARIABLE: path}).is_shared


def test_a_rank_does_without_a_flight_recorder_that_has_no_record_for_it() -> None:
    recorder = FlightRecorder.create(1)
    assert not RankMonitor.of_job(job(1), {VARIABLE: recorder.path}).is_shared


def test_ranks_without_a_launcher_share_the_flight_recorder_of_the_first_one_of_their_host() -> (
    None
):
    store = Notes()
    monitors = [RankMonitor.of_job(job(rank), {}) for rank in range(3)]
    for rank, monitor in enumerate(monitors):
        monitor.share(job(rank), store)
        monitor.set_phase(Phase.RUNNING)
        monitor.record_step(rank)
    for monitor in monitors:
        entries = [monitor.status(rank) for rank in range(3)]
        assert [found.where for found in entries if found] == [f"at step {n}" for n in range(3)]


def test_a_rank_does_without_a_flight_recorder_that_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echelon.diagnosis.rank_monitor._LEADER_S", 0.05)
    monitor = RankMonitor.of_job(job(1), {})
    monitor.share(job(1), Notes())
    assert not monitor.is_shared


def test_a_rank_that_will_never_come_is_told_by_the_launcher() -> None:
    recorder = FlightRecorder.create(2)
    monitor = RankMonitor.of_job(job(0, size=2), {VARIABLE: recorder.path})
    monitor.check("the start")
    recorder.rank_records[0].set_absent_rank(1)
    with pytest.raises(RankFailed, match=r"rank 1 ended before it called echelon.init\(\)") as info:
        monitor.check("the start")
    assert info.value.failed_rank == 1


def test_a_rank_whose_script_takes_the_signal_answers_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks(2) as (mine, all_ranks):
        monkeypatch.setattr("echelon.diagnosis.stacks.is_ours", lambda: False)
        all_ranks[1].record_step(8)
        status = mine.status(1)
        assert status is not None
        assert status.stacks_fd is None
        rows = StuckRank.of(status, []).lines()
        assert rows[-1] == "  its stack is not known: the script has its own use for SIGUSR2"


KINDS = ("threads", "processes")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def counts(world: ec.World) -> list[int]:
    """The number after some steps, which differ between ranks."""
    seen = [world.step]
    one, other = optimizer(), optimizer()
    for _ in range(2 + world.rank):
        one.step()
        other.step()  # as the second network of two has
    seen.append(world.step)
    world.step = 100  # as after a resume
    seen.append(world.step)
    one.step()
    other.step()
    one.step()
    seen.append(world.step)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_all_optimizers_of_a_rank_are_counted_as_one_sequence(kind: str) -> None:
    assert ec.run(counts, 3, kind) == [[0, 2 + rank, 100, 102] for rank in range(3)]


def skips(world: ec.World) -> int:
    scaler = ec.GradScaler(world.group, device="cpu", init_scale=2.0)
    model = torch.nn.Linear(2, 1)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
    return world.step


def test_a_step_that_is_skipped_is_not_counted() -> None:
    assert ec.run(skips, 2) == [2, 2]


def sets(world: ec.World, value: object) -> None:
    world.step = value  # type: ignore[assignment]


@pytest.mark.parametrize("value", [-1, 1.5, "3", None])
def test_a_step_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"step is .*; give a whole number >= 0"):
        ec.run(sets, 1, args=(value,))


def test_a_rank_under_a_fault_counts_too() -> None:
    assert run_faulty(counts, 2, slow(0.0), rank=1) == [[0, 2, 100, 102], [0, 3, 100, 102]]


def fails_after_three(world: ec.World) -> None:
    steps = optimizer()
    for _ in range(3):
        steps.step()
    world.group.barrier()
    if world.rank == 1:
        raise KeyError("lost")
    world.group.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_of_run_tells_the_step_once_there_was_one(kind: str) -> None:
    with pytest.raises(KeyError) as info:
        ec.run(fails_after_three, 2, kind)
    assert info.value.__notes__ == ["raised on rank 1 of 2", "rank 1 was at step 3"]


def test_each_thread_of_a_rank_has_a_wait_of_its_own_and_that_of_the_script_is_shown() -> None:
    monitor = RankMonitor(FlightRecorder.create(1), 0, 0)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        monitor.wait_for(2)
        for rank in (3, None):
            other.submit(monitor.wait_for, rank).result()
            assert monitor.statuses()[0].waits_for == 2
        other.submit(monitor.wait_for, 3).result()
        monitor.wait_for(None)
        assert monitor.statuses()[0].waits_for == 3
        other.submit(monitor.wait_for, None).result()
    assert monitor.statuses()[0].waits_for is None


def test_what_a_rank_gave_up_on_is_forgotten_at_its_next_call() -> None:
    recorder = FlightRecorder.create(3)
    monitors = [RankMonitor(recorder, rank, rank) for rank in range(3)]
    monitors[1].give_up([2])
    error = CommTimeout("a barrier", [1], 1.0)
    assert list(monitors[0].explained(error).stuck) == [2]
    recorder.rank_records[1]._longs[6] = 1 << 32  # another call
    assert list(monitors[0].explained(error).stuck) == [1]
    recorder.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_step_of_an_optimizer_is_counted_and_the_clock_is_not_traced() -> None:
    counter = StepCounter()
    counter.count()
    counter.measure()
    try:
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(layer.parameters())
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            layer(torch.ones(2)).sum().backward()
            step()  # warnings are errors
        assert counter.number == 3
        assert RankSteps.of(0, counter.time.rows.numbers()).num_steps == 3
    finally:
        counter.stop()
