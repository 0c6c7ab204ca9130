"""What goes between stages: the values that were sent, and what cannot be sent."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.pipeline.boundary import BoundarySpec, flatten
from tests.pipeline.models import Times, pipeline
from tests.worlds import run_world


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


def every_shape_dtype_and_nesting_arrives_as_it_was_sent(world: World) -> None:
    dtypes = (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.bool,
    )
    shapes: list[list[int]] = [[], [0, 3], [2, 3], [2, 3, 4, 5], [70, 80]]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        (8 * torch.randn(shape, generator=generator)).to(dtype)
        for shape in shapes
        for dtype in dtypes
    ]
    value = {"all": tensors, "pair": (tensors[2], [{"text": "x", "none": None}, 1.5, True])}
    scale = torch.ones((), dtype=torch.float64)

    class Gives(Times):
        def forward(self, x: Tensor) -> Any:
            strided = x.expand(-1, 6)[:, ::2].t()  # neither whole nor contiguous
            return {"x": self.w * x, "strided": strided, "value": value, "scale": scale * self.w[0]}

    class Checks(nn.Module):
        num_seen = 0

        def forward(self, given: dict[str, Any]) -> Any:
            got, expected = given["value"], value
            assert got["pair"][1] == expected["pair"][1]
            assert type(got["pair"]) is tuple
            for one, other in zip(
                [*got["all"], got["pair"][0]], [*tensors, tensors[2]], strict=True
            ):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                assert torch.equal(one, other)
            assert torch.equal(given["strided"][0], given["strided"][2])
            assert not given["strided"].requires_grad
            assert given["x"].requires_grad
            self.num_seen += 1
            return given

    def loss(given: dict[str, Any], target: Tensor) -> Tensor:
        return (given["x"] * given["scale"] * given["strided"][0][:, None]).sum()

    stages = [Gives(3.0), *(Checks() for _ in range(world.size - 1))]
    pipe = pipeline(world, stages, loss_fn=loss, loss_reduction="sum")
    x = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None]
    for _ in range(2):  # the second time, both sides know what comes
        pipe.step(x, target=x)
    (stage,) = pipe.stages.values()
    if world.rank == 0:
        assert stage.w.grad.item() == 2 * 2 * 3 * x.square().sum().item()
    else:
        assert stage.num_seen == 8


@pytest.mark.parametrize(
    ("kind", "ranks"), [("threads", 2), ("threads", 4), ("processes", 3), ("gloo", 2)]
)
def test_every_value_arrives_as_it_was_sent(kind: str, ranks: int) -> None:
    run_world(kind, every_shape_dtype_and_nesting_arrives_as_it_was_sent, ranks)
