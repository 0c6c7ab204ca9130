"""The axes of a plan are read from a text and written as one."""

import pytest

import echelon as ec
from echelon.errors import ArgumentError
from echelon.plans.axes import axes_of, text_of


@pytest.mark.parametrize("text", ["pp=2,dp=3", "shard=4", "dp=1"])
def test_a_text_names_the_axes_of_a_plan(text: str) -> None:
    assert text_of(axes_of(text)) == text
    assert str(ec.Plan.parse(text, microbatches=2 if "pp" in text else None)) == text


@pytest.mark.parametrize(
    "text",
    ["", "pp", "pp=two", "tp=2", "dp=2,dp=2", "dp=0", "dp=-1", "dp=\u00b2", "dp=" + "9" * 5000, 4],
)
def test_a_text_of_another_form_is_refused(text) -> None:
    with pytest.raises(ArgumentError, match="plan is"):
        ec.Plan.parse(text)
