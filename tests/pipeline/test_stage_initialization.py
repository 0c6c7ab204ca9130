"""Stages on the meta device: a rank makes the values of its own, alike however the model is cut."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from tests.pipeline.split_models import Decoder, loss_fn


def start(world: World, chunks: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3 if world.rank == 0 else 4)  # rank 0 decides
    with torch.device("meta"):
        model = Decoder(tied=True).double()

    def materialize(module: nn.Module) -> None:
        if reset := getattr(module, "reset_parameters", None):
            reset()
        else:
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.fill_(0.5)

    stages = ec.pipeline.split(model, world.size * chunks)
    pipe = ec.Pipeline(
        stages,
        world.group,
        microbatches=4,
        schedule="interleaved" if chunks > 1 else "1f1b",
        loss_fn=loss_fn,
        materialize=materialize,
    )
    own = {id(param) for param in pipe.parameters()}
    others = [param for param in model.parameters() if id(param) not in own]
    assert all(param.is_meta for param in others)
    assert bool(others) == (world.size > 1)
    tokens = torch.zeros(4, 6, dtype=torch.long)
    pipe.step(*([tokens] if pipe.has_input else []), target=tokens if pipe.has_loss else None)
    assert all(param.grad is not None for param in pipe.parameters())
    return {name: value.clone() for name, value in pipe.state_dict().items()}


@pytest.mark.slow
def test_values_do_not_depend_on_how_the_model_is_cut() -> None:
    (alone,) = ec.run(start, 1, args=(1,))
    assert alone["inner.blocks.0.up.weight"].std() > 0
    assert not torch.equal(alone["inner.blocks.0.up.weight"], alone["inner.blocks.1.up.weight"])
    for ranks, chunks in [(2, 1), (3, 1), (2, 2)]:
        found = ec.run(start, ranks, args=(chunks,))
        together = {name: value for state in found for name, value in state.items()}
        assert together.keys() == alone.keys()
        for state in found:
            for name, value in state.items():
                assert torch.equal(value, alone[name]), (ranks, name)


class Silent(nn.Module):
    """Does not say what its parameter is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))


def refused_on_meta(world: World, stage: type[nn.Module]) -> str:
    """Why a pipeline whose second stage is of this kind cannot start from meta."""
    with torch.device("meta"):
        stages = [nn.Linear(2, 2), stage()]
    with pytest.raises(ArgumentError) as caught:
        ec.Pipeline(stages, world.group, microbatches=2)
    return str(caught.value)


def test_a_module_that_makes_no_values_is_an_error_on_every_rank() -> None:
    for text in ec.run(refused_on_meta, 2, args=(Silent,)):
        assert text.startswith("rank 1 cannot make values of its stages: '1.scale' is on meta")


class Scaled(nn.Linear):
    """Inherits a ``reset_parameters`` that does not know of its scale."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


def test_a_tensor_that_its_module_does_not_write_is_an_error_on_every_rank() -> None:
    for text in ec.run(refused_on_meta, 2, args=(Scaled,)):
        assert text.startswith("rank 1 cannot make values of its stages: reset_parameters() of")
        assert "wrote no values into '1.scale': " in text


def test_materialize_must_be_a_function() -> None:
    def main(world: World) -> None:
        ec.Pipeline([nn.Linear(2, 2)], world.group, microbatches=1, materialize=3)  # type: ignore[arg-type]

    with pytest.raises(ArgumentError, match="materialize is 3; give a function of a module"):
        ec.run(main, 1)
