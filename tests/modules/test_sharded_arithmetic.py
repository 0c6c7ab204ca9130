"""Elementwise functions of parts are parts of what they give on the whole, or are refused."""

import pytest
import torch

from echelon.errors import StateError
from tests.parts import build, looks


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_tensor_that_broadcasts_to_the_whole_is_cut(layout: str) -> None:
    whole = build().weight.detach() + torch.arange(3)
    assert looks(lambda p: torch.equal(p.detach() + torch.arange(3), whole), layout)


@pytest.mark.parametrize("shape", [(2, 5, 3), (7,), (2, 3), (3, 5)])
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match=r"'weight' of unit 'root', rank \d holds"):
        looks(lambda p: p.detach() * torch.ones(shape))


def test_a_backward_through_a_part_is_refused_and_poisons_no_forward() -> None:
    with pytest.raises(StateError, match="a backward through 'weight' of unit 'root'"):
        looks(lambda p: (p * 2).sum().backward())


def test_indices_of_a_mask_are_refused() -> None:
    with pytest.raises(StateError, match="indices, which need the whole tensor"):
        looks(lambda p: torch.where(p.detach() > 0))


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_a_result_of_whole_tensors_is_written_into_a_part(layout: str) -> None:
    whole = torch.arange(15.0, dtype=torch.float64).view(5, 3)

    def look(param: torch.Tensor) -> bool:
        out = torch.empty_like(param.detach())
        torch.mul(whole, 2, out=out)
        return torch.equal(out, whole * 2)

    assert looks(look, layout)
