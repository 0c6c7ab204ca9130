"""Tensors are found in whatever a module takes or returns."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.modules.nested import cast_floats, tensors

X, Y = torch.zeros(1), torch.ones(2)
Pair = namedtuple("Pair", "x y")


@dataclass
class Output:
    logits: Tensor
    cache: Any = None


class Slotted:
    __slots__ = ("__weakref__", "held")

    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, [X]),
        ([X, (Y, None)], [X, Y]),
        ({"a": X, "b": {"c": Y}}, [X, Y]),
        (OrderedDict(a=X), [X]),
        (Pair(X, 3), [X]),
        (Output(X, cache=[Slotted(Y)]), [X, Y]),
        (Slotted(Slotted(Slotted(Slotted(X)))), [X]),
        (Slotted(Slotted(Slotted(Slotted(Slotted(X))))), []),  # four levels of objects, no more
        (nn.Linear(1, 1), []),
        ("text", []),
    ],
)
def test_they_are_found_in_order(value: object, expected: list[Tensor]) -> None:
    assert [id(tensor) for tensor in tensors(value)] == [id(tensor) for tensor in expected]


def test_an_object_that_holds_itself_is_searched_once() -> None:
    loop = Output(X)
    loop.cache = loop
    assert [id(tensor) for tensor in tensors(loop)] == [id(X)]


def test_floats_are_cast_and_the_rest_stays() -> None:
    index = torch.tensor([1])
    cast = cast_floats({"x": X, "index": index, "n": 3}, lambda tensor: tensor.double())
    assert cast["x"].dtype is torch.float64
    assert cast["index"] is index
    assert cast["n"] == 3
