from dataclasses import asdict

import pytest

import echelon as ec
from echelon.planner.software_stack import fitted_rates, rates_of


@pytest.mark.parametrize("name", list(fitted_rates()))
def test_fitted_constants_are_positive_and_near_what_is_possible(name: str) -> None:
    rates = rates_of(name)
    assert min(asdict(rates).values()) > 0
    assert rates.matmul <= 1.3
    assert rates.contention < 2


def test_an_unknown_stack_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ec.ArgumentError, match=r"give one of .*megatron"):
        rates_of("horovod")
