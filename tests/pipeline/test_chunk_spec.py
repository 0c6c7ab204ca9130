"""What has rows is cut, what has none is whole, and what nobody can know is refused everywhere."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.pipeline import Replicate, TensorChunkSpec
from tests.reference import mse
from tests.worlds import run_world


class Pair(NamedTuple):
    mask: Any
    rest: Any = None


class Holds:
    """An object with a tensor, which is no container that torch knows."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


CONTAINERS: dict[str, Any] = {
    "tensor": (lambda mask: mask, lambda mask: mask),
    "dict": (lambda mask: {"mask": mask}, lambda value: value["mask"]),
    "list": (lambda mask: [None, (mask, 2)], lambda value: value[1][0]),
    "named tuple": (Pair, lambda value: value.mask),
    "object": (Holds, lambda value: value.mask),
}


class Attention(nn.Module):
    def __init__(self, container: str = "tensor") -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.container = container

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        mask = CONTAINERS[self.container][1](mask)
        scores = torch.einsum("btd,bsd->bts", self.query(x), x)
        return torch.softmax(scores.masked_fill(~mask, -1e9), -1) @ x


def loss_of(
    world: World, x: Tensor, mask: Any, container: str = "tensor", **options: Any
) -> tuple[Tensor, Tensor]:
    """That of the pipeline and that of one process."""
    torch.manual_seed(0)
    stages = [Attention(container).double() for _ in range(2)]
    y = torch.randn_like(x)
    expected = mse(stages[1](stages[0](x, mask), mask), y).detach()
    pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=mse, **options)
    loss = pipe.step(x, target=y, mask=mask, loss_everywhere=True)
    assert loss is not None
    return loss, expected


def what_is_known_is_right_and_the_rest_is_refused(world: World) -> None:
    """Rows, tokens, the shape of the mask; whether it is right without a word, whole, cut."""
    torch.manual_seed(1)
    for rows, tokens, shape, by_rule, whole, cut in (
        (4, 4, (4, 4), False, True, False),  # the mask of the defect
        (6, 5, (5, 5), False, True, False),
        (4, 3, (3, 3), False, True, False),
        (6, 5, (1, 5, 5), True, True, False),
        (6, 5, (), True, True, False),
        (6, 5, (6, 5, 5), True, False, True),
        (4, 4, (4, 4, 4), False, True, True),  # as an input of as many tokens as rows
        (6, 5, (6, 1, 5), True, False, True),
        (4, 4, (4, 1, 4), False, False, True),
    ):
        x = torch.randn(rows, tokens, 4).double()
        mask = (
            torch.tril(torch.ones(shape, dtype=torch.bool))
            if len(shape) > 1
            else torch.tensor(True)
        )
        if shape:
            mask[..., 0] = True
        for container, (wrap, _) in CONTAINERS.items():
            for spec, is_right in (
                (None, by_rule and container != "object"),
                (Replicate(), whole and shape != (4, 4, 4)),
                (TensorChunkSpec(0), cut and container != "object"),
            ):
                if spec is not None and not is_right:
                    continue  # the user's word is taken, and torch refuses the shapes
                options = {} if spec is None else {"kwargs_chunk_spec": {"mask": spec}}
                if is_right:
                    loss, expected = loss_of(world, x, wrap(mask), container, **options)
                    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-13)
                else:
                    with pytest.raises(ArgumentError, match="mask"):
                        loss_of(world, x, wrap(mask), container, **options)


def a_refused_batch_leaves_the_pipeline_usable(world: World) -> None:
    """Also where only one rank has the mask, and after one of the right shape."""
    pipe = ec.Pipeline(
        [nn.Identity(), Attention()], world.group, microbatches=2, loss_fn=lambda y, _: y.sum()
    )
    x = torch.randn(4, 4, 4)
    square = {"mask": torch.ones(4, 4, dtype=torch.bool)} if world.rank else {}
    with pytest.raises(ArgumentError, match=r"'mask'.* of shape .*4, 4.*Replicate"):
        pipe.step(x, target=x, **square)
    mask = {"mask": torch.ones(1, 4, 4, dtype=torch.bool)} if world.rank else {}
    assert pipe.step(x, target=x, loss_everywhere=True, **mask) is not None


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_mask_is_cut_whole_or_refused(kind: str) -> None:
    run_world(kind, what_is_known_is_right_and_the_rest_is_refused, 2)
    run_world(kind, a_refused_batch_leaves_the_pipeline_usable, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kwargs_chunk_spec": {"mask": 0}}, "kwargs_chunk_spec has 0; give ec.pipeline.Replicate"),
        ({"kwargs_chunk_spec": Replicate()}, "kwargs_chunk_spec is Replicate"),
        ({"args_chunk_spec": Replicate()}, "args_chunk_spec is Replicate"),
        ({"args_chunk_spec": (None, None)}, "args_chunk_spec has 2 specs for 1 arguments"),
        ({"target_chunk_spec": "rows"}, "target_chunk_spec has 'rows'"),
    ],
)
def test_a_spec_that_is_none_is_refused(options: dict[str, Any], words: str) -> None:
    def main(world: World) -> None:
        pipe = ec.Pipeline([nn.Linear(4, 4)], world.group, microbatches=2, loss_fn=mse, **options)
        pipe.step(torch.ones(4, 3, 4), target=torch.ones(4, 3, 4))

    with pytest.raises(ArgumentError, match=words):
        ec.run(main, 1)


def test_rows_are_dim_0() -> None:
    with pytest.raises(ArgumentError, match="split_dim is 1, and rows are dim 0"):
        TensorChunkSpec(1)
