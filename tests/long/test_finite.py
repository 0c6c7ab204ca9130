"""What is not finite on one rank is a reason for all: what tests/laws leaves out over gloo."""

from tests.guarded_models import INF
from tests.laws.test_finite_in_every_world import check_skips


def test_all_ranks_skip_what_is_infinite_on_one_over_gloo() -> None:
    check_skips("gloo", INF)
