"""PyTorch's generic tests of backends, ``torch.testing._internal.distributed.distributed_test``."""

from functools import partial
from pathlib import Path

import pytest

from tests.c10d import generic_suite
from tests.c10d.ranks import Ranks
from tests.c10d.suite_outcomes import Setting, reason_not_ours, sort

# The smallest world in which no test is left out for its size; subgroups are of ranks 1 and 2.
SIZE = 4
SETTING = Setting("processes", SIZE, "echelon")
# With torch 2.13.0. A lower number would mean that tests vanish in silence.
MIN_PASSED = 119


@pytest.mark.slow
@pytest.mark.timeout(300)  # about 25 s on two free cores
def test_pytorchs_generic_backend_tests_pass_on_echelon(tmp_path: Path) -> None:
    for folder in ("barrier", "test_dir", "init_dir"):
        (tmp_path / folder).mkdir()
    with Ranks(SIZE, partial(generic_suite.prepare, SIZE), generic_suite.setup) as ranks:
        names = [
            name
            for name in ranks.call(generic_suite.all_names)[0]
            if reason_not_ours(name, SETTING) is None
        ]
        of_ranks = ranks.call(generic_suite.run_suite, str(tmp_path), names, timeout_s=250.0)
    outcomes = {name: {of_rank[name][0] for of_rank in of_ranks} for name in names}
    by_outcome = sort(outcomes, SIZE)
    assert {name: outcomes[name] for name in by_outcome.failed} == {}
    assert len(by_outcome.passed) >= MIN_PASSED
