"""Facts about a part are those of the whole, and a function without a rule is refused."""

import pytest
import torch

from echelon.errors import StateError
from tests.parts import looks


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_facts_are_those_of_the_whole(layout: str) -> None:
    facts = looks(
        lambda p: (tuple(p.shape), p.dim(), p.numel(), len(p), p.stride(), p.nbytes, p.size(1)),
        layout,
    )
    assert facts == ((5, 3), 2, 15, 5, (3, 1), 120, 3)
    assert "holds elements" in looks(repr, layout)


@pytest.mark.parametrize(
    "use", [lambda p: p.T, lambda p: p.data_ptr(), lambda p: torch.mm(p, p), lambda p: p.numpy()]
)
def test_a_function_without_a_rule_is_refused(use) -> None:
    with pytest.raises(StateError, match=r"needs the whole tensor.*'weight' of unit 'root'"):
        looks(use)
