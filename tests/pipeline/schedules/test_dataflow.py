"""Who needs what is said once, and all that walks a schedule agrees with it."""

import ast
from pathlib import Path

import pytest

import echelon
from echelon.pipeline.schedules.action_lists import read
from echelon.pipeline.schedules.dataflow import Transfer, Values, ends_of
from echelon.pipeline.schedules.ir import parse_item

ROOT = Path(echelon.__file__).parent


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("i", range(2))
def test_what_makes_moves_and_needs_a_value_gives_it_one_number(stage: int, i: int) -> None:
    values = Values(4, 2)  # from this stage to the next, and back
    output = {
        values.result(parse_item(f"{stage}F{i}")),
        values.moved(parse_item(f"{stage}SEND_F{i}")),
        values.moved(parse_item(f"{stage + 1}RECV_F{i}")),
        values.far(parse_item(f"{stage + 1}F{i}")),
        values.needed(parse_item(f"{stage}B{i}"))[-1],
        values.needed(parse_item(f"{stage}I{i}"))[-1],
    }
    gradient = {
        *(values.result(parse_item(f"{stage + 1}{kind}{i}")) for kind in "BI"),
        values.moved(parse_item(f"{stage + 1}SEND_B{i}")),
        values.moved(parse_item(f"{stage}RECV_B{i}")),
        *(values.far(parse_item(f"{stage}{kind}{i}")) for kind in "BI"),
        *values.needed(parse_item(f"{stage + 1}W{i}")),
    }
    assert len(output) == len(gradient) == 1
    assert output.isdisjoint(gradient)
    assert [values.stage(value) for value in (*output, *gradient)] == [stage, stage + 1]


def test_the_ends_of_the_model_need_nothing_of_other_stages() -> None:
    values = Values(3, 1)
    for text in ("0F0", "2B0", "2I0", "1W0", "1UNSHARD"):
        assert values.far(parse_item(text)) is None
    for text in ("0RECV_F0", "0SEND_B0", "2SEND_F0", "2RECV_B0"):
        assert values.moved(parse_item(text)) is None


def test_a_send_and_its_receive_are_one_transfer() -> None:
    ends = read("0F0 0SEND_F0\n1RECV_F0 1F0").ends
    (value,) = ends.sent
    assert ends.of(value) == ((0, 1), (1, 0))
    assert ends.on(value, 1) == (1, 0)
    assert ends.transfers == {value: Transfer(value, 0, 1)}
    assert ends_of(parse_item("0SEND_F0")) == ends_of(parse_item("1RECV_F0"))


def test_no_other_file_says_which_stage_is_next() -> None:
    places = []
    for path in [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("planner/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            is_step = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
            if not is_step or not isinstance(node.right, ast.Constant) or node.right.value != 1:
                continue
            if ast.unparse(node.left).split(".")[-1] in ("stage", "source"):
                places.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert places == []
