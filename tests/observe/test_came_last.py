import time
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon import testing
from echelon.diagnosis.arrivals import Arrival
from echelon.observe import Activity, CameLast, Recorder, RunInfo, came_last, read_metrics
from echelon.observe.came_last import compare_arrivals


def arrival(ms: float, position: int, activity: Activity = Activity.BACKWARD) -> Arrival:
    return Arrival("world", position, "barrier at train.py:3 in main", round(1e6 * ms), activity)


def test_a_rank_that_is_late_in_several_asynchronous_calls_is_counted_once() -> None:
    early = [arrival(0, 0), arrival(1, 1), arrival(300, 2)]
    late = [arrival(200, 0), arrival(201, 1), arrival(300, 2)]
    first, last = compare_arrivals({0: early, 1: late}).ranks
    assert last.calls == 2
    assert last.seconds == 0.2
    assert first.seconds == 0


def test_calls_of_one_rank_alone_do_not_count() -> None:
    result = compare_arrivals({0: [arrival(0, 0), arrival(1, 1)], 1: [arrival(0, 2)]})
    assert [total.calls for total in result.ranks] == [0, 0]
    assert result.calls == []


def test_each_line_says_who_came_last_and_what_that_rank_had_done() -> None:
    early = [arrival(1000 * i, i) for i in range(3)]
    late = [arrival(1000 * i + 10 * i, i, Activity.LOADING) for i in range(3)]
    lines = str(compare_arrivals({0: early, 1: late})).splitlines()
    assert lines[1] == "rank 1 came last in 2 collectives, and in them fell back by 20 ms"
    assert lines[2] == (
        "rank 1 came last in 2 of 3, after what it did in data loading; median 10.0 ms: "
        "barrier at train.py:3 in main of group 'world'"
    )


def record(world: ec.World, folder: str) -> CameLast:
    with Recorder(world, folder, RunInfo(total_steps=3)) as recorder:
        for step in range(3):
            world.group.barrier()
            if world.rank == 1:
                time.sleep(0.2)
            world.group.all_reduce(torch.ones(3))
            recorder.step(step + 1, 1.0, 1)
    return came_last(world)


@pytest.mark.slow
def test_a_recorded_run_notes_the_rank_that_was_late(tmp_path: Path) -> None:
    results = ec.run(record, 2, "processes", args=(str(tmp_path / "run"),))
    assert results[0] == results[1]
    (call,) = [call for call in results[0].calls if "all_reduce" in call.call]
    assert call.last == {(1, Activity.OTHER): 3}
    notes = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "note"]
    (text,) = [note["text"] for note in notes if note["title"] == "Who came last"]
    line = text.splitlines()[1]
    assert line.startswith("rank 1 came last in ")
    # Three sleeps of 200 ms, less what rank 0 takes to leave the barrier on a busy machine.
    assert 450 <= float(line.split()[-2].replace(",", "")) < 1500


def delayed(world: ec.World) -> CameLast:
    for _ in range(3):
        world.group.barrier()
    return came_last(world)


@pytest.mark.slow
def test_a_rank_that_a_fault_delays_comes_late() -> None:
    fault = testing.slow(0.1)
    result, _ = testing.run_faulty(delayed, 2, fault, rank=1, world="processes", timeout=60.0)
    (call,) = [call for call in result.calls if "barrier" in call.call]
    assert {rank for rank, _ in call.last} == {1}
    assert call.last.total() == 3


def test_each_rank_waits_for_the_last_one_by_what_it_was_late_more_than_before() -> None:
    ranks = {
        0: [arrival(0, 0), arrival(100, 1), arrival(290, 2)],
        1: [arrival(50, 0), arrival(170, 1), arrival(200, 2)],
        2: [arrival(20, 0), arrival(100, 1), arrival(200, 2)],
    }
    waited_ms = [[round(1e3 * s) for s in row] for row in compare_arrivals(ranks).waited_s]
    # Rank 1 came last twice, by 50 and 70 ms: of the 70 only 20 are new for rank 0.
    assert waited_ms == [[0, 50 + 20, 0], [90, 0, 0], [90, 30 + 40, 0]]
