"""Large tensors have memory and no values, small ones have both."""

import resource

import pytest
import torch
from torch import nn

from echelon.errors import UnsupportedError
from echelon.planner.shapes_only import LARGE, ShapesOnly

MANY = LARGE + 1


def test_a_large_result_has_the_shape_strides_and_dtype_of_a_real_one() -> None:
    given = torch.zeros(300, 400)

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        normed = nn.functional.layer_norm(x, [400])
        values, indices = x.max(dim=1)
        heads = x.view(1, 4, 300, 100)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        parts = [*x.bfloat16().split(100), x.t() @ x, x.t().contiguous(), attended]
        return [normed, values, indices, *parts, torch.cat([x, x]), x.half(), x > 0, x.sum()]

    real = results(given)
    with ShapesOnly():
        made = results(torch.empty(300, 400))
    for one, other in zip(made, real, strict=True):
        facts = (one.shape, one.stride(), one.dtype, one.untyped_storage().nbytes())
        assert facts == (
            other.shape,
            other.stride(),
            other.dtype,
            other.untyped_storage().nbytes(),
        )


def test_small_tensors_are_computed() -> None:
    with ShapesOnly():
        steps = torch.zeros(3)
        torch._foreach_add_([steps], 1)
        flags = torch.cat([steps, torch.arange(2.0)])
        assert flags.tolist() == [1, 1, 1, 0, 1]
        assert torch.ones(100, 1000).mean().item() == 0.0  # nobody knows


def test_views_share_memory_and_writes_return_their_argument() -> None:
    with ShapesOnly():
        x = torch.empty(MANY)
        assert x[1:].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert x.add_(1) is x
        assert torch.mul(x, 2, out=x) is x
        x.untyped_storage().resize_(0)
        assert x.untyped_storage().nbytes() == 0


def test_the_product_of_a_batch_of_matrices_has_memory_once() -> None:
    with ShapesOnly():
        x, weight = torch.empty(10, 100, 200), torch.empty(200, 200)
        flat = x.view(1000, 200) @ weight
        assert torch.ops.aten._unsafe_view(flat, [10, 100, 200]).data_ptr() == flat.data_ptr()


def test_nothing_large_is_touched() -> None:
    def resident() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    with ShapesOnly():
        layer = nn.Linear(40_000, 40_000)  # 6.4 GB
        before = resident()
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(8, 40_000)).sum().backward()
        optimizer.step()
    assert optimizer.state[layer.weight]["step"].item() == 1
    assert resident() - before < 500_000  # KiB


@pytest.mark.parametrize(
    "operation", [lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: torch.equal(x, x + 1)]
)
def test_what_depends_on_values_is_refused(operation) -> None:
    with ShapesOnly(), pytest.raises(UnsupportedError, match="values of a large tensor"):
        operation(torch.zeros(MANY))


def test_tensors_from_outside_have_their_values_until_one_without_is_mixed_in() -> None:
    text = torch.arange(MANY) % 7
    with ShapesOnly():
        assert text.bincount().tolist()[1:] == [MANY // 7 + (i < MANY % 7) for i in range(1, 7)]
        assert (text + 1).max().item() == 7
        assert (text * torch.ones(MANY)).max().item() == 0.0  # nobody knows
        assert text[5].item() == 5


def test_a_small_tensor_that_is_expanded_is_not_computed_with() -> None:
    with ShapesOnly():
        positions = torch.arange(30_000)
        mask = positions[:, None].expand(30_000, 30_000) >= 1  # 900 MB, if it were touched
        assert mask.shape == (30_000, 30_000)
        assert mask.any().item() is False  # nobody knows


def test_an_operation_without_shapes_on_meta_is_named() -> None:
    with torch.library._scoped_library("echelon_test", "DEF") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x.clone(), "CPU")
        with ShapesOnly(), pytest.raises(UnsupportedError, match=r"echelon_test\.unknown"):
            torch.ops.echelon_test.unknown(torch.zeros(MANY))


def test_a_large_result_of_small_tensors_is_not_computed() -> None:
    """The gradient of a weight from a few tokens, of an embedding, and of a slice."""
    with ShapesOnly():
        grad, x = torch.ones(8, 70_000), torch.ones(8, 4096)  # the first has values by a view
        few = torch.arange(8.0)
        for made in (
            grad.t() @ x,
            few[:, None] @ torch.ones(1, 8).repeat(1, 40_000),
            torch.ops.aten.slice_backward(few, [10**6], 0, 0, 8, 1),
            torch.ops.aten.embedding_dense_backward(x, torch.arange(8), 100_000, -1, False),
        ):
            assert made.mean().item() == 0.0
        assert (few[:, None] > few).sum().item() == 28  # masks are what programs look at
