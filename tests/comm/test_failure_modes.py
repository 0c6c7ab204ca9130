"""Ranks that disagree: every one of them gets the error, with the call and the line of each."""

import re
import time
from collections.abc import Callable
from functools import cache

import pytest
import torch

import echelon as ec
from echelon.errors import CollectiveMismatch, CommError, CommTimeout, DeadlockError, RankFailed
from tests.comm.checking import refuses

KINDS = ("threads", "processes")
RANKS = 3
Case = Callable[[ec.Group, bool], object]


def shape(group: ec.Group, liar: bool) -> None:
    group.all_reduce(torch.ones(6) if liar else torch.ones(4))


def dims(group: ec.Group, liar: bool) -> None:
    group.all_reduce(torch.ones(3, 2) if liar else torch.ones(2, 3))


def integers(group: ec.Group, liar: bool) -> None:
    group.all_reduce(torch.ones(4, dtype=torch.int32 if liar else torch.float32))


def precision(group: ec.Group, liar: bool) -> None:
    group.all_reduce(torch.ones(100_000, dtype=torch.float64 if liar else torch.float32))


def reduction(group: ec.Group, liar: bool) -> None:
    group.all_reduce(torch.ones(4), "max" if liar else "sum")


def operation(group: ec.Group, liar: bool) -> None:
    if liar:
        group.broadcast(torch.ones(4), 0)
    else:
        group.all_reduce(torch.ones(4))


def order(group: ec.Group, liar: bool) -> None:
    for name in ("b", "a") if liar else ("a", "b"):
        group.all_reduce(torch.ones(4), label=name)


def skipped(group: ec.Group, liar: bool) -> None:
    if not liar:
        group.all_reduce(torch.ones(4), label="a")
    group.all_reduce(torch.ones(4), label="b")


def root(group: ec.Group, liar: bool) -> None:
    group.broadcast(torch.ones(100_000), 1 if liar else 0)


def parts(group: ec.Group, liar: bool) -> None:
    sent = [2, 1, 1] if liar else [1, 1, 1]
    group.all_to_all_single(torch.ones(3), torch.ones(sum(sent)), [1, 1, 1], sent)


def lengths(group: ec.Group, liar: bool) -> None:
    outputs = [torch.ones(2), torch.ones(2), torch.ones(3 if liar else 2)]
    group.all_gather(outputs, torch.ones(2))


def setting_up(group: ec.Group, liar: bool) -> None:
    if liar:
        group.subgroup([0, 1])
    else:
        group.window(10)


def members(group: ec.Group, liar: bool) -> None:
    group.subgroup([0, 1] if liar else [0, 2])


def background(group: ec.Group, liar: bool) -> None:
    works = [group.all_reduce(torch.ones(k), async_op=True, label=f"bucket {k}") for k in (1, 2)]
    late = group.all_reduce(torch.ones(4 if liar else 3), async_op=True, label="bucket 3")
    for work in works:
        work.wait()
    late.wait()


CASES: tuple[Case, ...] = (
    shape,
    dims,
    integers,
    precision,
    reduction,
    operation,
    order,
    skipped,
    root,
    parts,
    lengths,
    setting_up,
    members,
    background,
)
LIAR = 1  # its rank


def disagree(world: ec.World) -> dict[str, tuple[str, str]]:
    """What this rank sees of every case, each in a group of its own."""
    groups = [world.group.subgroup(range(world.size)) for _ in CASES]
    found = {}
    for case, group in zip(CASES, groups, strict=True):
        try:
            case(group, world.rank == LIAR)
        except CommError as error:
            found[case.__name__] = (type(error).__name__, str(error))
    return found


@cache
def seen(kind: str) -> list[dict[str, tuple[str, str]]]:
    return ec.run(disagree, RANKS, kind, timeout=20.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disagreement_is_the_same_error_on_every_rank_with_each_ranks_call(kind, case) -> None:
    found = [of_rank[case.__name__] for of_rank in seen(kind)]
    assert len(set(found)) == 1, found
    name, text = found[0]
    assert name == "CollectiveMismatch"
    rows = [line for line in text.splitlines() if line.startswith("  rank")]
    assert len(rows) == RANKS
    assert [row.endswith("<-- differs") for row in rows] == [rank == LIAR for rank in range(RANKS)]
    if case is not parts:  # there, the lengths are what to look at
        for row in rows:
            assert re.search(rf"{re.escape(__file__)}:\d+ in {case.__name__}", row), row


def test_both_calls_and_the_position_are_shown() -> None:
    for kind in KINDS:
        text = seen(kind)[0]["operation"][1]
        assert re.search(r"collective #0 of group 'world\.\d+' differs between ranks", text)
        assert "rank 0: all_reduce(sum) float32[4] at " in text
        assert "rank 1: broadcast float32[4] root=0 at " in text
        assert "sends [2, 1, 1], expects [1, 1, 1] elements" in seen(kind)[0]["parts"][1]
        assert "collective #2" in seen(kind)[0]["background"][1]


def sends_another_length(world: ec.World) -> None:
    if world.rank == 0:
        world.group.send(torch.ones(6), 1)
    elif world.rank == 1:
        world.group.recv(torch.ones(4), 0)


def sends_another_dtype(world: ec.World) -> None:
    if world.rank == 0:
        world.group.isend(torch.ones(4), 1).wait()
    elif world.rank == 1:
        world.group.irecv(torch.ones(4, dtype=torch.int32), 0).wait()


def sends_early(world: ec.World) -> None:
    if world.rank == 0:
        world.group.send(torch.ones(500_000), 1, tag=1)
    elif world.rank == 1:
        time.sleep(0.05)  # the message has begun to arrive
        world.group.recv(torch.ones(2), 0, tag=1)


def told(world: ec.World, case: Callable[[ec.World], None], folder: str) -> None:
    """Run ``case`` and then meet; leave a note of the error."""
    try:
        case(world)
        world.group.barrier()
    except CommError as error:
        with open(f"{folder}/{world.rank}", "w") as file:
            file.write(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("case", [sends_another_length, sends_another_dtype, sends_early])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_that_do_not_fit_are_an_error_on_every_rank(kind, case, tmp_path) -> None:
    with pytest.raises(CollectiveMismatch) as info:
        ec.run(told, 3, kind, args=(case, str(tmp_path)), timeout=20.0)
    assert "send float32[" in str(info.value)
    assert "recv " in str(info.value)
    assert f"{__file__}:" in str(info.value)
    notes = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert notes[1].startswith("CollectiveMismatch")
    for rank in (0, 2):
        assert notes[rank].startswith(("CollectiveMismatch", "RankFailed: rank"))


def goes_on_after_a_mismatch(world: ec.World) -> str:
    group = world.group.subgroup(range(world.size))
    refuses(CollectiveMismatch, "differs", lambda: shape(group, world.rank == 0))
    value = torch.ones(1)
    world.group.all_reduce(value)  # other groups are in step
    return str(value.item())


@pytest.mark.parametrize("kind", KINDS)
def test_other_groups_go_on_after_a_mismatch(kind) -> None:
    assert ec.run(goes_on_after_a_mismatch, 2, kind) == ["2.0"] * 2


def a_late_rank(world: ec.World) -> str:
    if world.rank == 1:
        world.group.recv(torch.ones(1), 0)
        world.group.all_reduce(torch.ones(3), label="late")
        return ""
    work = world.group.all_reduce(torch.ones(3), async_op=True, label="late")
    with pytest.raises(CommTimeout) as info:
        work.wait(0.05)
    world.group.send(torch.ones(1), 1)
    work.wait()
    assert info.value.missing == (1,)
    return str(info.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_that_times_out_names_the_late_rank_and_may_be_repeated(kind) -> None:
    text = ec.run(a_late_rank, 2, kind)[0]
    assert "all_reduce(sum) float32[3] of 'late' (#0 of group 'world')" in text
    assert "waited 0.1 s for rank 1 in vain" in text or "waited 0.0 s for rank 1" in text


def never_comes(world: ec.World) -> None:
    if world.rank == 1:
        time.sleep(1.0)
    else:
        world.group.all_reduce(torch.ones(3), label="loss")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_timeout_of_the_world_ends_a_wait_and_names_who_is_missing(kind) -> None:
    with pytest.raises(CommTimeout, match=r"waited 0\.3 s for rank 1 in vain") as info:
        ec.run(never_comes, 3, kind, timeout=0.3)
    assert info.value.missing == (1,)
    assert "of 'loss'" in str(info.value)
    assert "  rank 1 at step 0 sleeps or waits outside communication" in str(info.value)
    assert re.search(rf"\n    {re.escape(__file__)}:\d+ in never_comes$", str(info.value))
    assert info.value.stuck == {1: "at step 0 sleeps or waits outside communication"}


def waits_for_one_that_left(world: ec.World) -> None:
    if world.rank == 0:
        world.group.recv(torch.zeros(5), 1, tag=9)


@pytest.mark.parametrize(("kind", "error"), [("threads", DeadlockError), ("processes", RankFailed)])
def test_a_message_that_never_comes_is_an_error_as_soon_as_its_sender_has_left(kind, error) -> None:
    with pytest.raises(error, match="rank 1 returned") as info:
        ec.run(waits_for_one_that_left, 2, kind, timeout=30.0)
    assert "recv float32[5] peer=1 tag 9" in str(info.value)
