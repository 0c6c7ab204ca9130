"""Calls are checked and become primitives, whose tensors are 1D and contiguous."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from echelon.comm import primitives
from echelon.comm.call_arguments import Arguments
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Broadcast,
    Exchange,
    Receive,
    ReduceScatter,
    Request,
    Send,
)
from echelon.errors import ArgumentError
from tests.comm.checking import same

RANK, SIZE = 1, 3
ARGUMENTS = Arguments(RANK, SIZE, torch.device("cpu"))


def test_a_contiguous_tensor_is_communicated_in_place_as_one_dim() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    for request, kind in (
        (primitives.all_reduce(ARGUMENTS, tensor, "sum", "loss"), AllReduce),
        (primitives.broadcast(ARGUMENTS, tensor, 2, None), Broadcast),
        (primitives.send(ARGUMENTS, tensor, 0, 4), Send),
        (primitives.receive(ARGUMENTS, tensor, 2, 5), Receive),
    ):
        _, operation, finish = request
        assert type(operation) is kind
        assert operation.tensor.shape == (6,)
        assert operation.tensor.data_ptr() == tensor.data_ptr()
        assert tuple(finish) == ()


def transposed() -> torch.Tensor:
    return torch.zeros(3, 2).t()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda out: primitives.all_reduce(ARGUMENTS, out, "sum", None), "tensor"),
        (lambda out: primitives.broadcast(ARGUMENTS, out, 0, None), "tensor"),
        (lambda out: primitives.receive(ARGUMENTS, out, 0, 0), "tensor"),
        (
            lambda out: primitives.reduce_scatter(
                ARGUMENTS, out, torch.zeros(18), "sum", None, None
            ),
            "output",
        ),
    ],
    ids=["all_reduce", "broadcast", "receive", "reduce_scatter"],
)
def test_a_result_reaches_a_strided_tensor_in_the_steps_after_the_wait(
    make: Callable[[torch.Tensor], Request], field: str
) -> None:
    output = transposed()
    _, operation, finish = make(output)
    flat = getattr(operation, field)
    assert flat.shape == (6,)
    flat.copy_(torch.arange(6.0))
    assert not output.any()
    for step in finish:
        step()
    same(output.contiguous(), torch.arange(6.0).view(2, 3))


def test_gathered_parts_lie_one_after_another_in_the_output() -> None:
    output, input = torch.zeros(6), torch.ones(2)
    _, operation, _ = primitives.all_gather_single(ARGUMENTS, output, input, None)
    assert type(operation) is AllGather
    assert [part.data_ptr() for part in operation.outputs] == [
        output[2 * rank :].data_ptr() for rank in range(SIZE)
    ]
    assert operation.input.data_ptr() == input.data_ptr()


@pytest.mark.parametrize(("place", "is_copied"), [(RANK, False), (0, True)])
def test_an_input_inside_the_output_is_copied_unless_it_is_the_part_of_this_rank(
    place: int, is_copied: bool
) -> None:
    output = torch.arange(6.0)
    input = output[2 * place : 2 * place + 2]
    _, operation, _ = primitives.all_gather_single(ARGUMENTS, output, input, None)
    assert type(operation) is AllGather
    assert (operation.input.data_ptr() != input.data_ptr()) is is_copied
    same(operation.input, input)


def test_rows_are_exchanged_as_elements_of_lengths_that_the_transport_checks() -> None:
    output, input = torch.zeros(6, 2), torch.arange(8.0).view(4, 2)
    _, operation, _ = primitives.all_to_all_single(
        ARGUMENTS, output, input, [1, 0, 5], [2, 1, 1], None
    )
    assert type(operation) is Exchange
    assert not operation.lengths_agreed
    assert [part.numel() for part in operation.outputs] == [2, 0, 10]
    assert [part.tolist() for part in operation.inputs] == [[0, 1, 2, 3], [4, 5], [6, 7]]


def test_a_part_is_reduced_into_a_buffer_where_peers_may_still_read_the_output() -> None:
    memory = np.arange(8, dtype=np.float32)
    input, beside = torch.from_numpy(memory).split([6, 2])
    same_memory = torch.from_numpy(memory[4:6])  # in a storage of its own
    for output, is_direct in (
        (torch.zeros(2), True),
        (beside, True),
        (input[2:4], True),
        (input[0:2], False),
        (same_memory, False),
    ):
        operation = ReduceScatter(output, input, [2, 2, 2], "sum")
        target = operation.target(RANK)
        assert (target.data_ptr() == output.data_ptr()) is is_direct
        assert target.shape == output.shape
    nothing = input[0:0]
    assert ReduceScatter(nothing, input, [3, 0, 3], "sum").target(RANK) is nothing


def test_all_ranks_agree_on_what_signatures_say_and_lengths_of_an_exchange_may_differ() -> None:
    tensor = torch.zeros(2, 3)
    texts = {
        "all_reduce(max) float32[2, 3] of 'loss'": primitives.all_reduce(
            ARGUMENTS, tensor, "max", "loss"
        ),
        "broadcast float32[2, 3] root=2": primitives.broadcast(ARGUMENTS, tensor, 2, None),
        "reduce_scatter_single(sum) float32[2, 3] in parts of [1, 2, 3]": (
            primitives.reduce_scatter(ARGUMENTS, torch.zeros(2), tensor, "sum", [1, 2, 3], None)
        ),
        "all_gather float32[6] in parts of [1, 2, 3]": primitives.all_gather(
            ARGUMENTS, [torch.zeros(length) for length in (1, 2, 3)], torch.zeros(2), None
        ),
        "all_to_all_single float32[]": primitives.all_to_all_single(
            ARGUMENTS, torch.zeros(3), torch.ones(3), None, None, None
        ),
        "send float32[6] peer=0 tag 4": primitives.send(ARGUMENTS, tensor, 0, 4),
    }
    assert [str(signature) for signature, _, _ in texts.values()] == list(texts)


ONE, TWO = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (
            r"input has 2 elements; it needs size \* output.numel\(\) = 3",
            lambda: primitives.reduce_scatter(ARGUMENTS, ONE, TWO, "sum", None, None),
        ),
        (
            r"output has 1 elements; it needs splits\[1\] = 2",
            lambda: primitives.reduce_scatter(ARGUMENTS, ONE, TWO, "sum", [0, 2, 0], None),
        ),
        (
            r"output has 2 elements; it needs size \* input.numel\(\) = 3",
            lambda: primitives.all_gather_single(ARGUMENTS, TWO, ONE, None),
        ),
        (
            "got 2 outputs for 3 ranks",
            lambda: primitives.all_gather(ARGUMENTS, [ONE, ONE], ONE, None),
        ),
        ("recv got tag -1", lambda: primitives.receive(ARGUMENTS, ONE, 0, -1)),
        (
            "cannot write to a tensor",
            lambda: primitives.receive(ARGUMENTS, ONE.expand(4), 0, 0),
        ),
    ],
)
def test_arguments_that_cannot_be_communicated_are_refused(
    words: str, make: Callable[[], Request]
) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


def test_only_the_source_of_a_broadcast_may_give_an_expanded_tensor() -> None:
    expanded = torch.ones(1).expand(4)
    _, operation, _ = primitives.broadcast(ARGUMENTS, expanded, RANK, None)
    assert type(operation) is Broadcast
    same(operation.tensor, torch.ones(4))
    with pytest.raises(ArgumentError, match="cannot write to a tensor"):
        primitives.broadcast(ARGUMENTS, expanded, 0, None)
