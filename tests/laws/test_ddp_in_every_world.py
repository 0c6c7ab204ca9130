"""Every check of DDP: one by one over threads, all in one start over processes and gloo."""

import pytest

from tests.ddp.checks import CHECKS, run_all
from tests.worlds import run_world


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CHECKS)
def test_it_holds_that(name, ranks):
    run_world("threads", CHECKS[name], ranks)


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_every_check_holds_over(kind):
    assert run_world(kind, run_all, 2) == [len(CHECKS)] * 2


@pytest.mark.slow_for("8")
@pytest.mark.parametrize("ranks", [8])
def test_every_check_holds_on_many_simulated_ranks(ranks):
    assert run_world("threads", run_all, ranks) == [len(CHECKS)] * ranks
