"""What ``echelon run`` is to run, and how its ranks share the machine."""

import pytest

from echelon.launch.program import threads_per_rank


def test_cores_are_shared_and_nobody_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 64)] == [8, 4, 2, 1, 1]
