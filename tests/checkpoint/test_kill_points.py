"""A rank that is killed in a save: what was committed is there, bit for bit, and nothing else is.

All calls of the operating system, on both ranks, are in ``tests/long/test_kill_points.py``.
"""

from pathlib import Path

import pytest

from tests.checkpoint.disks import KillAt, Point
from tests.checkpoint.killing import NEW, OLD, Scene, kill_and_check, templates

__all__ = ["templates"]

FIRST, LATER = Scene(), Scene(later=True)
IN_THREAD = Scene(call="async_save", later=True)

# In order of time; each with what is there afterwards.
CASES = [
    (FIRST, 0, Point("mkdir", "root", "after"), []),
    (FIRST, 0, Point("lock", "lock", "after"), []),
    (LATER, 0, Point("mkdir", "save", "after"), [OLD]),
    (FIRST, 0, Point("open", "rank file", "after"), []),
    (LATER, 0, Point("write", "rank file", "within", nth=20), [OLD]),
    (FIRST, 0, Point("fsync", "rank file", "before"), []),
    (LATER, 0, Point("fsync", "rank file", "after"), [OLD]),
    (LATER, 1, Point("open", "rank file", "before"), [OLD]),
    (FIRST, 1, Point("write", "rank file", "within", nth=10), []),
    (LATER, 1, Point("fsync", "rank file", "before"), [OLD]),
    (FIRST, 1, Point("fsync", "rank file", "after"), []),
    (LATER, 0, Point("write", "manifest", "within"), [OLD]),
    (FIRST, 0, Point("fsync", "manifest", "before"), []),
    (LATER, 0, Point("fsync", "save", "before"), [OLD]),
    (LATER, 0, Point("rename", "save", "before"), [OLD]),
    (LATER, 0, Point("rename", "save", "after"), [OLD, NEW]),
    (FIRST, 0, Point("fsync", "root", "after", nth=1), [NEW]),
    (LATER, 0, Point("rename", "step", "after"), [NEW]),
    (LATER, 0, Point("rmtree", "removed", "within"), [NEW]),
    (LATER, 0, Point("rmtree", "removed", "after"), [NEW]),
    (IN_THREAD, 1, Point("write", "rank file", "within", nth=10), [OLD]),
    (IN_THREAD, 0, Point("write", "manifest", "within"), [OLD]),
    (IN_THREAD, 0, Point("rename", "save", "after"), [OLD, NEW]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "rank", "point", "left"),
    CASES,
    ids=[
        f"{case[0].call}-{'later' if case[0].later else 'first'}-{case[1]}-{case[2]}"
        for case in CASES
    ],
)
def test_after_a_kill_the_newest_step_is_a_whole_one(
    scene: Scene, rank: int, point: Point, left: list[int], tmp_path: Path
) -> None:
    assert kill_and_check(scene, rank, KillAt(point), tmp_path / "run") == left


def test_the_points_are_at_least_12_on_both_ranks() -> None:
    assert len({point for _, _, point, _ in CASES}) >= 12
    assert {rank for _, rank, _, _ in CASES} == {0, 1}
