"""``recompute=True`` with compiled stages: backward runs the graph that forward ran.

torch.compile makes a graph for the first shape, and one for any shape when a second comes. Both fit
the first shape, and they may keep different tensors for backward.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world


def keeps_more_for_any_shape(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend whose graph for any shape keeps another tensor than that for one shape."""
    if not any(isinstance(each, torch.SymInt) for each in inputs):
        return gm

    def run(*args: Any) -> Any:
        nothing = torch.sin(args[0].double()).sum().float() * 0  # of the weight
        return tuple(out + nothing for out in gm(*args))

    return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


def trains(world: ec.World) -> None:
    model, expected = plain(), plain()
    stages = [torch.compile(stage, backend=keeps_more_for_any_shape) for stage in model]
    pipe = ec.Pipeline(
        stages,
        world.group,
        microbatches=4,
        schedule="looped-bfs",
        recompute=True,
        loss_fn=nn.functional.mse_loss,
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(14, 3, generator=generator)  # microbatches of 4, 4, 3 and 3 rows
        pipe.step(x, target=torch.zeros(14, 3))
        nn.functional.mse_loss(expected(x), torch.zeros(14, 3)).backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)  # float32, summed in another order


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_microbatches_of_several_lengths_are_computed_again_by_the_same_graph():
    torch._dynamo.reset()
    run_world("threads", trains, 1)
