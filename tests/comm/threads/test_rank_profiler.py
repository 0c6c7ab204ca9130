"""Profilers of torch within simulated ranks see the calls of their own rank."""

import json
import time
from pathlib import Path

import torch
from torch.profiler import profile, record_function, schedule

import echelon as ec
from echelon.comm.threads.rank_profiler import profiler


def profiles(world: ec.World, folder: str) -> tuple[set[str], int]:
    path = Path(folder) / f"rank{world.rank}.json"
    with profile(record_shapes=True) as recorded:
        with record_function(f"of rank {world.rank}"):
            torch.ones(4) @ torch.ones(4)
        world.group.barrier()  # others begin to record meanwhile
    recorded.export_chrome_trace(str(path))
    names = {event.name for event in recorded.events() or ()}
    assert "echelon:barrier" in names
    assert recorded.key_averages().table()
    return {name for name in names if name.startswith("of rank")}, path.stat().st_size


def test_each_rank_records_its_own_calls_while_others_record_theirs(tmp_path: Path) -> None:
    for rank, (names, size) in enumerate(ec.run(profiles, 3, args=(str(tmp_path),))):
        assert names == {f"of rank {rank}"}
        assert size > 0


def profiles_steps(world: ec.World) -> int:
    num_products: list[int] = []

    def ready(recorded: profile) -> None:
        events = recorded.events() or ()
        num_products.append(sum(event.name == "aten::dot" for event in events))

    steps = schedule(wait=0, warmup=1, active=2)
    with profile(schedule=steps, on_trace_ready=ready, acc_events=True) as recorded:
        for _ in range(3):
            torch.ones(4) @ torch.ones(4)
            world.group.barrier()
            recorded.step()
    return num_products[0]


def test_a_schedule_of_steps_is_kept() -> None:
    assert ec.run(profiles_steps, 2) == [2, 2]


def accumulates(world: ec.World, path: str) -> None:
    steps = schedule(wait=0, warmup=1, active=1)
    with profile(schedule=steps, acc_events=True, record_shapes=True) as recorded:
        for _ in range(4):
            torch.ones(4) @ torch.ones(4)
            time.sleep(0.02)
            recorded.step()
    recorded.export_chrome_trace(path)


def test_an_exported_file_has_the_events_of_all_cycles_at_their_times(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    ec.run(accumulates, 1, args=(str(tmp_path / "profile.json"),))
    content = json.loads((tmp_path / "profile.json").read_text())
    assert before_ns < content["baseTimeNanoseconds"] < time.time_ns()
    first, second = [row for row in content["traceEvents"] if row["name"] == "aten::dot"]
    assert second["ts"] - first["ts"] > 40_000  # µs: there is a cycle of 20 ms between them
    assert first["args"] == {"Input Dims": [[4], [4]]}


def test_the_callers_profiler_is_torchs_own() -> None:
    before = profiler.profile.__exit__
    ec.run(profiles_steps, 1)
    assert profiler.profile.__exit__ is before
