"""A rank that hangs is named with its step, its last call and its stack, and nobody else is."""

import re
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

import echelon as ec
from echelon.errors import CommTimeout
from tests.comm import faults
from tests.comm.faults import DOES
from tests.comm.gloo_ranks import gloo_outcomes

TIMEOUT_S = 3.0
STEP = 4


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulated ranks that hang end some time after their test."""
    monkeypatch.setattr(faults, "THREAD_S", TIMEOUT_S)
    torch.optim.SGD([torch.ones(1)])  # imports half of torch, for longer than a rank may compute
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join()


def check(error: BaseException, hang: str, function: str) -> None:
    """That ``error`` tells of rank 1 all that can be known, down to the ``function`` it is in."""
    assert isinstance(error, CommTimeout)
    assert error.missing == (1,)
    assert error.stuck == {1: f"at step {STEP} {DOES[hang]}"}
    text = str(error)
    assert f"  rank 1 at step {STEP} {DOES[hang]}\n" in text
    assert re.search(r"  its last call: all_reduce\(mean\) .* \(#\d+ of group 'world'\) at ", text)
    assert re.search(r"  its last call: .* in train\n", text)
    notes = "\n".join(error.__notes__)
    assert "-- rank 0, the innermost line last --" in notes
    if hang == "stopped":
        assert text.endswith("its stack is not known: a process that is stopped cannot tell it")
        assert "-- rank 1, the" not in notes
        return
    stack = text.partition("its stack:\n")[2]
    assert re.search(rf"^    {re.escape(faults.__file__)}:\d+ in train$", stack, re.M)
    assert re.search(rf"^    {re.escape(faults.__file__)}:\d+ in {function}\Z", stack, re.M)
    assert "-- rank 1, the innermost line last --" in notes
    assert f"in {function}\n" in notes


@pytest.mark.slow
@pytest.mark.parametrize("hang", DOES)
def test_a_process_that_hangs_is_named_with_its_step_its_last_call_and_its_stack(hang) -> None:
    start_s = time.monotonic()
    with pytest.raises(CommTimeout) as info:
        ec.run(
            faults.train, 2, "processes", args=(faults.HANGS[hang], STEP, None), timeout=TIMEOUT_S
        )
    assert time.monotonic() - start_s < 20 + TIMEOUT_S
    check(info.value, hang, faults.HANGS[hang].__name__)


@pytest.mark.slow
@pytest.mark.parametrize("hang", [hang for hang in DOES if hang != "stopped"])
def test_a_simulated_rank_that_hangs_is_named_alike(hang) -> None:
    with pytest.raises(CommTimeout) as info:
        ec.run(faults.train, 2, "threads", args=(faults.HANGS[hang], STEP, None), timeout=1.0)
    check(info.value, hang, faults.HANGS[hang].__name__)


def trains_and_sleeps(world: ec.World) -> None:
    world.steps.count()
    faults.train(world, partial(time.sleep, 3 * TIMEOUT_S), STEP, None)


@pytest.mark.slow
def test_a_rank_that_hangs_over_gloo_is_named_alike() -> None:
    found = gloo_outcomes(trains_and_sleeps, 2, timeout=TIMEOUT_S)
    check(found[0][0], "sleep", "train")


def passes_on(world: ec.World, asleep: float) -> None:
    """Each rank waits for the one before it; the first one sleeps."""
    world.group.barrier()
    if world.rank == 0:
        time.sleep(asleep)
        return
    if world.rank < world.size - 1:
        time.sleep(0.5)  # so that the last rank is the first to give up
    world.group.recv(torch.zeros(1), world.rank - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_the_rank_at_the_root_of_a_chain_of_waits_is_named(kind) -> None:
    with pytest.raises(CommTimeout) as info:
        ec.run(passes_on, 3, kind, args=(2 * TIMEOUT_S,), timeout=TIMEOUT_S)
    assert list(info.value.stuck) == [0]
    assert "in passes_on" in str(info.value).partition("its stack:")[2]


def waits_a_moment(world: ec.World) -> list[str]:
    """Rank 0 asks again and again, with a timeout of its own; nobody is to be disturbed by it."""
    if world.rank == 1:
        time.sleep(0.5)
        world.group.barrier()
        return []
    work = world.group.barrier(async_op=True)
    assert work is not None
    seen = []
    for _ in range(100):
        try:
            work.wait(0.02)
            break
        except CommTimeout as error:
            seen.append(str(error))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_who_waits_with_his_own_timeout_asks_nobody_for_stacks(kind) -> None:
    seen, _ = ec.run(waits_a_moment, 2, kind)
    assert "waited 0.0 s for rank 1 in vain" in seen[0]
    assert not [text for text in seen if "its stack" in text]


def is_slow(world: ec.World) -> float:
    """Each step takes most of the timeout on one rank or the other."""
    total = torch.zeros(1)
    for step in range(3):
        if world.rank == step % 2:
            time.sleep(0.6 * TIMEOUT_S)
        world.group.all_reduce(torch.ones(1))
        total += 1
    return total.item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_is_slow_but_alive_raises_no_alarm(kind) -> None:
    assert ec.run(is_slow, 2, kind, timeout=TIMEOUT_S) == [3.0, 3.0]
