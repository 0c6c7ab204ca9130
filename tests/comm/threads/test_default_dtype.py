"""The default dtype of a simulated rank is its own."""

import pytest
import torch
from torch import Tensor, nn

import echelon as ec

RANKS = 4


def test_each_rank_has_its_own_default_dtype() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]

    def main(world: ec.World) -> set[torch.dtype]:
        seen = set()
        for _ in range(50):
            torch.set_default_dtype(dtypes[world.rank])
            made = [torch.zeros(2), torch.tensor(1.0), torch.arange(3) / 2, nn.Linear(2, 2).weight]
            made += [torch.randn(2), nn.functional.dropout(torch.ones(2), 0.5)]
            weight = torch.ones(2, requires_grad=True)
            (weight * torch.ones(2)).sum().backward()
            assert weight.grad is not None
            seen |= {tensor.dtype for tensor in (*made, weight.grad)} | {torch.get_default_dtype()}
            world.group.all_reduce(torch.ones(2, dtype=torch.float32))
            torch.set_default_dtype(torch.float32)
        return seen

    assert ec.run(main, RANKS) == [{dtype} for dtype in dtypes]
    torch.set_default_dtype(torch.float64)
    try:
        assert ec.run(lambda world: torch.ones(1).dtype, 2) == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_rank_may_wait_in_backward_while_another_sets_its_dtype() -> None:
    def main(world: ec.World) -> None:
        def meet(gradient: Tensor) -> None:
            world.group.all_reduce(torch.ones(1))

        weight = torch.ones(2, requires_grad=True)
        if world.rank:
            weight.register_hook(meet)
            weight.sum().backward()
        else:
            torch.set_default_dtype(torch.float64)
            world.group.all_reduce(torch.ones(1, dtype=torch.float32))
            torch.set_default_dtype(torch.float32)

    ec.run(main, 2, timeout=20)


def test_a_default_dtype_that_is_none_is_refused_on_its_rank_only() -> None:
    def main(world: ec.World) -> torch.dtype:
        with pytest.raises(TypeError, match="floating"):
            torch.set_default_dtype(torch.int64)
        return torch.ones(1).dtype

    assert ec.run(main, 2) == [torch.float32] * 2
