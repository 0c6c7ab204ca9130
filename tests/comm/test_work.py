"""Windows, which peers read and write in place, and the events of a call."""

import gc
import time
from collections.abc import Sequence

import pytest
import torch

import echelon as ec
from echelon.comm.shm import segment
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall
from echelon.diagnosis.rank_time import RankTime
from echelon.diagnosis.step_rows import Activity
from echelon.errors import CollectiveMismatch, SharedMemoryError, UnsupportedError
from tests.comm.checking import Outcome, checks_of, outcome_of, refuses, same
from tests.worlds import events_of

KINDS = ("threads", "processes")


def check_a_window_begins_as_zeros_and_knows_its_size(group: ec.Group) -> None:
    window = group.window(10, torch.bfloat16)
    assert (window.numel, window.dtype, window.shared) == (10, torch.bfloat16, True)
    assert len(window.regions) == group.size
    same(window.local, torch.zeros(10, dtype=torch.bfloat16))
    same(window.peer(group.rank), window.local)
    window.close()


def check_peers_read_and_write_in_place(group: ec.Group) -> None:
    window = group.window(group.size)
    window.local.fill_(group.rank)
    group.barrier()
    for rank in range(group.size):
        same(window.peer(rank), torch.full((group.size,), float(rank)))
    group.barrier()
    after = (group.rank + 1) % group.size
    window.peer(after)[0] = 100.0 + group.rank
    group.barrier()
    assert window.local[0] == 100.0 + (group.rank - 1) % group.size
    window.close()


def check_windows_of_every_dtype(group: ec.Group) -> None:
    for dtype in (torch.float64, torch.uint8, torch.bool, torch.complex64, torch.uint16):
        window = group.window(5, dtype)
        window.local.copy_(torch.ones(5).to(dtype))
        group.barrier()
        same(window.peer(0), torch.ones(5).to(dtype))
        window.close()


def check_an_empty_window(group: ec.Group) -> None:
    window = group.window(0)
    group.all_reduce(window.local)
    assert window.numel == 0
    window.close()


def check_a_closed_window_is_ordinary_memory(group: ec.Group) -> None:
    window = group.window(40_000)
    window.local.fill_(group.rank)
    if group.rank == 0:
        window.close()  # not on the others, or not yet
        window.close()
    group.all_reduce(window.local)
    same(window.local, torch.full((40_000,), float(sum(range(group.size)))))
    window.close()


def check_a_tensor_of_a_window_outlives_it(group: ec.Group) -> None:
    window = group.window(40_000)
    part = window.local[5:10]
    window.close()
    del window
    gc.collect()
    part.fill_(3.0)
    same(part, torch.full((5,), 3.0))


def check_many_windows(group: ec.Group) -> None:
    windows = [group.window(20_000 + k) for k in range(30)]
    for k, window in enumerate(windows):
        window.local.fill_(group.rank + k)
    for k, window in reversed(list(enumerate(windows))):
        group.all_reduce(window.local, "max")
        assert window.local[-1] == group.size - 1 + k
        window.close()


def check_a_window_made_in_inference_mode_can_be_used_later(group: ec.Group) -> None:
    with torch.inference_mode():
        window = group.window(40_000)
        large = torch.ones(300_000)  # staging is made here, and its views
        group.all_reduce(large)
        small = torch.ones(10)
        group.all_reduce(small)
    window.local.fill_(1.0)
    group.all_reduce(window.local)
    same(window.local, torch.full((40_000,), float(group.size)))
    for numel in (10, 300_000):
        after = torch.ones(numel)
        group.all_reduce(after)
        same(after, torch.full((numel,), float(group.size)))
    window.close()


def check_gradients_may_lie_in_a_window(group: ec.Group) -> None:
    window = group.window(30_000)
    weight = torch.nn.Parameter(torch.ones(30_000))
    weight.grad = window.local
    (weight * (group.rank + 1.0)).sum().backward()
    assert weight.grad.data_ptr() == window.local.data_ptr()
    group.all_reduce(weight.grad, "mean")
    same(weight.grad, torch.full((30_000,), (group.size + 1) / 2))
    window.close()


def check_windows_of_a_subgroup(group: ec.Group) -> None:
    pair = group.subgroup([0, group.size - 1])
    if pair is None:
        return
    window = pair.window(40_000)
    window.local.fill_(group.rank + 1.0)
    pair.all_reduce(window.local)
    same(window.local, torch.full((40_000,), 1.0 + group.size))
    window.close()


CHECKS = checks_of(__import__(__name__, fromlist=["checks"]))


@pytest.fixture(scope="module", params=KINDS)
def outcome(request: pytest.FixtureRequest) -> Outcome:
    return outcome_of(request.param, 3, CHECKS)


@pytest.mark.parametrize("name", CHECKS, ids=lambda name: name.partition("check_")[2])
def test_it_holds_that(outcome: Outcome, name: str) -> None:
    outcome.require(name)


def too_little(world: ec.World, poor: Sequence[int]) -> str:
    if world.rank in poor:  # 64 MiB of these are for everyone else
        segment.available_nbytes = lambda: 100 * 2**20
    world.group.barrier()
    refuses(
        SharedMemoryError,
        f"a window of 25000000 elements on each of 2 ranks (on rank {poor[0]}) needs 95.4 MiB of "
        "shared memory and 36.0 MiB are available",
        lambda: world.group.window(25_000_000),
    )
    if poor[0] == 0:  # rank 0 makes what all share
        refuses(
            SharedMemoryError,
            "memory of 25000000 elements that 2 ranks share (on rank 0) needs 95.4 MiB",
            lambda: world.group.shared_tensor(25_000_000),
        )
    world.group.barrier()  # all have failed alike, so the ranks are in step
    assert world.group.window(10).numel == 10
    return "told"


@pytest.mark.parametrize("poor", [(0, 1), (0,), (1,)])
def test_too_little_memory_of_a_rank_is_told_to_all_with_what_is_needed_and_what_there_is(
    poor: Sequence[int],
) -> None:
    assert ec.run(too_little, 2, "processes", args=(poor,)) == ["told"] * 2


def different(world: ec.World) -> None:
    world.group.window(10 + world.rank)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_different_size_are_a_mismatch(kind) -> None:
    with pytest.raises(CollectiveMismatch, match=r"window float32\[11\]"):
        ec.run(different, 2, kind)


def test_a_window_that_is_not_shared_has_no_peers() -> None:
    local = torch.zeros(3)
    window = Window(local, (local,), shared=False)
    with pytest.raises(UnsupportedError, match="use collectives"):
        window.peer(0)


class Ended(Work):
    """Communication that has ended."""

    def done(self) -> bool:
        """See ``Work``."""
        return True

    def _is_over(self) -> bool:
        return True

    def _wait(self, timeout: float | None) -> None:
        pass


@pytest.mark.parametrize("finishes", [False, True])
def test_what_a_wait_for_ended_communication_finishes_counts_as_communication(
    finishes: bool,
) -> None:
    place = CallSite("train.py", 3, "main")
    work = Ended(CollectiveCall(CallSignature("barrier"), place, 0, "world", 0, blocking=False))
    if finishes:
        work.then(lambda: time.sleep(0.02))
    rank = RankTime()
    rank.start()
    work.wait()
    in_communication = rank._spans[Activity.COMMUNICATION]
    rank.stop()
    assert in_communication >= 20_000_000 if finishes else in_communication == 0


def events_of_two_calls(world: ec.World) -> list[tuple[str, int]]:
    world.group.barrier()
    transposed = torch.ones(2, 3).t()
    with events_of(world.rank, "collective.issue", "collective.wait") as events:
        world.group.all_reduce(torch.ones(1))
        world.group.all_reduce(transposed)  # what is copied back belongs to the wait
    assert transposed.eq(2).all()
    return [(event.name, event.facts["position"]) for event in events]


@pytest.mark.parametrize("world", KINDS)
def test_a_blocking_call_is_two_events_while_somebody_listens(world: str) -> None:
    expected = [(name, i) for i in (1, 2) for name in ("collective.issue", "collective.wait")]
    assert ec.run(events_of_two_calls, 2, world) == [expected, expected]
