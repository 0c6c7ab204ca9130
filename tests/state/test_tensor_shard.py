"""Plain numbers in memory are held in any layout, and anything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from echelon.errors import ArgumentError
from tests.holding import holdings_of, write


class Wrapping(Tensor):
    """Numbers that are not where torch thinks."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class Labelled(Tensor):
    """Plain numbers, and a name."""


ODD: list[tuple[Callable[[], Tensor], str]] = [
    (lambda: torch.empty(2, device="meta"), "on the meta device"),
    (lambda: nn.UninitializedBuffer(), "has no shape yet"),
    (lambda: torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "nested"),
    (lambda: Wrapping(torch.ones(2)), "is a Wrapping"),
    (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "is a FakeTensor"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is torch.qint8"),
    (lambda: torch.ones(1).expand(5), "expanded"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated")
@pytest.mark.parametrize(("make", "what"), ODD, ids=[what for _, what in ODD])
def test_what_is_not_plain_numbers_in_memory_is_refused_by_name(
    make: Callable[[], Tensor], what: str
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("odd", make())
    with pytest.raises(ArgumentError, match=rf"'0\.odd' cannot be saved or loaded: it .*{what}"):
        holdings_of(model, None)


def test_a_lazy_parameter_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ArgumentError, match=r"'0\.weight'.*no shape yet"):
        holdings_of(model, None)


def test_plain_numbers_of_any_layout_in_memory_are_held() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    model.register_buffer("labelled", torch.ones(2).as_subclass(Labelled))
    model.register_buffer("conjugate", torch.ones(2, dtype=torch.complex64).conj())
    model.register_buffer("strided", torch.arange(6.0)[::2])
    model.register_buffer("empty", torch.empty(0, 3))
    weights = {
        name: torch.full(one.shape, 2, dtype=one.dtype) for name, one in model.state_dict().items()
    }
    write(holdings_of(model, None), weights)
    for name, one in model.state_dict().items():
        assert torch.equal(one.as_subclass(Tensor), weights[name]), name
