"""What every group promises: the same checks over simulated ranks, local processes and gloo."""

from functools import cache

import pytest

from tests.comm import collective_checks, dtype_checks, order_checks, path_checks
from tests.comm.checking import Outcome, checks_of, outcome_of

# Odd numbers of ranks find what is only right for pairs; more ranks than cores find what spins.
WORLDS = {
    ("threads", 1): "any",
    ("threads", 4): "any",
    ("threads", 3): "sharing memory",
    ("processes", 2): "sharing memory",
    ("processes", 3): "sharing memory",
    ("gloo", 3): "any",
}
CHECKS = {"any": checks_of(collective_checks, dtype_checks, order_checks)}
CHECKS["sharing memory"] = CHECKS["any"] + checks_of(path_checks)


@cache
def outcome(kind: str, ranks: int) -> Outcome:
    """One start for each world, however many tests ask."""
    return outcome_of(kind, ranks, CHECKS[WORLDS[kind, ranks]])


@pytest.mark.parametrize(
    ("kind", "ranks", "name"),
    [
        pytest.param(kind, ranks, name, id=f"{kind}-{ranks}-{name.partition('check_')[2]}")
        for (kind, ranks), which in WORLDS.items()
        for name in CHECKS[which]
    ],
)
def test_every_group(kind: str, ranks: int, name: str) -> None:
    outcome(kind, ranks).require(name)
