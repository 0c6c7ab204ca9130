"""Units whose modules are compiled: what they compute stays the same, and stays one graph."""

import copy
from collections.abc import Sequence

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.fsdp.models import Block
from tests.reference import assert_states_close, rows, train_alone
from tests.worlds import run_world

# Needs no C++ compiler, and traces forward and backward as the default backend does. A full graph
# refuses what cannot be traced, such as a hook in the middle.
OPTIONS = {"backend": "aot_eager", "fullgraph": True}
STEPS = 3


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 7) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().double()


def train(model: nn.Module, ranks: Sequence[int]) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def losses(step: int) -> list[Tensor]:
        x = torch.cat([rows(rank, 3, 6, step=step) for rank in ranks])
        return [model(x).square().mean()]

    return train_alone(model, optimizer, STEPS, losses)


def compiled(way: str) -> tuple[Stack, ec.units.Rule]:
    """The model with compiled blocks, and the units that are these blocks."""
    model = stack()
    if way == "block.compile()":
        for block in model.blocks:
            block.compile(**OPTIONS)
        return model, ec.units.by_type(Block)
    model.blocks = nn.ModuleList(torch.compile(block, **OPTIONS) for block in model.blocks)
    outer = way == "torch.compile(block)"
    return model, ec.units.by_type("OptimizedModule" if outer else Block)


def trains(world: World, way: str, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    model, units = compiled(way)
    sharded = ec.FSDP(model, world.group, units=units, min_num_params=0)
    assert len(sharded.units) == 3
    # Models built on ranks that are threads draw from their own streams; all start from one here.
    prefix = "" if way == "block.compile()" else "_orig_mod."
    names = {f"blocks.{i}.": f"blocks.{i}.{prefix}" for i in range(2)}
    sharded.load_state_dict({names[key[:9]] + key[9:]: value for key, value in initial.items()})
    state = train(sharded, [world.rank])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    return {key.replace("_orig_mod.", ""): v for key, v in state.items()}


@pytest.mark.slow
# Dynamo asks every tensor for its gradient and means to hide the warning of torch about that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("threads", "block.compile()"),
        ("threads", "torch.compile(block)"),
        ("threads", "torch.compile(block), whose inside is the unit"),
    ],
)
def test_training_with_compiled_units_equals_one_process(kind: str, way: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # of the tests before
    plain = stack()
    initial = copy.deepcopy(plain.state_dict())
    expected = train(plain, range(2))
    for state in run_world(kind, trains, 2, [way, initial]):
        # Sums over ranks have another order; AdamW divides them by their own size.
        assert_states_close(state, expected, rtol=1e-9, atol=1e-10)
