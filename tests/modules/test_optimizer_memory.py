"""What the optimizers of parts keep is compared with what that of the whole keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.modules.optimizer_memory import Memory, keep_states, number_keys

WHOLE = torch.arange(12, dtype=torch.float64).view(4, 3)


class Keeps(torch.optim.Optimizer):
    """An optimizer that keeps a function of a parameter in its state, and attributes."""

    def __init__(self, tensor: Tensor, state: Callable[[Tensor], Any], **attributes: Any) -> None:
        super().__init__([nn.Parameter(tensor)], {"lr": 0.1})
        (self.param,) = self.param_groups[0]["params"]
        self.state[self.param]["kept"] = state(tensor)
        vars(self).update(attributes)


def memory(optimizer: Keeps, elements: Tensor) -> Memory:
    return Memory(optimizer, [(optimizer.param, elements, tuple(optimizer.param.shape))])


def difference(state: Callable[[Tensor], Any], *, flat: bool) -> str | None:
    """What is kept otherwise of the last two rows than of the whole."""
    part = WHOLE[2:].reshape(-1) if flat else WHOLE[2:]
    whole = memory(Keeps(WHOLE, state), torch.arange(12))
    return whole.difference(memory(Keeps(part, state), torch.arange(6, 12)), 12)


# By what is kept: whether rows of it, and elements in one dim, are parts of it.
KEPT: dict[str, tuple[Callable[[Tensor], Any], bool, bool]] = {
    "a moment": (lambda t: t * 2, True, True),
    "a moment in float32": (lambda t: (t * 0.1).float(), True, True),
    "a moment in one dim": (lambda t: t.reshape(-1), True, True),
    "a count": (lambda t: t.numel(), True, True),  # no float
    "a number of no tensor": (lambda t: 0.5, True, True),
    "several moments": (lambda t: [t, {"deep": t.square()}], True, True),
    "stacked moments": (lambda t: torch.stack([t, -t]), True, True),
    "moments in a last dim": (lambda t: torch.stack([t, -t], dim=-1), True, True),
    "a table": (lambda t: torch.tensor([0.9, 0.99, 0.999]), True, True),
    "a moment with infinities": (lambda t: torch.where(t > 3, t, torch.inf), True, True),
    "a norm": (lambda t: t.norm(), False, False),
    "a norm as a number": (lambda t: t.norm().item(), False, False),
    "norms of rows": (lambda t: t.norm(dim=-1) if t.dim() > 1 else t, True, False),
    "norms of columns": (lambda t: t.norm(dim=0), False, False),
    "products of columns": (lambda t: t.mT @ t if t.dim() > 1 else t, False, False),
    "products of rows": (lambda t: t @ t.mT if t.dim() > 1 else t, False, False),
}


@pytest.mark.parametrize("name", list(KEPT))
def test_parts_keep_the_parts_of_what_the_whole_keeps_or_differ(name: str) -> None:
    state, by_rows, by_elements = KEPT[name]
    assert (difference(state, flat=False) is None) is by_rows
    assert (difference(state, flat=True) is None) is by_elements


def test_a_number_of_all_parameters_is_found_in_groups_attributes_and_inner_optimizers() -> None:
    def keeps(number: float, place: str) -> Memory:
        optimizer = Keeps(WHOLE, torch.zeros_like)
        if place == "a group":
            optimizer.param_groups[0]["number"] = number
        elif place == "an attribute":
            vars(optimizer)["number"] = torch.tensor(number)
        elif place == "a list":
            vars(optimizer)["numbers"] = [0.1, number]
        else:
            vars(optimizer)["inner"] = Keeps(WHOLE, torch.zeros_like, number=number)
        return memory(optimizer, torch.arange(12))

    names = {
        "a group": "param_groups[0]['number']",
        "an attribute": "number",
        "a list": "numbers[1]",
        "an inner optimizer": "inner['number']",
    }
    for place, name in names.items():
        assert keeps(1.0, place).difference(keeps(1.0, place), 12) is None
        assert keeps(1.0, place).difference(keeps(1.1, place), 12) == name


def test_lists_that_have_something_for_each_parameter_are_longer_for_the_whole() -> None:
    whole = memory(Keeps(WHOLE, torch.zeros_like, norms=[1.0, 2.0]), torch.arange(12))
    part = memory(Keeps(WHOLE, torch.zeros_like, norms=[2.0]), torch.arange(12))
    assert whole.difference(part, 12) is None


def test_states_of_parameters_become_states_of_their_stand_ins() -> None:
    old, new = nn.Parameter(torch.ones(5)), nn.Parameter(torch.arange(3.0))
    states = {
        "by parameter": {old: {"slow": torch.ones(5), "zero": torch.zeros(5), "step": 3}},
        "by group": [[torch.full((5,), 2.0)]],
    }
    memo: dict[int, Any] = {}
    keep_states(states, [[old]], [[(old, new)]], memo)
    state = memo[id(states["by parameter"])][new]
    assert torch.equal(state["slow"], new)
    assert torch.equal(state["zero"], torch.zeros(3))
    assert state["step"] == 3
    (slow,) = memo[id(states["by group"][0])]
    assert torch.equal(slow, new)


def test_a_parameter_without_dims_has_states_of_both_kinds() -> None:
    one, many = torch.tensor(1.0), torch.ones(2)
    shapes = {"scale": (), "weight": (2,)}
    state = {
        "scale": {"step": one, "average": one, "decay": one, "own": one},
        "weight": {"step": one, "average": many, "decay": one},
    }
    numbers = number_keys(
        torch.optim.SGD([nn.Parameter(one)]),
        [(shapes[name], key, value) for name, own in state.items() for key, value in own.items()],
    )
    found = {key: key not in numbers for key in state["scale"]}
    assert found == {"step": False, "average": True, "decay": False, "own": True}
