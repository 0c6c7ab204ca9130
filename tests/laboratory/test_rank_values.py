"""Each simulated rank gets copies of what holds tensors, and the very same object otherwise."""

import random
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echelon.errors import ArgumentError
from echelon.laboratory.rank_values import ValuesOfRank


@dataclass
class Batch:
    x: torch.Tensor
    name: str


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        nn.Linear(2, 2),
        [{"x": (torch.ones(1),)}],
        Batch(torch.ones(1), "a"),
        Trainer(),
        SimpleNamespace(deep=SimpleNamespace(x=torch.ones(1))),
        torch.Generator(),
        random.Random(0),
        np.ones(2),
        np.random.default_rng(0),
        nn.utils.parametrizations.weight_norm,  # a function: code, and no state
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_tensors_is_copied_for_each_rank(value: Any) -> None:
    copies = [ValuesOfRank().of("value", value) for _ in range(2)]
    if callable(value) and not isinstance(value, nn.Module):
        assert copies[0] is copies[1] is value
    else:
        assert copies[0] is not copies[1] is not value


@pytest.mark.parametrize(
    "value",
    ["text", 3, None, [1, 2], {"a": {"b": 3}}, threading.Lock(), print, Trainer, object()],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_one_object_on_all_ranks(value: Any) -> None:
    assert ValuesOfRank().of("value", value) is value


def test_an_optimizer_keeps_to_the_model_of_its_rank() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    rank = ValuesOfRank()
    its_model, its_optimizer = rank.of("model", model), rank.of("optimizer", optimizer)
    assert its_optimizer.param_groups[0]["params"][0] is its_model.weight
    assert its_model.weight in its_optimizer.state
    its_model(torch.ones(2)).sum().backward()
    its_optimizer.step()
    assert not torch.equal(its_model.weight, model.weight)


def test_a_circle_of_objects_is_looked_at_once() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert ValuesOfRank().of("circle", circle) is circle


def test_tensors_that_cannot_be_copied_are_refused_by_the_name_of_the_fixture() -> None:
    hidden = [torch.ones(1, requires_grad=True) * 2]
    with pytest.raises(ArgumentError, match="'batch' holds tensors, of which each rank needs its"):
        ValuesOfRank().of("batch", hidden)


class Case:
    shared = torch.zeros(1)
    name = "a"

    def __init__(self) -> None:
        self.own = torch.ones(1)
        self.lock = threading.Lock()


def test_an_instance_has_copies_also_of_what_its_class_holds() -> None:
    case = Case()
    twin = ValuesOfRank().instance(case)
    twin.shared += 1
    twin.own += 1
    twin.new = 3
    assert type(twin) is Case
    assert twin.lock is case.lock
    assert (Case.shared, case.own, hasattr(case, "new")) == (0, 1, False)
    assert set(vars(twin)) == {"shared", "own", "lock", "new"}
