"""The collectives over messages of gloo pass all checks of groups over c10d."""

import pytest

from tests.comm.torch_dist.c10d_checks import CHECKS, assert_passed


@pytest.mark.slow_for("4 ranks, calls compared")
@pytest.mark.parametrize(
    ("ranks", "compared"),
    [(2, False), (4, True)],
    ids=["2 ranks", "4 ranks, calls compared"],
)
@pytest.mark.parametrize("name", CHECKS)
def test_that(name: str, ranks: int, compared: bool) -> None:
    assert_passed(name, ranks, native=False, compared=compared)
