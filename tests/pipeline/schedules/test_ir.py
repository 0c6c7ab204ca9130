"""Actions and schedules, and their text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from echelon.errors import ScheduleError
from echelon.pipeline import Action, Kind, Pair, Schedule
from echelon.pipeline.schedules.ir import parse_item
from tests.pipeline.sizes import VARIANTS, fewest, make

WITHOUT_MICROBATCH = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)
numbers = st.integers(0, 2000)
whole_stages = st.builds(Action, st.sampled_from(WITHOUT_MICROBATCH), st.none(), numbers)
others = st.sampled_from([k for k in Kind if k not in (*WITHOUT_MICROBATCH, Kind.OVERLAP)])
actions = st.one_of(whole_stages, st.builds(Action, others, numbers, numbers))
forwards = st.builds(Action, st.just(Kind.F), numbers, numbers)
backwards = st.builds(Action, st.sampled_from([Kind.B, Kind.I]), numbers, numbers)
items = st.one_of(actions, st.builds(Pair, forwards, backwards))


@settings(max_examples=60)
@given(items)
def test_an_item_reads_back_as_it_was_written(item) -> None:
    assert parse_item(str(item)) == item
    assert type(parse_item(f" {item} ")) is type(item)


@settings(max_examples=60)
@given(items)
def test_torch_reads_and_writes_the_same_text(item) -> None:
    found = _Action.from_str(str(item))
    assert str(found) == str(item)
    parts = found.sub_actions or [found]
    assert [(a.computation_type.value, a.microbatch_index, a.stage_index) for a in parts] == [
        (part.kind.value, part.microbatch, part.stage) for part in item.parts
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=5)
@given(p=st.integers(1, 5), more=st.integers(0, 9))
def test_a_schedule_reads_back_from_its_csv(variant, p, more) -> None:
    written = make(variant, p, fewest(variant, p) + more)
    read = Schedule.from_csv(written.to_csv(), written.name)
    assert read == written
    assert read.to_csv() == written.to_csv()


@pytest.mark.parametrize(
    "text",
    [
        "F0",
        "0",
        "0F",
        "0X1",
        "-1F0",
        "0F0x",
        "2F0: x",
        "0UNSHARD1",
        "(0F0;1F0)OVERLAP_F_B",
        "(0F0)B",
        "()",
    ],
)
def test_text_that_is_no_action_is_named_with_its_place(text) -> None:
    with pytest.raises(ScheduleError, match="this is no action") as info:
        Schedule.from_csv(f"0F0,{text}")
    assert (info.value.rank, info.value.index, info.value.action) == (0, 1, text)
    assert str(info.value).startswith(
        f"the schedule cannot run: rank 0, index 1 ({text}): this is no action; write stage"
    )


def test_empty_cells_are_bubbles() -> None:
    read = Schedule.from_csv("0F0,,,0B0,\n,1F0,1B0,,\n")
    assert read == Schedule.from_orders([["0F0", None, "0B0"], ["1F0", "1B0"]], "csv")
    assert read.orders[1] == (
        Action(kind=Kind.F, microbatch=0, stage=1),
        Action(kind=Kind.B, microbatch=0, stage=1),
    )


def test_a_stage_on_two_ranks_is_named() -> None:
    with pytest.raises(ScheduleError, match="stage 0 runs on rank 0 already") as info:
        Schedule.from_orders([["0F0"], ["1F0", "0B0"]])
    assert (info.value.rank, info.value.index, info.value.action) == (1, 1, "0B0")


def test_a_stage_on_no_rank_is_named() -> None:
    with pytest.raises(ScheduleError, match="no rank runs stage 1"):
        Schedule.from_orders([["0F0"], ["2F0"]])


def test_a_schedule_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        make("1f1b", 2, 2).name = "other"
    with pytest.raises(TypeError):
        make("1f1b", 2, 2).orders[0][0] = None
