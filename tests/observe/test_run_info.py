import math

import pytest

import echelon as ec
from echelon.observe import RunInfo


@pytest.mark.parametrize("steps", [0, -1, 1.5, None, True])
def test_a_run_without_steps_is_refused(steps: object) -> None:
    with pytest.raises(ec.ArgumentError, match="total_steps is"):
        RunInfo(total_steps=steps)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "4.5"])
def test_a_reference_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ec.ArgumentError, match="the reference 'unigram' is"):
        RunInfo(total_steps=1, references={"unigram": value})


@pytest.mark.parametrize("field", ["flops_per_token", "peak_flops"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, "1"])
def test_operations_that_are_no_number_above_0_are_refused(field: str, value: object) -> None:
    with pytest.raises(ec.ArgumentError, match=field):
        RunInfo(total_steps=1, **{"flops_per_token": 1.0, field: value})


def test_a_peak_without_operations_of_a_token_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="no effect without flops_per_token"):
        RunInfo(total_steps=1, peak_flops=1.0)
