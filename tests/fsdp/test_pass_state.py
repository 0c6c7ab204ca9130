"""Units that run more than once before their backward, and compute in another dtype."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.fsdp.pass_state import BackwardPass, UnitForwards
from tests.fsdp.checking import shard
from tests.reference import rows
from tests.worlds import events_of, run_world

LOW = torch.bfloat16


class Gain(nn.Module):
    """Its parameter stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain.to(x.dtype)


PRECISION = ec.MixedPrecision(compute=LOW, reduce=torch.float32, keep=(Gain,))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), Gain(), nn.Linear(5, 3))


def loss_of(model: nn.Module, rank: int, times: int) -> Tensor:
    """As many forwards as ``times``."""
    inputs = rows(rank, times, 2, 4, dtype=torch.float32).to(LOW)
    return sum((i + 1) * model(x).float().square().sum() for i, x in enumerate(inputs))


def by_hand(size: int, forwards: int, backwards: int) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for rank in range(size):
        model = net()
        for linear in (model[0], model[2]):
            linear.to(LOW)
        loss = loss_of(model, rank, forwards)
        for _ in range(backwards):
            for param in model.parameters():
                param.grad = None
            loss.backward(retain_graph=True)
            for name, param in model.named_parameters():
                total[name] = total.get(name, 0) + param.grad.float() / size
    return total


def run_twice(world: World, forwards: int, backwards: int) -> list[dict[str, list[float]]]:
    found = []
    rules = (ec.units.by_type(nn.Linear, Gain), ec.units.whole())
    for rule in rules:
        for strategy in (ec.Strategy.FULL_SHARD, ec.Strategy.SHARD_GRAD_OP):
            model = shard(world, net(), units=rule, precision=PRECISION, strategy=strategy)
            loss = loss_of(model, world.rank, forwards)
            for _ in range(backwards):
                loss.backward(retain_graph=True)
            grads = {}
            for name, param in model.named_parameters():
                parts = world.group.all_gather_object(ec.local_shard(param.grad).tolist())
                grads[name] = [value for part in parts for value in part]
            found.append(grads)
    return found


CASES = ((1, 2), (2, 1), (3, 2))


def run_cases(world: World) -> list[list[dict[str, list[float]]]]:
    return [run_twice(world, *case) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_gradients_of_all_forwards_and_backwards_are_added(kind: str) -> None:
    every = [by_hand(2, *case) for case in CASES]
    for found in run_world(kind, run_cases, 2):
        for expected, of_case in zip(every, found, strict=True):
            for grads, (name, value) in itertools.product(of_case, expected.items()):
                assert grads[name] == value.flatten().tolist(), name


def drops_a_forward(world: World) -> list[str]:
    model = shard(world, net(), units=ec.units.by_type(nn.Linear), precision=PRECISION)
    loss_of(model, world.rank, 1)  # its graph is gone at once
    loss = loss_of(model, world.rank, 1)
    with events_of(world.rank, "collective.issue", "fsdp.gather") as events:
        loss.backward()
    operations = {"reduce_scatter_single": "reduce", None: "gather"}
    calls = [operations.get(event.facts.get("op")) for event in events]
    return [call for call in calls if call is not None]


def test_a_forward_whose_graph_is_gone_delays_nothing() -> None:
    # The second layer is complete before backward gathers the first.
    expected = ["gather", "reduce", "gather", "reduce", "reduce"]
    assert ec.run(drops_a_forward, 2) == [expected] * 2


def test_uses_are_awaited_while_their_graph_lives_and_once_a_pass() -> None:
    uses, first, second = (
        UnitForwards(),
        BackwardPass(lambda: None, True, 1),
        BackwardPass(lambda: None, True, 1),
    )
    one, two = uses.add(), uses.add()
    assert two.reach(first)
    assert not two.reach(first)
    assert uses.awaits(first)
    assert one.reach(first)
    assert not uses.awaits(first)
    assert uses.awaits(second)
    del one, two
    assert not uses.awaits(second)
