"""Collectives that are made of primitives: who sends what to whom."""

from collections.abc import Callable

import pytest
import torch

import echelon as ec
from echelon.comm import derived
from echelon.comm.call_arguments import Arguments
from echelon.comm.primitives import AllReduce, Derived, Exchange, ReduceScatter, Request
from echelon.errors import ArgumentError, EchelonError, RankError
from tests.comm.checking import same
from tests.worlds import run_world

ROOT, SIZE = 1, 3
CPU = torch.device("cpu")


def arguments(rank: int) -> Arguments:
    return Arguments(rank, SIZE, CPU)


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_reduce_is_a_reduce_scatter_whose_root_gets_everything(rank: int) -> None:
    tensor = torch.arange(6.0).view(2, 3) + rank
    signature, operation, _ = derived.reduce(arguments(rank), tensor, ROOT, "max", "loss")
    assert str(signature) == "reduce(max) float32[2, 3] root=1 of 'loss'"
    assert isinstance(operation, Derived)
    primitive = operation.primitive(rank, SIZE)
    assert type(primitive) is ReduceScatter
    assert (primitive.splits, primitive.op) == ([0, 6, 0], "max")
    same(primitive.input, tensor.view(-1))
    assert primitive.output.numel() == (6 if rank == ROOT else 0)
    if rank == ROOT:
        assert primitive.output.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("rank", range(SIZE))
def test_in_a_gather_all_ranks_send_to_the_root_only(rank: int) -> None:
    tensor = torch.arange(2.0) + 10 * rank
    outputs = [torch.zeros(2, 1).t() for _ in range(SIZE)] if rank == ROOT else None
    _, operation, _ = derived.gather(arguments(rank), tensor, outputs, ROOT, None)
    assert isinstance(operation, Derived)
    primitive = operation.primitive(rank, SIZE)
    assert type(primitive) is Exchange
    assert primitive.lengths_agreed
    assert [part.tolist() for part in primitive.inputs] == [[], tensor.tolist(), []]
    lengths = [2, 2, 2] if rank == ROOT else [0, 0, 0]
    assert [part.numel() for part in primitive.outputs] == lengths


@pytest.mark.parametrize("rank", range(SIZE))
def test_in_a_scatter_only_the_root_sends(rank: int) -> None:
    tensor = torch.zeros(2)
    inputs = [torch.tensor([r, 10.0 * r]) for r in range(SIZE)] if rank == ROOT else None
    _, operation, _ = derived.scatter(arguments(rank), tensor, inputs, ROOT, None)
    assert isinstance(operation, Derived)
    primitive = operation.primitive(rank, SIZE)
    assert type(primitive) is Exchange
    expected = [[0, 0], [1, 10], [2, 20]] if rank == ROOT else [[]] * SIZE
    assert [part.tolist() for part in primitive.inputs] == expected
    assert [part.numel() for part in primitive.outputs] == [0, 2, 0]
    assert primitive.outputs[ROOT].data_ptr() == tensor.data_ptr()


def test_a_result_of_a_gather_reaches_strided_outputs_in_the_steps_after_the_wait() -> None:
    outputs = [torch.zeros(3, 2).t() for _ in range(SIZE)]
    _, operation, finish = derived.gather(arguments(ROOT), torch.ones(6), outputs, ROOT, None)
    assert type(operation) is derived.Gather
    for rank, flat in enumerate(operation.outputs):
        flat.copy_(torch.arange(6.0) + rank)
    assert not any(output.any() for output in outputs)
    for step in finish:
        step()
    for rank, output in enumerate(outputs):
        same(output.contiguous(), torch.arange(6.0).view(2, 3) + rank)


def test_a_part_for_a_peer_that_the_result_of_a_scatter_overlaps_is_copied() -> None:
    memory = torch.arange(6.0)
    parts = list(memory.split(2))
    for place in range(SIZE):
        _, operation, _ = derived.scatter(arguments(ROOT), parts[place], parts, ROOT, None)
        assert type(operation) is derived.Scatter
        for rank, (part, sent) in enumerate(zip(parts, operation.inputs, strict=True)):
            same(sent, part)
            is_copied = sent.data_ptr() != part.data_ptr()
            assert is_copied is (rank == place != ROOT)


def test_a_barrier_needs_one_element_of_every_rank_and_is_told_by_its_label() -> None:
    signature, operation, finish = derived.barrier(arguments(0), "epoch 3")
    assert str(signature) == "barrier of 'epoch 3'"
    assert tuple(finish) == ()
    assert derived.barrier(arguments(0), None)[1] is operation  # repeated calls make nothing new
    assert isinstance(operation, Derived)
    primitive = operation.primitive(0, SIZE)
    assert type(primitive) is AllReduce
    same(primitive.tensor, torch.zeros(1, dtype=torch.int32))


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("kind", "words", "make"),
    [
        (RankError, "dst is 3", lambda: derived.reduce(arguments(0), ONE, 3, "sum", None)),
        (ArgumentError, "unknown red", lambda: derived.reduce(arguments(0), ONE, 0, "avg", None)),
        (
            ArgumentError,
            "rank 1 must give 3 outputs, got none",
            lambda: derived.gather(arguments(ROOT), ONE, None, ROOT, None),
        ),
        (
            ArgumentError,
            r"gather: outputs\[0\] has 2 elements; it needs tensor.numel\(\) = 1",
            lambda: derived.gather(arguments(ROOT), ONE, [torch.ones(2)] * 3, ROOT, None),
        ),
        (
            ArgumentError,
            "only rank 1 gives inputs, this is rank 0",
            lambda: derived.scatter(arguments(0), ONE, [ONE] * 3, ROOT, None),
        ),
    ],
)
def test_arguments_without_meaning_are_refused(
    kind: type[EchelonError], words: str, make: Callable[[], Request]
) -> None:
    with pytest.raises(kind, match=words):
        make()


def gathers_into_its_input(world: ec.World) -> None:
    for dst in range(world.size):
        for place in range(world.size):
            outputs = [torch.zeros(5) for _ in range(world.size)] if world.rank == dst else None
            tensor = torch.full((5,), 1.0 + world.rank) if outputs is None else outputs[place]
            tensor.fill_(1.0 + world.rank)
            world.group.gather(tensor, outputs, dst)
            for rank, output in enumerate(outputs or []):
                assert torch.equal(output, torch.full((5,), 1.0 + rank)), (dst, place, rank)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_the_input_of_a_gather_may_be_the_output_for_any_rank(kind: str) -> None:
    run_world(kind, gathers_into_its_input, 3)
