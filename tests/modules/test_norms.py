"""The norm of gradients of which each rank may have parts is that of all of them as one vector."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import echelon as ec
from echelon.modules.norms import by_kind, local_norm, norm_over_shards, norms_over_ranks

ORDERS = [1.0, 2.0, 3.0, math.inf]


def gradients() -> list[Tensor]:
    """Of two dtypes in turn."""
    torch.manual_seed(0)
    kinds = [torch.float32, torch.float64]
    return [torch.randn(n, dtype=kinds[i % 2]) for i, n in enumerate((3, 5, 2, 4, 1))]


@pytest.mark.parametrize("order", ORDERS)
def test_a_local_norm_is_that_of_one_vector_in_the_widest_dtype(order: float) -> None:
    vector = torch.cat([gradient.double() for gradient in gradients()])
    norm = local_norm(gradients(), order)
    assert norm.dtype is torch.float64
    torch.testing.assert_close(norm, torch.linalg.vector_norm(vector, order))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_norms_of_narrow_gradients_are_rounded_once(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    narrow = [torch.randn(n, dtype=kind) for n in (300, 500, 200)]
    whole = torch.cat([gradient.double() for gradient in narrow])
    norm = local_norm(narrow, 2.0, dtype=torch.float64)
    torch.testing.assert_close(norm, whole.norm(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_no_gradients_have_norm_0(order: float) -> None:
    assert torch.equal(
        local_norm([], order, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    )


def test_kinds_come_in_order_of_their_first_gradient() -> None:
    assert [[one.numel() for one in kind] for kind in by_kind(gradients())] == [[3, 2, 1], [5, 4]]


@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_shards_and_of_what_all_ranks_have_make_one(order: float) -> None:
    vector, copy = torch.randn(7, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def main(world: ec.World) -> Tensor:
        shard = vector[world.rank :: world.size]
        return norm_over_shards([shard], [copy], order, world.group)

    expected = torch.linalg.vector_norm(torch.cat([vector, copy]), order)
    for norm in ec.run(main, 3):
        torch.testing.assert_close(norm, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_several_vectors_take_one_collective(order: float) -> None:
    vectors = torch.randn(2, 6, dtype=torch.float64)

    def main(world: ec.World) -> tuple[Tensor, int]:
        issued: list[ec.events.Event] = []
        shards = vectors[:, world.rank :: world.size]
        with ec.events.listen(issued.append):
            norms = norms_over_ranks(
                torch.linalg.vector_norm(shards, order, dim=1), order, world.group, "norms"
            )
        ranks = [event for event in issued if event.facts.get("rank") == world.rank]
        return norms, sum(event.name == "collective.issue" for event in ranks)

    expected = torch.linalg.vector_norm(vectors, order, dim=1)
    for norms, num_collectives in ec.run(main, 2):
        torch.testing.assert_close(norms, expected)
        assert num_collectives == 1
