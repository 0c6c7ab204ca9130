"""Every function of torch, given a part, has the result of the whole tensor, or is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHARES = 15


@pytest.mark.slow_for(*map(str, range(1, SHARES)))
@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("share", range(SHARES))
def test_a_function_of_a_part_has_the_result_of_the_whole_or_is_refused(
    share: int, layout: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.modules.functions_of_torch", str(share), str(SHARES), layout],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["counts"]["right"] > 20
    assert found["counts"]["refused"] > 20
