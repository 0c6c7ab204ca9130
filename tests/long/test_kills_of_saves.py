"""Every call of the operating system in a save, of whatever library: a kill there, and an error.

``kill_at_call.c`` sees what Python, torch and safetensors call alike.
"""

from pathlib import Path

import pytest

from tests.kills.running import struck
from tests.kills.scenes import SCENES


@pytest.mark.parametrize("error", [None, "ENOSPC", "EIO"])
@pytest.mark.parametrize("scene", SCENES)
def test_a_save_that_ends_at_any_call_leaves_one_whole_version_and_can_be_repeated(
    scene: str, error: str | None, tmp_path: Path
) -> None:
    counts = struck(scene, 0, tmp_path, error)
    assert counts["struck"] == counts["calls"] >= 5
    assert counts["new"] >= 1
    assert counts.get("old", 0) + counts.get("nothing", 0) >= 1
