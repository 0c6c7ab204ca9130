"""What the other ranks learn when one fails, over gloo and over an engine's own collectives."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echelon.comm.torch_dist import connect, from_process_group, open_store
from echelon.comm.torch_dist.peers import Engine
from echelon.comm.torch_dist.start import _Maker, check_wanted
from echelon.comm.world import World
from echelon.errors import (
    CollectiveMismatch,
    CommTimeout,
    RankFailed,
    WorldError,
)
from echelon.process import time_limits
from echelon.process.environment import environment
from tests.children import environ
from tests.comm.gloo_ranks import Died, free_port, gloo_outcomes, local_job, start

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


def come_late(world: World) -> None:
    if world.rank == 1:
        time.sleep(TIMEOUT_S + 2.0)
    world.group.all_reduce(torch.ones(10), label="layer.3")


def reduce_another_shape(world: World) -> None:
    world.group.barrier()
    world.group.all_reduce(torch.ones(11 if world.rank == 1 else 10))


def reduce_with_another_operation(world: World) -> None:
    world.group.all_reduce(torch.ones(10), "max" if world.rank == 1 else "sum")


def expect_another_length(world: World) -> None:
    size, lacking = world.size, world.rank == 0
    splits = [1] * (size - 1) + [2 if lacking else 1]
    world.group.all_to_all_single(torch.empty(sum(splits)), torch.ones(size), splits, [1] * size)


def say_late_why_it_left(world: World) -> None:
    time_limits.READ_RECORD_OF_LOST_S = 0.2  # of a rank of which nobody knows that it lives
    world.group.barrier()
    if world.rank == 1:
        world.group._peers.sever()  # as an engine does when a wait is over
        time.sleep(1.0)
        raise ValueError("boom")
    world.group.all_reduce(torch.ones(10))


def start_on_one_rank_alone(rank: int, port: int) -> None:
    if rank == 1:
        begin = _Maker._start_gloo

        def begin_in_vain(self: _Maker, *args: Any) -> Engine:
            begin(self, *args)
            raise RuntimeError("no such interface")

        _Maker._start_gloo = begin_in_vain  # type: ignore[method-assign]
    with connect(
        local_job(rank, 2, port), "gloo", device=torch.device("cpu"), timeout=10.0
    ) as world:
        world.group.barrier()


def send_another_length(world: World) -> None:
    if world.rank == 0:
        world.group.send(torch.ones(6), 1)
    elif world.rank == 1:
        world.group.recv(torch.ones(4), 0)


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


def wrap_the_default_group(rank: int, port: int) -> list[float]:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = from_process_group(dist.group.WORLD)
    tensor = torch.tensor([float(rank)])
    group.all_reduce(tensor, "mean")
    dist.all_reduce(tensor)  # the process group stays usable beside it
    group.close()
    dist.destroy_process_group()
    return tensor.tolist()


def start_from_slurm(rank: int, port: int) -> float:
    variables = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(port),
    }
    found = environment(variables)
    assert found is not None
    with connect(found, "gloo", device=torch.device("cpu"), timeout=20.0) as world:
        tensor = torch.tensor([world.rank + 1.0])
        world.group.all_reduce(tensor)
        return tensor.item()


# --- tests over processes ----------------------------------------------------------------------


def errors(
    fn: Callable[..., Any], ranks: int = 3, timeout: float = TIMEOUT_S, **options: Any
) -> list[Any]:
    return [outcome for outcome, _ in gloo_outcomes(fn, ranks, timeout=timeout, **options)]


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
    found = errors(end_while_others_reduce, timeout=10 * TIMEOUT_S, args=(how,), native=native)
    assert isinstance(found[1], Died | ValueError | None)
    for rank in (0, 2):
        assert isinstance(found[rank], RankFailed)
        assert found[rank].failed_rank == 1
        assert str(found[rank]).startswith(f"rank 1 {cause}")
        assert "all_reduce(sum) float32[10] of 'layer.3' (#1 of group 'world')" in str(found[rank])
        assert "in end_while_others_reduce" in str(found[rank])


@pytest.mark.parametrize("native", [False, True], ids=["gloo", "engine"])
def test_a_rank_that_does_not_come_is_named_within_the_timeout(native: bool) -> None:
    start_s = time.monotonic()
    found = errors(come_late, native=native)
    assert time.monotonic() - start_s < 60
    for rank in (0, 2):
        assert isinstance(found[rank], CommTimeout)
        assert found[rank].missing == (1,)
        assert "all_reduce(sum) float32[10] of 'layer.3'" in str(found[rank])


@pytest.mark.parametrize(
    ("fn", "shows"),
    [
        (reduce_another_shape, "rank 1: all_reduce(sum) float32[11] at "),
        (reduce_with_another_operation, "rank 1: all_reduce(max) float32[10] at "),
        (expect_another_length, "expects [1, 1, 2] elements at "),
    ],
)
@pytest.mark.parametrize("native", [False, True], ids=["gloo", "engine"])
def test_calls_that_differ_are_shown_on_every_rank_when_they_are_compared(
    fn: Callable[[World], None], shows: str, native: bool
) -> None:
    for error in errors(fn, check=True, native=native):
        assert isinstance(error, CollectiveMismatch)
        assert shows in str(error)
        assert f"in {fn.__name__}   <-- differs" in str(error)
        assert sorted(error.calls) == [0, 1, 2]


@pytest.mark.parametrize("fn", [reduce_another_shape, send_another_length])
def test_calls_that_differ_never_meet_and_are_shown_after_the_timeout(
    fn: Callable[[World], None],
) -> None:
    found = errors(fn, ranks=2)
    assert [type(error) for error in found] == [CollectiveMismatch] * 2, found
    assert [sorted(error.calls) for error in found] == [[0, 1]] * 2


def test_a_rank_that_lives_is_given_time_to_say_why_its_connection_closed() -> None:
    found = errors(say_late_why_it_left, ranks=2, timeout=20.0)
    assert isinstance(found[0], RankFailed)
    assert found[0].cause == "raised ValueError: boom"


def test_a_rank_that_cannot_start_its_engine_says_so_to_those_that_have() -> None:
    (ready, _), (failed, _) = start(start_on_one_rank_alone, 2, (free_port(),))
    assert isinstance(failed, WorldError)
    assert isinstance(ready, RankFailed)
    assert ready.failed_rank == 1
    assert ready.cause.startswith(
        "raised WorldError: rank 1 of 2 could not start gloo: no such interface"
    )


def test_the_first_cause_is_found_behind_ranks_that_only_follow() -> None:
    found = errors(wait_in_a_chain)
    assert isinstance(found[0], KeyError)
    for error in found[1:]:
        assert isinstance(error, RankFailed)
        assert (error.failed_rank, error.cause) == (0, "raised KeyError: 'first'")


def test_a_rank_that_has_failed_but_stays_holds_up_nobody() -> None:
    found = errors(wait_in_a_chain_and_stay, timeout=10 * TIMEOUT_S)
    assert max(found[:2]) < TIMEOUT_S
    assert isinstance(found[2], KeyError)


def test_slurm_variables_start_a_world() -> None:
    found = start(start_from_slurm, 2, (free_port(),))
    assert [outcome for outcome, _ in found] == [3.0, 3.0]


def test_a_process_group_of_the_user_is_wrapped_and_stays_the_users() -> None:
    found = start(wrap_the_default_group, 2, (free_port(),))
    assert [outcome for outcome, _ in found] == [[1.0], [1.0]]


def test_a_group_stays_failed() -> None:
    assert errors(use_it_after_a_failure, ranks=2)[0] == "still failed"


@pytest.mark.slow
def test_no_way_to_end_a_script_aborts_its_process() -> None:
    ways = ["waits and closes", "closes with works outstanding", "waits and does not close"]
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.comm.exits", "2", *ways],
        capture_output=True,
        text=True,
        timeout=100,
        env=environ(),
        cwd=Path(__file__).resolve().parents[2],
    )
    assert sorted(ended.stdout.splitlines()) == sorted(f"{way} 0" for way in ways for _ in range(4))
    assert "terminate called" not in ended.stderr
    assert ended.returncode == 0


# --- tests in this process ---------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(WorldError, match=rf"port {port} of 127.0.0.1 is in use.*MASTER_PORT"):
            open_store(local_job(0, 2, port), timeout=1.0)


def test_ranks_that_do_not_start_are_named() -> None:
    with pytest.raises(CommTimeout, match=r"start of the world waited .* s for ranks 1, 2") as info:
        connect(local_job(0, 3, free_port()), "gloo", device=torch.device("cpu"), timeout=0.5)
    assert info.value.missing == (1, 2)


def test_a_store_that_cannot_be_reached_is_named() -> None:
    port = free_port()
    with pytest.raises(WorldError, match=rf"could not reach the store of rank 0 at .*:{port}"):
        open_store(local_job(1, 2, port), timeout=0.5)


def test_a_store_on_one_host_listens_on_the_loopback_interface_only() -> None:
    port = free_port()
    store = open_store(local_job(0, 1, port), timeout=5.0)
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()
    ]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]
    del store


def test_echelon_check_is_read_and_other_values_are_refused() -> None:
    assert check_wanted({"ECHELON_CHECK": "1"}) is True
    assert check_wanted({"ECHELON_CHECK": "0"}) is False
    assert check_wanted({}) is False
    with pytest.raises(WorldError, match="ECHELON_CHECK is 'yes'"):
        check_wanted({"ECHELON_CHECK": "yes"})
