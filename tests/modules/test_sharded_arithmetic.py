"""Elementwise functions of parts are parts of what they give on the whole, or are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
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


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda p: build().weight.detach().clone().sub_(p).square().sum(),
    "part": lambda p: torch.zeros_like(p).add_(p).square().sum(),
    "plain list": lambda p: written(torch._foreach_add_, build().weight.detach(), p).sum(),
    "part list": lambda p: written(torch._foreach_add_, torch.zeros_like(p), p).sum(),
    "norms": lambda p: torch._foreach_norm([p])[0],
    "slice": lambda p: torch.cat([p.flatten(), torch.ones(2).double()])[:15].sum(),
}


def written(func: Callable[..., None], target: Tensor, *values: Tensor) -> Tensor:
    func([target], list(values))
    return target


@pytest.mark.parametrize("way", IN_PLACE)
def test_a_backward_through_what_was_written_or_cut_out_is_refused(way: str) -> None:
    with pytest.raises(StateError, match="a backward through"):
        looks(lambda p: IN_PLACE[way](p).backward())


def test_a_sharded_number_multiplies_a_list() -> None:
    def main(world: ec.World) -> list[float]:
        model = nn.Linear(1, 4)
        model.scale = nn.Parameter(torch.tensor(2.0))
        scale = ec.FSDP(model, world.group, min_num_params=0).scale
        return torch._foreach_mul([torch.ones(2)], scale.detach())[0].tolist()

    assert ec.run(main, 2) == [[2.0, 2.0]] * 2


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
