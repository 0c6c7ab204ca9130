"""Law *Resume*: ten steps, a new process, and ten more are twenty steps."""

from pathlib import Path

import pytest

from tests.checkpoint.layouts import LAYOUTS
from tests.laws.test_resume import ON_MORE, ON_TWO, OTHERS, check_close, check_the_same

HALF = 10


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
@pytest.mark.parametrize("name", [*ON_TWO, *ON_MORE])
def test_twenty_steps_are_ten_and_ten_with_the_same_bits(
    name: str, kind: str, tmp_path: Path
) -> None:
    check_the_same(kind, LAYOUTS[name].ranks, [name], tmp_path, HALF)


@pytest.mark.parametrize(("source", "target"), OTHERS)
def test_another_layout_goes_on_as_the_one_that_has_saved(
    source: str, target: str, tmp_path: Path
) -> None:
    check_close(source, target, tmp_path, HALF)
