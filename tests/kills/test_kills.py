"""A save that ends at one of its calls leaves the version before it or its own, and no third.

All calls of all scenes are in ``tests/long/test_kills_of_saves.py``.
"""

from pathlib import Path

import pytest

from tests.kills.running import struck


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "parts", "error"),
    [
        ("overwrite", 4, None),
        ("convert-shards", 3, "ENOSPC"),
        ("lightning-file", 3, None),
        ("trainer-again", 3, None),
    ],
)
def test_a_save_that_ends_anywhere_leaves_one_whole_version_and_can_be_repeated(
    scene: str, parts: int, error: str | None, tmp_path: Path
) -> None:
    counts = struck(scene, parts, tmp_path, error)
    assert counts["calls"] >= 15
    assert counts.get("old", 0) + counts.get("nothing", 0) >= 2
