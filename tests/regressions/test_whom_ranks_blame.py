"""Ranks that wait in vain together blame the one that hangs, and reports name lines of users."""

import concurrent.futures
import contextlib
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.comm.torch_dist import TorchGroup
from echelon.diagnosis.flight_recorder import FlightRecorder, RankStatus
from echelon.diagnosis.watch import Watch
from echelon.errors import CommTimeout, RankFailed
from echelon.launch.screen import Screen
from tests.worlds import run_world

TIMEOUT_S = 2.0


def gives_up_and_computes(world: ec.World) -> None:
    """Rank 2 hangs; rank 1 waits for it in vain, and rank 0 for rank 1 a little longer."""
    world.group.barrier()
    if world.rank == 2:
        time.sleep(3 * TIMEOUT_S)
    elif world.rank == 1:
        try:
            world.group.recv(torch.zeros(1), 2)
        except CommTimeout:
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                pass  # as where it takes long to tell of the error
            raise
    else:
        time.sleep(0.5)
        world.group.recv(torch.zeros(1), 1)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_a_rank_that_has_given_up_itself_is_not_blamed(kind: str) -> None:
    with pytest.raises((CommTimeout, RankFailed)) as info:
        run_world(kind, gives_up_and_computes, 3, timeout=TIMEOUT_S)
    error = info.value
    blamed = list(error.stuck) if isinstance(error, CommTimeout) else [error.failed_rank]
    assert blamed == [2], error


def waits_twice(world: ec.World) -> None:
    """Rank 2 hangs; rank 1 waits for it, and a thread of rank 1 ends a wait meanwhile."""
    with_0 = world.group.subgroup([0, 1])
    with_2 = world.group.subgroup([1, 2])
    if world.rank == 2:
        time.sleep(3 * TIMEOUT_S)
    elif world.rank == 1:
        assert with_0 is not None
        assert with_2 is not None
        time.sleep(0.3)  # so that rank 0 is the first to give up
        with_0.all_reduce(torch.ones(1), async_op=True)  # on a thread, until rank 0 has come
        with_2.recv(torch.zeros(1), 1)
    else:
        assert with_0 is not None
        threading.Timer(0.6, with_0.all_reduce, (torch.ones(1),)).start()
        with_0.recv(torch.zeros(1), 1)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_a_rank_that_waits_is_not_blamed_when_another_of_its_threads_has_ended_a_wait(
    kind: str,
) -> None:
    with pytest.raises((CommTimeout, RankFailed)) as info:
        run_world(kind, waits_twice, 3, timeout=TIMEOUT_S)
    error = info.value
    blamed = list(error.stuck) if isinstance(error, CommTimeout) else [error.failed_rank]
    assert blamed == [2], error


def has_a_message_beside_a_collective(world: ec.World) -> tuple[int, ...]:
    """Rank 0 waits for rank 1 in a collective, and a thread of it for a message of rank 2."""
    world.group.barrier()
    missing: tuple[int, ...] = ()
    if world.rank > 0:
        time.sleep(0.5 * TIMEOUT_S)
    work = world.group.broadcast(torch.zeros(1), 1, async_op=True)
    assert work is not None
    if world.rank == 0:
        time.sleep(0.1)
        message = world.group.irecv(torch.zeros(1), 2)
        assert not message.done()  # which begins to wait for it
        time.sleep(0.1)
        with pytest.raises(CommTimeout) as info:
            work.wait(0.1)
        missing = info.value.missing
        message.wait()
    elif world.rank == 2:
        world.group.send(torch.zeros(1), 0)
    work.wait()
    return missing


def test_a_collective_that_is_waited_for_names_its_own_peer_and_not_that_of_a_message() -> None:
    found = run_world("gloo", has_a_message_beside_a_collective, 3, timeout=5 * TIMEOUT_S)
    assert found == [(1,), (), ()]


def gives_up_and_lives_on(world: ec.World) -> RankStatus:
    """Rank 1 comes too late; rank 0 catches the error."""
    world.group.barrier()
    if world.rank == 1:
        time.sleep(2 * TIMEOUT_S)
    else:
        with pytest.raises(CommTimeout):
            world.group.all_reduce(torch.ones(1))
    assert isinstance(world.group, TorchGroup)
    entry = world.group._job.watch.entry(world.rank)
    assert entry is not None
    return entry


def test_a_rank_that_has_caught_an_error_waits_for_nobody_any_more() -> None:
    """Else it could hang afterwards as long as it likes: a rank that waits is never late."""
    entry, _ = run_world("gloo", gives_up_and_lives_on, 2, timeout=TIMEOUT_S)
    assert (entry.awaited, entry.gave_up) == (None, 1)


def test_each_thread_of_a_rank_has_a_wait_of_its_own_and_that_of_the_script_is_shown() -> None:
    watch = Watch(FlightRecorder.create(1), 0, 0)
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        watch.await_rank(2)
        for rank in (3, None):
            other.submit(watch.await_rank, rank).result()
            assert watch.entries()[0].awaited == 2
        other.submit(watch.await_rank, 3).result()
        watch.await_rank(None)
        assert watch.entries()[0].awaited == 3
        other.submit(watch.await_rank, None).result()
    assert watch.entries()[0].awaited is None


def test_what_a_rank_gave_up_on_is_forgotten_at_its_next_call() -> None:
    book = FlightRecorder.create(3)
    watches = [Watch(book, rank, rank) for rank in range(3)]
    watches[1].give_up([2])
    error = CommTimeout("a barrier", [1], 1.0)
    assert list(watches[0].explained(error).stuck) == [2]
    book.pages[1]._longs[6] = 1 << 32  # another call
    assert list(watches[0].explained(error).stuck) == [1]
    book.close()


class Calls:
    """Communicates where Python's own modules call it."""

    def __init__(self, world: ec.World) -> None:
        self.world = world

    @contextlib.contextmanager
    def summed(self, tensor: torch.Tensor) -> Iterator[None]:
        yield
        self.world.group.all_reduce(tensor)


def place_of_a_mismatch(world: ec.World, how: str) -> None:
    """Ranks that differ in a call, which a thread of Python's pool or an exit stack makes."""
    tensor = torch.ones(2 + world.rank)
    if how == "pool":
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(world.group.all_reduce, tensor).result()
    else:
        with contextlib.ExitStack() as stack:
            stack.callback(world.group.all_reduce, tensor)


def test_the_place_of_a_call_is_a_line_of_the_user_where_python_makes_it() -> None:
    with pytest.raises(ec.CollectiveMismatch) as info:
        ec.run(place_of_a_mismatch, 2, args=("stack",))
    assert all(f"{__file__}:" in call for call in info.value.calls.values()), info.value


def test_the_place_of_a_call_of_a_pool_is_not_a_line_of_pythons_threads() -> None:
    with pytest.raises(ec.CollectiveMismatch) as info:
        ec.run(place_of_a_mismatch, 2, args=("pool",))
    assert not [call for call in info.value.calls.values() if "_bootstrap" in call], info.value


CRASH = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "train.py", line 3 in main
Extension modules: numpy, torch (total: 2)
"""
WARNING = (
    "[W1123 04:00:00.000000000 socket.cpp:767] [c10d] The hostname of the client socket cannot be "
    "retrieved. err=-3\n"
)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (["loss 1\n", CRASH], "loss 1\n"),
        (["terminate called after throwing an instance of 'c10::Error'\n  what():  x\n"], ""),
        ([WARNING, "loss 1\n"], "loss 1\n"),
        ([WARNING[:30], WARNING[30:], "loss 1\n"], "loss 1\n"),
        (["[Warmup] 10 %", "\rdone\n"], "[Warmup] 10 %\ndone\n"),
    ],
)
def test_the_screen_shows_neither_a_crash_before_its_report_nor_torchs_want_of_a_name_server(
    written: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr("sys.stderr", errors)
    folder = tmp_path / "run" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    screen = Screen(tmp_path, live=True)
    with open(folder / "stderr.log", "a") as log:
        for text in written:
            log.write(text)
            log.flush()
            screen.show()
        screen.close_attempt(failed="Warmup" not in written[0])
    assert errors.getvalue() == shown
