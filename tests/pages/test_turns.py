"""The page of what a turn exchanges has what simulated ranks exchange, in their order."""

import pytest

from tests.pages.code_blocks import ROOT
from tests.pages.turns import PAGE
from tests.processes import run_python


@pytest.mark.slow
def test_the_page_has_what_a_turn_exchanges_in_order() -> None:
    # In a process of its own: tests register states. To renew it: python -m tests.pages.turns
    shown = "from tests.pages.turns import written_page; print(written_page(), end='')"
    done = run_python("-c", shown, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert PAGE.read_text() == done.stdout
