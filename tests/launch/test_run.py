"""Start ranks, collect what they return, raise the first failure; find the world one is in."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import echelon as ec
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import ArgumentError, CommError, DeadlockError, RankFailed
from echelon.launch.run import _meet_job, run
from echelon.process.environment import environment
from tests.processes import free_port

KINDS = ("threads", "processes")


def describe(world: ec.World, factor: int) -> tuple[object, ...]:
    group = world.group
    same = ec.init() is world
    return world.rank, world.size, str(world.device), world.local_rank, group.ranks, factor, same


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_its_world_and_the_arguments_and_results_come_in_rank_order(kind) -> None:
    expected = [(rank, 3, "cpu", rank, (0, 1, 2), 7, True) for rank in range(3)]
    assert ec.run(describe, 3, kind, args=(7,)) == expected


def results(world: ec.World) -> object:
    window = world.group.window(3)
    window.local.fill_(world.rank)
    linear = torch.nn.Linear(2, 1)
    return [window.local, linear, {"none": None}][world.rank]


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_may_be_any_object_also_memory_of_the_world(kind) -> None:
    window, linear, rest = ec.run(results, 3, kind)
    assert torch.equal(window, torch.zeros(3))
    assert linear.weight.shape == (1, 2)
    assert rest == {"none": None}


def exits(world: ec.World, code: object) -> str:
    if world.rank == 1:
        sys.exit(code)
    return "done"


@pytest.mark.parametrize("kind", KINDS)
def test_sys_exit_0_is_a_return_and_does_not_end_the_caller(kind) -> None:
    assert ec.run(exits, 2, kind, args=(0,)) == ["done", None]


@pytest.mark.parametrize("kind", KINDS)
def test_sys_exit_with_a_code_is_a_failure(kind) -> None:
    with pytest.raises(SystemExit) as info:
        ec.run(exits, 2, kind, args=(3,))
    assert info.value.code == 3
    assert "raised on rank 1 of 2" in info.value.__notes__


def raises(world: ec.World) -> None:
    if world.rank == 1:
        raise KeyError("lost")
    world.group.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_failure_is_raised_with_its_rank_and_its_traceback(kind) -> None:
    with pytest.raises(KeyError, match="lost") as info:
        ec.run(raises, 3, kind)
    assert info.value.__notes__ == ["raised on rank 1 of 3"]
    shown = "".join(traceback.format_exception(info.value))
    assert 'raise KeyError("lost")' in shown
    assert "in raises" in shown


def cleans_up(world: ec.World) -> None:
    try:
        raises(world)
    finally:
        world.group.all_gather_object(None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_raised_rather_than_errors_that_follow_it(kind) -> None:
    with pytest.raises(
        ec.CollectiveMismatch, match=r"rank 1: .* \(while handling KeyError\)"
    ) as info:
        ec.run(cleans_up, 3, kind)
    assert info.value.__notes__ == ["raised on rank 1 of 3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 0}, "ranks is 0; give a whole number >= 1"),
        ({"ranks": -1}, "ranks is -1"),
        ({"ranks": 2.0}, "ranks is 2.0"),
        ({"ranks": 1, "world": "gloo"}, "unknown world 'gloo': use 'threads' or 'processes'"),
        ({"ranks": 1, "world": "processes", "device": "cuda"}, "torchrun and NCCL"),
    ],
)
def test_a_world_that_cannot_be_is_refused(arguments, words) -> None:
    with pytest.raises(ArgumentError, match=words):
        ec.run(describe, **arguments)


def test_a_coroutine_function_is_refused_because_nobody_would_await_it() -> None:
    async def main(world: ec.World) -> int:
        return world.rank

    with pytest.raises(ArgumentError, match=r"nobody awaits it: call asyncio\.run in a function"):
        ec.run(main, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_timeout_of_the_world_is_the_timeout_of_its_groups(kind) -> None:
    assert ec.run(timeouts, 2, kind, timeout=12.5) == [(12.5, 12.5)] * 2


def timeouts(world: ec.World) -> tuple[float, float]:
    return world.group.timeout, world.group.subgroup([0, 1]).timeout


def test_worlds_of_threads_nest_and_repeat() -> None:
    def inner(world: ec.World) -> int:
        value = torch.tensor([world.rank])
        world.group.all_reduce(value)
        return int(value)

    def outer(world: ec.World) -> list[int]:
        return ec.run(inner, world.rank + 1)

    for _ in range(3):
        assert ec.run(outer, 3) == [[0], [1, 1], [3, 3, 3]]


@pytest.mark.slow
def test_ranks_that_compute_on_are_left_behind_after_2_s_however_many() -> None:
    end = threading.Event()

    def main(world: ec.World) -> None:
        if world.rank == 0:
            raise KeyError
        end.wait()

    start_s = time.perf_counter()
    with pytest.raises(KeyError) as info:
        ec.run(main, 16)
    assert time.perf_counter() - start_s < 10.0  # not 2 s for each
    assert "left behind: rank 1, rank 2" in info.value.__notes__[1]
    end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join()


def waits_for_ever(world: ec.World) -> None:
    if world.rank == 0:
        time.sleep(60)
    world.group.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_ends_all_ranks_and_reaches_the_caller(kind) -> None:
    """Ctrl-C reaches the main thread only, which is in ``run``."""
    # Ctrl-C during the start of the fork server or an import would test something else.
    ec.run(describe, 2, kind, args=(1,))
    main = threading.main_thread().ident
    timer = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    children = set(multiprocessing.active_children())  # ranks that other tests share
    start_s = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        ec.run(sleeps_a_little if kind == "threads" else waits_for_ever, 3, kind)
    assert time.perf_counter() - start_s < 20.0  # they would wait for a minute
    assert set(multiprocessing.active_children()) <= children
    assert_no_rank_runs()


def assert_no_rank_runs() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(5.0)
            assert not thread.is_alive()


def sleeps_a_little(world: ec.World) -> None:
    if world.rank == 0:
        time.sleep(2.0)
    world.group.barrier()


def test_an_interrupt_while_ranks_start_ends_those_that_run() -> None:
    def interrupt(world: ec.World) -> None:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        world.group.barrier()

    with pytest.raises(KeyboardInterrupt):
        ec.run(interrupt, 200)
    assert_no_rank_runs()


def test_what_a_rank_still_does_after_an_interrupt_is_not_done_to_the_caller() -> None:
    def interrupt(world: ec.World) -> None:
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            end = time.perf_counter() + 0.5
            while time.perf_counter() < end:
                os.environ["OF_A_RANK"] = "1"
        world.group.barrier()

    with pytest.raises(KeyboardInterrupt):
        ec.run(interrupt, 2)
    assert "OF_A_RANK" not in os.environ
    assert_no_rank_runs()


def test_init_alone_is_a_world_of_one(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("echelon.launch.run.here", SimpleNamespace(world=None))
    monkeypatch.setattr("echelon.launch.run.guard_script", lambda *args, **options: None)
    monkeypatch.setenv("ECHELON_TIMEOUT", "7.5")
    with ec.init() as world:
        assert (world.rank, world.size, world.backend) == (0, 1, "single")
        assert world.group.timeout == 7.5
        value = torch.tensor([2.0])
        world.group.all_reduce(value, "mean")
        assert value.item() == 2.0
        assert ec.init() is world


def closes(world: ec.World) -> str:
    with world:
        world.group.barrier()
    world.close()  # a second time does nothing
    return repr(world)


@pytest.mark.parametrize("kind", KINDS)
def test_a_world_is_a_context_manager_and_may_be_closed_again(kind) -> None:
    names = {"threads": "threads", "processes": "shm"}
    expected = [f"World(rank {rank} of 2, {names[kind]}, on cpu)" for rank in (0, 1)]
    assert ec.run(closes, 2, kind) == expected


def raises_inside_with(world: ec.World) -> None:
    with world:
        if world.rank == 1:
            raise KeyError("inside")
        world.group.barrier()


def leaves_a_note(world: ec.World, folder: str) -> None:
    try:
        raises_inside_with(world)
    except CommError as error:
        (Path(folder) / f"rank{world.rank}").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_ranks_read_what_was_raised(kind, tmp_path) -> None:
    with pytest.raises(KeyError, match="inside"):
        ec.run(leaves_a_note, 3, kind, args=(str(tmp_path),))
    for rank in (0, 2):
        text = (tmp_path / f"rank{rank}").read_text()
        assert text.startswith("RankFailed: rank 1 raised KeyError: 'inside', while this rank was ")
        assert "barrier (#0 of group 'world')" in text


def returns_early(world: ec.World) -> None:
    if world.rank != 1:
        world.group.all_reduce(torch.ones(1), label="loss")


@pytest.mark.parametrize(("kind", "error"), [("threads", DeadlockError), ("processes", RankFailed)])
def test_a_rank_that_returns_early_is_named(kind, error) -> None:
    with pytest.raises(error, match="rank 1 returned") as info:
        ec.run(returns_early, 3, kind)
    assert "all_reduce(sum) float32[1] of 'loss'" in str(info.value)


def test_run_is_what_the_package_exports() -> None:
    assert ec.run is run


@pytest.mark.parametrize("timeout", [None, 0, -1.0, float("nan"), float("inf"), 1e18, "5"])
def test_a_timeout_that_is_none_is_refused(timeout) -> None:
    words = re.escape(f"timeout is {timeout!r}; it must be a number > 0, up to")
    with pytest.raises(ArgumentError, match=words):
        ec.run(describe, 1, timeout=timeout)
    if timeout is not None:  # of which init makes its own
        with pytest.raises(ArgumentError, match=words):
            ec.init(timeout=timeout)


def chooses(world: ec.World) -> None:
    assert ec.init(world.backend) is world if world.backend == "shm" else ec.init() is world
    with pytest.raises(ArgumentError, match="runs in a world of"):
        ec.init("gloo")
    with pytest.raises(ArgumentError, match="backend is 'nonsense'; use one of shm, gloo"):
        ec.init("nonsense")


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_that_cannot_be_had_is_refused(kind) -> None:
    ec.run(chooses, 2, kind)


def test_ranks_over_gloo_start_no_context_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(device: object) -> None:
        raise AssertionError(f"a context on {device}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", start)
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    known = environment(os.environ)
    assert known is not None
    with _meet_job(known, "gloo", 20.0, False, RankMonitor.alone(0)) as world:
        assert world.device == torch.device("cpu")
