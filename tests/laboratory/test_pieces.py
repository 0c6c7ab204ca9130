import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.laboratory.pieces import Piece, PieceFinder
from tests.laboratory.tasks import mlp


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def test_the_ranges_of_all_ranks_of_fsdp_make_up_each_parameter() -> None:
    torch.manual_seed(0)
    plain = mlp()

    def main(world: World) -> list[Piece]:
        torch.manual_seed(0)
        model = mlp()
        before = shapes(model)
        wrapped = ec.FSDP(model, world.group, min_num_params=0)
        finder = PieceFinder(before, model, wrapped)
        return finder.of_parameters({p: p.detach().clone() for p in wrapped.parameters()})

    pieces = [piece for of_rank in ec.run(main, 3) for piece in of_rank]
    for name, param in plain.named_parameters():
        ranges = [piece for piece in pieces if piece.name == name]
        assert sum(piece.numel for piece in ranges) == param.numel()
        assert all(torch.equal(piece.flat, piece.of(param.detach())) for piece in ranges)


def test_states_are_named_by_their_key_and_parameter() -> None:
    model = mlp()
    finder = PieceFinder(shapes(model), model, None)
    param = model[0].weight  # type: ignore[index]
    pieces = finder.of_states({param: {"exp_avg": torch.ones(8, 4), "step": torch.tensor(3.0)}})
    assert [piece.name for piece in pieces] == ["exp_avg of 0.weight", "step of 0.weight"]
    assert pieces[1].flat.tolist() == [3.0]


def test_a_gradient_that_is_not_there_counts_as_zeros() -> None:
    assert Piece("w", (2,), 0, 2, None).flat.tolist() == [0.0, 0.0]


def test_a_function_that_returns_no_model_is_refused() -> None:
    model = mlp()
    with pytest.raises(ArgumentError, match="the function returned 3"):
        PieceFinder(shapes(model), model, 3)


def test_a_sharded_model_that_is_not_returned_is_refused() -> None:
    def main(world: World) -> None:
        model = mlp()
        finder_shapes = shapes(model)
        wrapped = ec.FSDP(model, world.group, min_num_params=0)
        PieceFinder(finder_shapes, model, None).of_parameters(
            {p: p.detach().clone() for p in wrapped.parameters()}
        )

    with pytest.raises(ArgumentError, match="did not return the model"):
        ec.run(main, 2)
