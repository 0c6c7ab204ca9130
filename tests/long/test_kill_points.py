"""Every call of the operating system in a save is a point at which each rank is killed once."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.checkpoint.disks import Call, KillAt
from tests.checkpoint.killing import NEW, OLD, Scene, kill_and_check, templates

__all__ = ["templates"]

SCENES = [
    Scene(layout, call, later)
    for layout in ("ddp2", "fsdp2")
    for call in ("save", "async_save")
    for later in (False, True)
]
PARTS = 10  # so that a test takes seconds
HAVE_PARTS = ("write", "rmtree")


@cache
def calls_of(scene: Scene) -> list[Call]:
    with TemporaryDirectory() as folder:
        return scene.calls(Path(folder) / "run")


def strikes(calls: list[Call]) -> list[KillAt]:
    """Before each call, within those that have parts, and after the last."""
    before = [KillAt(number=call.number) for call in calls]
    within = [KillAt(number=call.number, when="within") for call in calls if call.op in HAVE_PARTS]
    return [*before, *within, KillAt(number=calls[-1].number, when="after")]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_a_rank_may_be_killed_at_any_call(
    scene: Scene, rank: int, part: int, tmp_path: Path
) -> None:
    calls = [call for call in calls_of(scene) if call.rank == rank]
    renames = [call.number for call in calls if (call.op, call.what) == ("rename", "save")]
    assert len(renames) == (rank == 0)
    for strike in strikes(calls)[part::PARTS]:
        folder = tmp_path / f"{strike.when}-{strike.number}"
        left = kill_and_check(scene, rank, strike, folder)
        before = [OLD] if scene.later else []
        if not renames or strike.number <= renames[0]:
            assert left == before, strike
        else:
            assert left in ([*before, NEW], [NEW]), strike
