"""A group over an engine's own collectives passes all checks of groups over c10d."""

import pytest

from tests.comm.torch_dist.c10d_checks import CHECKS, outcome


@pytest.mark.parametrize(
    ("ranks", "compared"),
    [(3, False), (2, True)],
    ids=["3 ranks", "2 ranks, calls compared"],
)
@pytest.mark.parametrize("name", CHECKS, ids=lambda name: name.partition("check_")[2])
def test_that(name: str, ranks: int, compared: bool) -> None:
    outcome(ranks, native=True, compared=compared).require(name)
