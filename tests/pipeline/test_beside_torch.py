"""Where torch.distributed.pipelining has the same schedule, ours is the same list."""

from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from echelon.pipeline import Kind, Schedule, schedule


def stages(num_stages: int, ranks: int) -> list[SimpleNamespace]:
    """What torch's schedules ask of the stages of rank 0."""
    return [
        SimpleNamespace(
            num_stages=num_stages,
            group_size=ranks,
            group_rank=0,
            stage_index=index,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=nn.Identity(),
        )
        for index in range(0, num_stages, ranks)
    ]


def read(theirs) -> Schedule:
    """The computations of one of torch's schedules."""
    rows = [theirs.pipeline_order[rank] for rank in sorted(theirs.pipeline_order)]
    kept = [[str(a) for a in row if a is not None and "REDUCE" not in str(a)] for row in rows]
    return Schedule.from_orders(kept)


SIZES = [(p, m) for p in (2, 3, 4) for m in (p, 2 * p, 3 * p)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_is_torchs(p, m) -> None:
    theirs = ScheduleGPipe(stages(p, p)[0], m, loss_fn=None)
    assert read(theirs).orders == schedule("gpipe", p, m, p).orders


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ScheduleInterleaved1F1B, "interleaved"),
        (ScheduleInterleavedZeroBubble, "zb"),
        (ScheduleLoopedBFS, "looped-bfs"),
    ],
)
def test_looped_schedules_are_torchs(kind, name, p, m, v) -> None:
    theirs = read(kind(stages(v * p, p), m, loss_fn=None))
    ours = schedule(name, v * p, m, p)
    assert theirs.placement == ours.placement
    if name == "looped-bfs":  # torch runs the backwards from the last microbatch to the first
        forwards = [[a for a in order if a.kind is Kind.F] for order in theirs.orders]
        assert forwards == [[a for a in order if a.kind is Kind.F] for order in ours.orders]
        assert [set(order) for order in theirs.orders] == [set(order) for order in ours.orders]
    else:
        assert theirs.orders == ours.orders


def test_torch_lowers_a_csv_of_ours(tmp_path) -> None:
    ours = schedule("zb-v", 6, 7, 3)
    path = tmp_path / "schedule.csv"
    path.write_text(ours.to_csv())
    theirs = ScheduleZBVZeroBubble(stages(6, 3), 6, loss_fn=None)
    theirs._n_microbatches = 7
    theirs._load_csv(str(path))
    assert read(theirs).orders == ours.orders
