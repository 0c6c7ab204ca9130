"""A signal that reaches any rank stops all of them after the same step."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.errors import ArgumentError, StateError
from echelon.train.stopping import ECHO_S
from tests.processes import wait_until
from tests.worlds import KINDS, run_world

CAUGHT = (signal.SIGTERM, signal.SIGUSR1)
MANY = 100_000  # steps, after which a test gives up


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in CAUGHT]


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """Have another handler than Python's while the body runs."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def alone(**options: Any) -> tuple[ec.World, ec.StopSignals]:
    world = ec.init()
    return world, ec.StopSignals(world.group, **options)


# --- agreement --------------------------------------------------------------------------------


def stops(world: ec.World, number: int, who: int) -> tuple[int, str]:
    """Train until a signal that rank ``who`` sends to its own process; the last step and why."""
    weight = torch.ones(3, requires_grad=True)
    before = handlers()
    with ec.StopSignals(world.group) as stop:
        for step in range(MANY):
            (weight * (world.rank + 1)).square().sum().backward()
            world.group.all_reduce(weight.grad)
            if step == 3 and world.rank == who:
                os.kill(os.getpid(), number)
            if stop.requested():
                break
        assert stop.requested()  # it stays so, and asks nobody
    assert stop.signal is not None
    if threading.current_thread() is threading.main_thread():
        assert handlers() == before
    return step, stop.signal.name


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(kind: str) -> None:
    before = handlers()
    for who, number in ((1, signal.SIGUSR1), (0, signal.SIGTERM)):
        stops_of_ranks = run_world(kind, stops, 3, (number, who))
        assert len(set(stops_of_ranks)) == 1
        step, name = stops_of_ranks[0]
        assert (name, 3 <= step < MANY - 1) == (signal.Signals(number).name, True)
    assert handlers() == before


def stop_from_rank_0(world: ec.World, stop: ec.StopSignals) -> None:
    """Signal rank 0, and return when the job is to stop."""
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    while not stop.requested():
        pass


def leaves(world: ec.World) -> None:
    with ec.StopSignals(world.group) as stop:
        stop_from_rank_0(world, stop)
        raise SystemExit(stop.exit_code)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_the_exit_code_says_that_the_job_can_be_resumed(kind: str) -> None:
    assert (ec.EXIT_RESUMABLE, ec.StopSignals.exit_code) == (75, 75)
    with pytest.raises(SystemExit) as info:
        ec.run(leaves, 2, kind)
    assert info.value.code == 75


def saves_slowly(world: ec.World, folder: str) -> bool:
    """Rank 0 saves for a while; what another rank sees of it when its block has ended."""
    with ec.StopSignals(world.group) as stop:
        stop_from_rank_0(world, stop)
        if world.rank == 0:
            time.sleep(0.5)
            Path(folder, "saved").touch()
    return Path(folder, "saved").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_no_rank_leaves_while_another_one_still_saves(kind: str, tmp_path: Path) -> None:
    assert ec.run(saves_slowly, 3, kind, args=(str(tmp_path),)) == [True] * 3


def gets_it_late(world: ec.World) -> str:
    """Rank 1 is signalled when it has stopped already, because rank 0 was."""
    with ec.StopSignals(world.group) as stop:
        stop_from_rank_0(world, stop)
        if world.rank == 1:
            late = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
            late.start()
    return stop.signal.name if stop.signal else ""


@pytest.mark.slow
def test_a_signal_that_comes_to_a_rank_after_it_has_stopped_does_not_end_it() -> None:
    assert ec.run(gets_it_late, 2, "processes") == ["SIGUSR1"] * 2


def fails_to_save(world: ec.World) -> None:
    with ec.StopSignals(world.group) as stop:
        stop_from_rank_0(world, stop)  # which is a signal to the process of all
        if world.rank == 1:
            raise OSError("a disk is full")


@pytest.mark.slow
def test_a_rank_that_fails_to_save_ends_the_ranks_that_wait_for_it() -> None:
    before = handlers()
    with pytest.raises(OSError, match="a disk is full"):
        ec.run(fails_to_save, 3)
    assert handlers() == before


def counts(world: ec.World, every: int) -> tuple[list[bool], int]:
    answers = []
    with ec.StopSignals(world.group, every=every) as stop:
        before = world.group._position
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        world.group.barrier()
        for _ in range(7):
            answers.append(stop.requested())
        return answers, world.group._position - before


@pytest.mark.slow
def test_every_bounds_how_often_the_ranks_talk() -> None:
    never, always = [False] * 2, [True] * 5
    assert ec.run(counts, 2, "processes", args=(3,)) == [([*never, *always], 2)] * 2
    assert ec.run(counts, 2, "processes", args=(1,)) == [([True] * 7, 2)] * 2


def hurries(world: ec.World) -> tuple[float | None, float, float]:
    with ec.StopSignals(world.group, grace_s=60) as stop:
        early = stop.seconds_left
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(1.0)
        while not stop.requested():
            pass
        first = stop.seconds_left
        time.sleep(0.2)
        second = stop.seconds_left
    assert first is not None
    assert second is not None
    return early, first, second


@pytest.mark.slow
def test_the_seconds_left_count_from_the_signal_on_every_rank() -> None:
    for early, first, second in ec.run(hurries, 2, "processes"):
        assert early is None
        assert 20 < first <= 59.1  # rank 1 was asked a second ago, and that counts on rank 0
        assert second <= first - 0.2
    _, stop = alone()
    with stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(stop.requested)
        assert stop.seconds_left is None
    _, stop = alone(grace_s=0.01)
    with stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(stop.requested)
        time.sleep(0.05)
        assert stop.seconds_left == 0.0


# --- handlers ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_signal_of_the_same_kind_does_what_the_first_would_have_done() -> None:
    seen: list[int] = []

    def before(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    with handled(signal.SIGUSR1, before), handled(signal.SIGTERM, signal.SIG_IGN):
        _, stop = alone()
        with stop:
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert (stop.requested(), seen) == (True, [])
            time.sleep(ECHO_S)  # what comes sooner is an echo
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: seen == [signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is before
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: seen == [signal.SIGUSR1] * 2)


def test_a_handler_that_was_put_in_place_meanwhile_stays() -> None:
    with handled(signal.SIGUSR1, signal.SIG_DFL):
        _, stop = alone()
        with stop:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


@pytest.mark.slow
def test_only_the_signals_that_were_asked_for_are_caught() -> None:
    before = handlers()
    _, stop = alone(signals=[signal.SIGUSR2, signal.SIGUSR2])
    with stop:
        assert handlers() == before
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(stop.requested)
        assert stop.signal is signal.SIGUSR2
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.slow
def test_blocks_inside_one_another_share_a_signal_and_the_next_block_knows_nothing_of_it() -> None:
    before = handlers()
    _, outer = alone()
    _, inner = alone()
    with outer:
        assert not outer.requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        with inner:
            wait_until(inner.requested)
        assert outer.requested()
        assert handlers() != before
    assert handlers() == before
    with inner:
        assert not inner.requested()
        assert inner.signal is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_the_group_of_one_process_needs_no_other_rank(kind: str) -> None:
    assert run_world(kind, stops, 1, (signal.SIGUSR1, 0))[0][1] == "SIGUSR1"


def in_a_thread(fn: Callable[..., Any], *args: Any) -> Any:
    """What ``fn`` returns in another thread, while the main one waits for it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fn(*args)))
    thread.start()
    thread.join()
    return results[0]


def waits(world: ec.World) -> bool:
    with ec.StopSignals(world.group) as stop:
        for _ in range(100):
            if stop.requested():
                break
    return stop.signal is not None


@pytest.mark.slow
def test_simulated_ranks_without_the_main_thread_hear_no_signals_and_warn() -> None:
    before = handlers()
    with pytest.warns(RuntimeWarning, match=r"rank \d runs outside of the main thread"):
        assert in_a_thread(ec.run, waits, 2) == [False, False]
    _, stop = alone()
    with stop:  # now the main thread listens, and that is for all of the process
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(stop.requested)
        assert in_a_thread(ec.run, waits, 2) == [True, True]
    assert handlers() == before


def one_in_a_thread(world: ec.World) -> tuple[int, str]:
    if world.rank == 0:
        return stops(world, signal.SIGUSR1, 0)
    with pytest.warns(RuntimeWarning, match="rank 1 .* stops if another rank is asked"):
        return in_a_thread(stops, world, signal.SIGUSR1, 0)


@pytest.mark.slow
def test_a_rank_that_hears_no_signals_stops_with_one_that_does() -> None:
    first, second = ec.run(one_in_a_thread, 2, "processes")
    assert first == second
    assert first[1] == "SIGUSR1"


# --- misuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signals": [signal.SIGKILL]}, "signals has 9, which is no signal that can be caught"),
        ({"signals": [0]}, "signals has 0"),
        ({"signals": ["SIGTERM"]}, r"signals\[0\] is 'SIGTERM'"),
        ({"signals": "SIGTERM"}, "signals is 'SIGTERM'; give a list"),
        ({"signals": []}, r"signals is \[\]"),
        ({"signals": signal.SIGTERM}, "signals is <Signals.SIGTERM"),
        ({"every": 0}, "every is 0"),
        ({"grace_s": 0}, "grace_s is 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        alone(**options)
    with pytest.raises(ArgumentError, match="group is 3; give a Group"):
        ec.StopSignals(3)  # type: ignore[arg-type]


def test_calls_outside_of_the_block_are_refused() -> None:
    world, stop = alone()
    with pytest.raises(StateError, match=r"requested\(\) outside of `with ec.StopSignals"):
        stop.requested()
    with pytest.raises(StateError, match="do not listen"):
        stop.__exit__(None, None, None)
    with ec.StopSignals(world.group) as other:
        assert not other.requested()
    with stop, pytest.raises(StateError, match="listen already"):
        stop.__enter__()
    with pytest.raises(StateError, match="outside"):
        stop.requested()


def test_a_handler_that_python_cannot_restore_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, stop = alone()
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with pytest.raises(ArgumentError, match="SIGTERM has a handler that is not Python's"):
        stop.__enter__()
