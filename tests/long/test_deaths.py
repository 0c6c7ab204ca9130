"""Every death of a rank, at every moment, in every way to run it: what is told, and how soon."""

from pathlib import Path

import pytest

import echelon as ec
from tests.checkpoint.killing import load_alone
from tests.long.failing_jobs import LAST_WHOLE, MOMENTS, WAYS, Ended, end_of

MOST_S = 5.0  # from the death to the end of the last process
MOST_LINES = 25
TIMEOUT_S = 300.0  # of a rank that waits: none of these ends may come of it
CAUSES = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGSEGV": "was killed by SIGSEGV",
    "ValueError: boom": "raised ValueError: boom",
    "exit code 0": "exited with code 0 while others were waiting",
    "MemoryError: cannot allocate 12 GiB": "raised MemoryError: cannot allocate 12 GiB",
}


def check_told_by_run(ended: Ended, death: str, moment: str) -> None:
    """That the error of ``ec.run`` and its notes name rank, step and cause."""
    name, _, _ = death.partition(":")
    first, notes = ended.told[0], ended.told[1:]
    if moment != "start":
        assert f"rank 1 was {MOMENTS[moment]}" in notes
    else:
        assert any(note.startswith("it had not entered its world: ") for note in notes)
    assert "raised on rank 1 of 2" in notes
    if not name.endswith("Error"):
        assert first.startswith("RankFailed: rank 1 ")
        assert death in first
    elif moment != "start":
        assert first == death
    else:  # Python imports the script before it is ours
        assert first.startswith("RankFailed: rank 1 ended with exit code 1 before it returned")
        assert death in ended.lines


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("death", CAUSES)
@pytest.mark.parametrize("way", WAYS)
def test_a_death_ends_the_job_and_is_told(
    way: str, death: str, moment: str, tmp_path: Path
) -> None:
    ended = end_of(tmp_path, way, death, moment, TIMEOUT_S)
    print(f"{way} | {death} | {moment} | {ended.seconds:.1f} s | {len(ended.told)} lines")
    assert ended.code not in (0, 75)
    assert len(ended.told) <= MOST_LINES
    if "echelon run" in way:
        assert ended.told[0] == f"rank 1 {MOMENTS[moment]} {CAUSES[death]}"
    else:
        check_told_by_run(ended, death, moment)
    assert ended.seconds <= MOST_S
    if moment == "save":
        assert ec.steps(tmp_path / "run") == [LAST_WHOLE]
        assert ec.run(load_alone, 1, args=(tmp_path / "run", None))[0][0] == LAST_WHOLE
