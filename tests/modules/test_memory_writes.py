"""Operators say what they write into, and a parameter that is set to its memory is not written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon.modules.memory_writes import KeepsMemory, WriteWatch, memory_of


class Writes(WriteWatch):
    """Collects the memory that is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[int] = []

    def check(self, tensor: torch.Tensor) -> None:
        self.memory.append(memory_of(tensor))


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda x: x.add_(1),
    "view": lambda x: x[1:].t().zero_(),
    "out": lambda x: torch.sin(torch.ones(4, 4), out=x),
    "foreach": lambda x: torch._foreach_add_([torch.ones(2), x], 1.0),
    "statistics": lambda x: nn.functional.batch_norm(torch.ones(2, 4), x[0], x[1], training=True),
}
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "copy": lambda x: x.clone().zero_(),
    "detach_": lambda x: x.detach_(),
    "set_": lambda x: x.set_(x),
    "statistics": lambda x: nn.functional.batch_norm(torch.ones(2, 4), x[0], x[1] + 1),
}


@pytest.mark.parametrize(("acts", "writes"), [(WRITES, True), (READS, False)])
def test_an_operator_says_what_it_writes_into(acts: Any, writes: bool) -> None:
    for name, act in acts.items():
        x = torch.ones(4, 4)
        with Writes() as seen:
            act(x)
        assert (memory_of(x) in seen.memory) is writes, name


def test_a_tensor_without_memory_has_none() -> None:
    assert memory_of(torch.eye(2).to_sparse()) == 0


def test_a_parameter_that_is_set_to_its_memory_keeps_its_version() -> None:
    param = nn.Parameter(torch.ones(3, 2))
    keeps = KeepsMemory(param)
    assert keeps(param) is param
    assert keeps(param.data) is param
    assert param._version == 0
    with torch.no_grad():
        for other in (torch.zeros(3, 2), param.detach().view(2, 3), param.detach()[1:]):
            version = param._version
            keeps(other)
            assert param._version == version + 1
            assert param.shape == other.shape
