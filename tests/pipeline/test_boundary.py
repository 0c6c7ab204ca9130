"""What goes between stages: the values that were sent, and what cannot be sent."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from echelon.errors import ArgumentError
from echelon.pipeline.boundary import BoundarySpec, flatten


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), (0.0, -0.0), ((1,), [1]), ("a", b"a")])
def test_values_that_are_equal_and_not_the_same_are_sent_again(pair: tuple[Any, Any]) -> None:
    x = torch.ones(2)
    one, other = (flatten({"x": x, "value": value}, "here")[0] for value in pair)
    assert not one.is_identical(other)
    assert one.is_identical(flatten({"x": x, "value": pair[0]}, "here")[0])
    grows = x.clone().requires_grad_()
    assert not one.is_identical(flatten({"x": grows, "value": pair[0]}, "here")[0])


class Halves(NamedTuple):
    left: Tensor
    factor: float


def test_values_of_classes_that_both_sides_can_find_are_sent() -> None:
    value = Halves(torch.ones(2), 0.5), [None, {"largest": torch.randn(3, 2).max(1)}]
    form, tensors = flatten(value, "stage 0")
    found = BoundarySpec.from_bytes(form.to_bytes(), 0)
    assert found.is_identical(form)
    (halves, rest) = found.unflatten(tensors)
    assert (type(halves), halves.factor) == (Halves, 0.5)
    assert torch.equal(rest[1]["largest"].indices, value[1][1]["largest"].indices)


def test_values_that_cannot_be_sent_are_named_with_what_to_do() -> None:
    local = NamedTuple("Local", [("x", Tensor)])  # noqa: UP014
    form, _ = flatten(local(torch.ones(1)), "stage 0")
    with pytest.raises(ArgumentError, match=r"Local.*define the class at the top of a module"):
        form.to_bytes()
    with pytest.raises(ArgumentError, match=r"stage 0 gave a tensor of layout torch.sparse_coo"):
        flatten(torch.eye(2).to_sparse(), "stage 0")
