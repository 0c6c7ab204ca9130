"""Frames of ranks as a user knows them."""

import sys
import traceback

import torch

import echelon as ec
from echelon.laboratory.rank_frames import (
    RankView,
    place_of,
    stack_of_frame,
    stack_of_traceback,
    table,
    users_innermost,
    without_echelon,
)


def test_frames_of_echelon_and_what_started_the_thread_are_left_out() -> None:
    def main(world: ec.World) -> list[str]:
        stack = without_echelon(stack_of_frame(sys._getframe()))
        return [frame.f_code.co_name for frame, _ in stack]

    assert ec.run(main, 1) == [["main"]]


def test_the_innermost_frame_of_the_user_is_current_and_those_of_torch_stay() -> None:
    def main() -> None:
        torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(2, 2))

    try:
        torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.zeros(2, 3))
    except RuntimeError as error:
        stack = without_echelon(stack_of_traceback(error.__traceback__))
    names = [frame.f_code.co_name for frame, _ in stack]
    assert names[0] == "test_the_innermost_frame_of_the_user_is_current_and_those_of_torch_stay"
    assert names[-1] == "forward"
    assert users_innermost(stack) == 0
    assert place_of(stack) == f"test_rank_frames.py:{stack[0][1]}"


def test_a_rank_without_frames_has_no_place() -> None:
    assert place_of([]) == ""
    assert traceback.extract_stack()  # while this thread has some


def test_the_table_marks_the_rank_that_is_shown() -> None:
    here = stack_of_frame(sys._getframe())
    lines = list(table([RankView(0, [], "has returned"), RankView(10, here, "stopped here")], 10))
    name, line = "test_the_table_marks_the_rank_that_is_shown", here[-1][1]
    width = len(f"test_rank_frames.py:{line}")
    assert lines == [
        f"   rank  {'function':<{len(name)}}  line",
        f"      0  {'':<{len(name)}}  {'':<{width}}  has returned",
        f"->   10  {name}  test_rank_frames.py:{line}  stopped here",
    ]
