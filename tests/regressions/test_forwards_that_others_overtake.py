"""No rank writes its parts while another one is still in a forward that no reduction follows."""

import time

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.worlds import run_world


class Late(nn.Module):
    """The identity; the last rank takes long for it."""

    def __init__(self, world: ec.World) -> None:
        super().__init__()
        self.is_late = world.rank == world.size - 1

    def forward(self, x: Tensor) -> Tensor:
        if self.is_late:
            time.sleep(0.1)
        return x


def build(world: ec.World) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(3)]
    return nn.Sequential(layers[0], Late(world), *layers[1:])


def kept_forward(model: ec.FSDP, x: Tensor) -> Tensor:
    return model(x).sum()


def kept_backward(model: ec.FSDP, x: Tensor) -> Tensor:
    with model.no_sync():
        loss = model(x).sum()
        loss.backward()
    return loss


def failed_backward(model: ec.FSDP, x: Tensor) -> Tensor:
    output = model(x)

    def fail(grad: Tensor) -> None:
        raise KeyError("no backward today")

    output.register_hook(fail)
    with pytest.raises(KeyError):
        output.sum().backward()
    return output.sum()


def forward_then_write(world: ec.World, offload: ec.Offload) -> None:
    units = ec.units.by_type(nn.Linear)
    x = torch.ones(1, 2, dtype=torch.float64)
    for forward in (kept_forward, kept_backward, failed_backward):
        for writes in ("step", "load"):
            model = ec.FSDP(
                build(world), world.group, units=units, min_num_params=0, offload=offload
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            zeros = {name: 0 * value for name, value in model.state_dict().items()}
            with torch.no_grad():
                expected = model(x).sum()
            model(x).sum().backward()
            assert torch.equal(forward(model, x), expected), (forward, writes)
            if writes == "step":
                optimizer.step()
            else:
                model.load_state_dict(zeros)


@pytest.mark.parametrize("offload", [ec.Offload.NONE, ec.Offload.ALL])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_step_or_a_load_waits_for_the_forwards_of_other_ranks(kind, offload) -> None:
    run_world(kind, forward_then_write, 2, (offload,))


def train_many(world: ec.World) -> int:
    """How many barriers a usual step has."""
    model = ec.FSDP(build(world), world.group, min_num_params=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = 0

    def listener(event: ec.events.Event) -> None:
        nonlocal calls
        if event.name == "collective.issue" and event.facts["rank"] == world.rank:
            calls += event.facts["op"] == "barrier"

    with ec.events.listen(listener):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return calls


def test_a_step_after_a_reduction_waits_for_nobody() -> None:
    assert ec.run(train_many, 2) == [1, 1]
