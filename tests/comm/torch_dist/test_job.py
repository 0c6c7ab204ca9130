"""What the other ranks learn when a rank fails, over gloo and over an engine's own collectives."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from echelon.comm.world import World
from echelon.errors import (
    CommTimeout,
    RankFailed,
)
from echelon.process import time_limits
from tests.children import environ
from tests.comm.gloo_ranks import Died, gloo_errors

TIMEOUT_S = 3.0

# --- rank functions ----------------------------------------------------------------------------


def end_while_others_reduce(world: World, how: str) -> None:
    world.group.barrier()
    if world.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exit":
            os._exit(0)
        elif how == "raise":
            raise ValueError("boom")
        return
    world.group.all_reduce(torch.ones(10), label="layer.3")


def hear_late_of_a_rank_that_left(world: World) -> None:
    time_limits.CLOSE_FAILED_WORLD_S = 0.1
    world.group.barrier()
    if world.rank == 1:
        return
    if world.rank == 2:
        time.sleep(1.0)  # as if its host were busy
    world.group.all_reduce(torch.ones(10))


def come_late(world: World) -> None:
    if world.rank == 1:
        time.sleep(TIMEOUT_S + 2.0)
    world.group.all_reduce(torch.ones(10), label="layer.3")


def say_late_why_it_left(world: World) -> None:
    time_limits.READ_RECORD_OF_LOST_S = 0.2  # of a rank of which nobody knows that it lives
    world.group.barrier()
    if world.rank == 1:
        world.group._peers.sever()  # as an engine does when a wait is over
        time.sleep(1.0)
        raise ValueError("boom")
    world.group.all_reduce(torch.ones(10))


def wait_in_a_chain(world: World) -> None:
    world.group.barrier()
    if world.rank == 0:
        raise KeyError("first")
    world.group.recv(torch.ones(1), world.rank - 1)


def wait_in_a_chain_and_stay(world: World) -> float:
    world.group.barrier()
    start_s = time.monotonic()
    if world.rank == 2:
        raise KeyError("first")
    with pytest.raises(RankFailed, match="raised KeyError: 'first'"):
        world.group.recv(torch.ones(1), world.rank + 1)
    heard_s = time.monotonic() - start_s
    if world.rank == 1:
        time.sleep(TIMEOUT_S)
    return heard_s


def use_it_after_a_failure(world: World) -> str:
    if world.rank == 1:
        raise ValueError("boom")
    with pytest.raises(RankFailed):
        world.group.barrier()
    with pytest.raises(RankFailed, match="raised ValueError: boom"):
        world.group.all_reduce(torch.ones(1))
    return "still failed"


# --- tests ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True], ids=["gloo", "engine"])
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("kill", "died: its connection closed without a word"),
        ("exit", "died: its connection closed without a word"),
        ("raise", "raised ValueError: boom"),
        ("return", "closed its world and left"),
    ],
)
def test_a_rank_that_ends_is_named_by_the_others_with_their_call(
    how: str, cause: str, native: bool
) -> None:
    if native and how == "exit":
        pytest.skip("to an engine it looks like a kill")
    # So long that on a busy machine, too, no rank gives up before it hears of the end.
    outcomes = gloo_errors(
        end_while_others_reduce, timeout=10 * TIMEOUT_S, args=(how,), native=native
    )
    assert isinstance(outcomes[1], Died | ValueError | None)
    for rank in (0, 2):
        error = outcomes[rank]
        assert isinstance(error, RankFailed)
        assert error.failed_rank == 1
        assert str(error).startswith(f"rank 1 {cause}")
        assert "all_reduce(sum) float32[10] of 'layer.3' (#1 of group 'world')" in str(error)
        assert "in end_while_others_reduce" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True], ids=["gloo", "engine"])
def test_a_rank_that_does_not_come_is_named_within_the_timeout(native: bool) -> None:
    start_s = time.monotonic()
    outcomes = gloo_errors(come_late, timeout=TIMEOUT_S, native=native)
    assert time.monotonic() - start_s < 60
    for rank in (0, 2):
        assert isinstance(outcomes[rank], CommTimeout)
        assert outcomes[rank].missing == (1,)
        assert "all_reduce(sum) float32[10] of 'layer.3'" in str(outcomes[rank])


@pytest.mark.slow
def test_a_rank_that_lives_is_given_time_to_say_why_its_connection_closed() -> None:
    outcomes = gloo_errors(say_late_why_it_left, ranks=2, timeout=20.0)
    assert isinstance(outcomes[0], RankFailed)
    assert outcomes[0].cause == "raised ValueError: boom"


@pytest.mark.slow
def test_the_store_stays_for_a_rank_that_lives_and_has_yet_to_hear_of_a_failure() -> None:
    for error in gloo_errors(hear_late_of_a_rank_that_left, timeout=20.0, native=True)[::2]:
        assert isinstance(error, RankFailed)
        assert (error.failed_rank, error.cause) == (1, "closed its world and left")


def test_the_first_cause_is_found_behind_ranks_that_only_follow() -> None:
    outcomes = gloo_errors(wait_in_a_chain, timeout=TIMEOUT_S)
    assert isinstance(outcomes[0], KeyError)
    for error in outcomes[1:]:
        assert isinstance(error, RankFailed)
        assert (error.failed_rank, error.cause) == (0, "raised KeyError: 'first'")


@pytest.mark.slow
def test_a_rank_that_has_failed_but_stays_holds_up_nobody() -> None:
    outcomes = gloo_errors(wait_in_a_chain_and_stay, timeout=10 * TIMEOUT_S)
    assert max(outcomes[:2]) < TIMEOUT_S
    assert isinstance(outcomes[2], KeyError)


def test_a_group_stays_failed() -> None:
    assert gloo_errors(use_it_after_a_failure, ranks=2, timeout=TIMEOUT_S)[0] == "still failed"


@pytest.mark.slow
def test_no_way_to_end_a_script_aborts_its_process() -> None:
    ways = ["waits and closes", "closes with works outstanding", "waits and does not close"]
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.comm.exits", "2", *ways],
        capture_output=True,
        text=True,
        timeout=100,
        env=environ(),
        cwd=Path(__file__).resolve().parents[3],
    )
    assert sorted(ended.stdout.splitlines()) == sorted(f"{way} 0" for way in ways for _ in range(4))
    assert "terminate called" not in ended.stderr
    assert ended.returncode == 0
