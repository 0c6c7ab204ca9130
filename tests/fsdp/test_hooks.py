"""What the hooks on modules refuse: the module inside of an FSDP, called by itself.

Its root is sharded, and nothing has unsharded it. An embedding then failed in torch with ``'weight'
must be 2-D``. With ``layout="rows"`` a linear layer returned as many columns as this rank has rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.worlds import run_world


class Inner(nn.Linear):
    """A unit."""


class Model(nn.Module):
    """With a method beside its forward, as ``generate`` is one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))


def wrapped(world: ec.World, layout: str) -> ec.FSDP:
    torch.manual_seed(0)
    units = ec.units.by_type(Inner)
    return ec.FSDP(Model(), world.group, units=units, min_num_params=1, layout=layout)


CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the module": lambda module, x: module(x),
    "a method of the module": lambda module, x: module.twice(x),
}


def called(world: ec.World, call: str, layout: str, after_a_step: bool) -> str:
    model = wrapped(world, layout)
    x = torch.ones(2, 4)
    if after_a_step:
        model(x).sum().backward()
    with pytest.raises(ec.StateError) as caught:
        CALLS[call](model.module, x)
    with model.full_parameters(), torch.no_grad():
        inside = CALLS[call](model.module, x)
    assert torch.equal(CALLS[call](model.unwrap(), x), inside)  # unwrapped, nothing is refused
    return str(caught.value)


@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_the_module_itself_says_what_to_do(call: str, layout: str, after_a_step: bool):
    for text in run_world("threads", called, 2, (call, layout, after_a_step)):
        assert "was called outside of the model's forward" in text
        assert "`with model.full_parameters():`" in text


def runs_out_of_memory(world: ec.World) -> None:
    model = wrapped(world, "flat")
    x = torch.full((2, 4), 1.0 + world.rank)

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory for the root")

    model._units[0].unshard = fail  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    del model._units[0].unshard
    state = model.state_dict()  # refused inside a forward
    model(x).sum().backward()
    torch.manual_seed(0)
    plain = Model()
    plain(
        torch.cat([torch.full((2, 4), 1.0 + rank) for rank in range(world.size)])
    ).sum().backward()
    for (name, expected), param in zip(
        plain.named_parameters(), model.unwrap().parameters(), strict=True
    ):
        assert torch.equal(state[name], expected)
        torch.testing.assert_close(param.grad * world.size, expected.grad)


def test_after_a_forward_that_could_not_unshard_the_next_one_is_an_outermost_one() -> None:
    run_world("threads", runs_out_of_memory, 2)


def copies(world: ec.World) -> None:
    model = wrapped(world, "flat")
    other = copy.deepcopy(model)
    assert torch.equal(other(torch.ones(2, 4)), model(torch.ones(2, 4)))
    with pytest.raises(ec.StateError, match="outside of the model's forward"):
        other.module(torch.ones(2, 4))


def test_a_copy_has_a_check_of_its_own():
    run_world("threads", copies, 2)
