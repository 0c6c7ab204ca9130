"""Law *Parity* for FSDP in mixed precision: the bits of a step written out by hand.

By hand: every rank computes its gradients on a copy in the compute dtype; they are cast to the
dtype of the reduction, summed in rank order, divided, and given to an optimizer over the masters.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon as ec
from echelon.comm.reduce_op import reduce_into
from echelon.comm.world import World
from tests.fsdp.models import PLAIN, Block, batch, build, has_effect, loss_of
from tests.reference import assert_states_equal, train
from tests.worlds import run_world

STEPS = 2
LOW = torch.bfloat16
# The dtype that the model is built in, and the options that every precision adds.
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "compute": (torch.float32, {"compute": LOW, "reduce": torch.float32, "buffers": LOW}),
    "low": (torch.float32, {"compute": LOW, "reduce": LOW, "buffers": LOW}),
    "reduce": (torch.float32, {"reduce": torch.float16}),
    "wide": (LOW, {"master": torch.float32, "reduce": torch.float64}),
}
COMBINATIONS = [
    (name, *options)
    for name, *options in itertools.product(PRECISIONS, PLAIN, ("flat", "rows"), (0, 60))
    if has_effect(*options)
]


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    # One tensor after the other: a part and a whole tensor then go through the same operations.
    return torch.optim.SGD([p for p in params if p.requires_grad], 0.1, 0.9, foreach=False)


def trained_state(
    world: World, name: str, strategy: ec.Strategy, layout: str, least: int
) -> dict[str, Tensor]:
    dtype, options = PRECISIONS[name]
    model = ec.FSDP(
        build(dtype),
        world.group,
        units=ec.units.by_type(Block),
        strategy=strategy,
        layout=layout,
        min_num_params=least,
        precision=ec.MixedPrecision(**options),
    )
    optimizer = optimizer_of(model.parameters())
    train(optimizer, STEPS, lambda step: [loss_of(model, *batch(step, world.rank))])
    return model.state_dict()


def states_of(world: World, mine: list[int]) -> list[dict[str, Tensor]]:
    return [trained_state(world, *COMBINATIONS[i]) for i in mine]


def by_hand(name: str, size: int) -> dict[str, Tensor]:
    built, options = PRECISIONS[name]
    master = options.get("master", built)
    compute = options.get("compute", built)
    wire = options.get("reduce", master)
    model = build(built).to(master)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        found: list[list[Tensor]] = []
        for rank in range(size):
            copy = build(built).to(master)
            copy.load_state_dict(model.state_dict())
            copy.to(compute)
            loss_of(copy, *batch(step, rank)).backward()
            found.append([p.grad for p in copy.parameters() if p.grad is not None])
        trained = [p for p in model.parameters() if p.requires_grad]
        for param, parts in zip(trained, zip(*found, strict=True), strict=True):
            mean = torch.empty(param.numel(), dtype=wire)
            reduce_into([mean], [part.to(wire).flatten() for part in parts], "mean")
            param.grad = mean.view(param.shape).to(master)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    state["shift"] = state["shift"].to(options.get("buffers", built))
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [*(("threads", n) for n in (1, 2, 3, 4)), ("processes", 2), ("processes", 3), ("gloo", 2)],
)
def test_training_gives_the_bits_of_a_step_written_out_by_hand(kind: str, ranks: int) -> None:
    expected = {name: by_hand(name, ranks) for name in PRECISIONS}
    # A part for each number of ranks, so that every combination runs.
    stride = 4 if kind == "threads" else 8
    mine = [i for i in range(len(COMBINATIONS)) if (i + i // stride) % stride == ranks % stride]
    for states in run_world(kind, states_of, ranks, (mine,)):
        for i, state in zip(mine, states, strict=True):
            assert_states_equal(state, expected[COMBINATIONS[i][0]])
