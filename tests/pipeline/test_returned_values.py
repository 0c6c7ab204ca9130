"""A pipeline gives its output to every rank that wants it, in any nesting."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.worlds import NCCL_RULES, run_world


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x.t().contiguous().t(), "pair": (2 * x, "text"), "empty": x[:, :0], "n": 3}


def outputs_are_those_of_one_process(world: World) -> None:
    x = torch.arange(24.0).view(8, 3)
    for schedule, stages in (
        ("1f1b", [nn.ReLU(), Nested()]),
        ("interleaved", [nn.ReLU(), nn.ReLU(), nn.ReLU(), Nested()]),
        ("zb-v", [nn.ReLU(), nn.ReLU(), nn.ReLU(), Nested()]),
    ):
        pipe = ec.Pipeline(stages, world.group, microbatches=2, schedule=schedule)
        for rows in (8, 1):
            found, expected = pipe(x[:rows], outputs_everywhere=True), Nested()(x[:rows])
            assert torch.equal(found["x"], expected["x"])
            assert torch.equal(found["pair"][0], expected["pair"][0])
            assert (*found["pair"][1:], found["n"]) == ("text", 3)
            assert found["empty"].shape == (rows, 0)


@pytest.mark.parametrize("kind", ["threads", "processes", "gloo", NCCL_RULES])
def test_outputs_are_on_every_rank(kind: str) -> None:
    run_world(kind, outputs_are_those_of_one_process, 2)
