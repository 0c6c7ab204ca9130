"""A traced model is what a planner asks for, for any number of sequences."""

from dataclasses import replace

import pytest

from echelon.errors import UnsupportedError
from echelon.planner.layout import Layout, Recompute
from echelon.planner.operations import Multiplication, RankWork
from echelon.planner.step_memory import block_activations, step_memory
from echelon.planner.step_time import step_time
from echelon.planner.traced_model import TracedModel, TracedPart, TracedStep
from tests.planner.sizes import MODEL, STACK, cluster


def work(rows: float, inner: float = 64) -> RankWork:
    return RankWork(
        multiplications=(Multiplication(rows, inner, 32),),
        attention_flops=10 * rows,
        moved=100 + rows,  # 100 bytes are moved for any number of sequences
        kernels=7,
    )


def part(rows: float, inner: float = 64) -> TracedPart:
    return TracedPart(
        forward=work(rows, inner),
        backward=work(2 * rows, inner),
        kept=(16 * rows, 10.0),
        output=8 * rows,
    )


def step(sequences: int) -> TracedStep:
    blocks = (part(4.0 * sequences), part(4.0 * sequences, inner=192))
    return TracedStep(embedding=part(1.0), blocks=blocks, head=part(2.0 * sequences))


TRACED = TracedModel(
    once=step(1),
    twice=step(2),
    parameters=(100, 200),
    embedding_parameters=50,
    head_parameters=60,
    shared_parameters=0,
    num_parameters=410,
    seq=4,
)


def test_counts_of_more_sequences_follow_from_those_of_one_and_two() -> None:
    forward = TRACED.block_work(Layout(microbatch=5)).forward
    assert forward.moved == 100 + 4 * 5
    assert forward.kernels == 7
    assert forward.attention_flops == 10 * 4 * 5


def test_products_are_found_in_whatever_order_a_backward_computes_them() -> None:
    swapped = [Multiplication(4, 64, 32), Multiplication(64, 4, 32)]
    once = replace(part(4.0), backward=replace(work(4.0), multiplications=tuple(swapped)))
    grown = (Multiplication(64, 8, 32), Multiplication(8, 64, 32))
    twice = replace(part(8.0), backward=replace(work(8.0), multiplications=grown))
    model = replace(
        TRACED,
        once=replace(TRACED.once, blocks=(once,) * 2),
        twice=replace(TRACED.twice, blocks=(twice,) * 2),
    )
    backward = model.block_work(Layout(microbatch=5)).backward
    assert backward.multiplications == (Multiplication(20, 64, 32), Multiplication(64, 20, 32))


def test_the_mean_block_has_the_mean_of_the_flops() -> None:
    forward = TRACED.block_work(Layout(microbatch=3)).forward
    flops = sum(product.flops for product in forward.multiplications)
    assert flops == pytest.approx(2 * 12 * 32 * (64 + 192) / 2)
    assert (TRACED.block_parameters, TRACED.layers) == (150.0, 2)


def test_all_operations_are_those_of_the_model() -> None:
    layout = Layout(microbatch=1)
    passes, head = TRACED.block_work(layout), TRACED.head_work(layout)
    products = [*passes.forward.multiplications, *passes.backward.multiplications] * 2
    flops = sum(product.flops for product in (*products, *head.multiplications))
    attention = 2 * (passes.forward.attention_flops + passes.backward.attention_flops)
    assert TRACED.flops() == pytest.approx(flops + attention + head.attention_flops)
    assert TRACED.flops(causal=False) > TRACED.flops()


def test_each_storage_is_rounded_and_a_recomputed_block_keeps_its_input() -> None:
    layout = Layout(microbatch=3)
    assert TRACED.block_activations(layout, Recompute.NOTHING) == 16 * 12 + 10
    assert TRACED.block_activations(layout, Recompute.BLOCKS) == 2 * 8 * 12
    rounded = replace(TRACED, rounding=512)
    assert rounded.block_activations(layout, Recompute.NOTHING) == 1024
    assert rounded.block_activations(layout, Recompute.BLOCKS) == 512


def test_numbers_of_operations_that_depend_on_values_are_those_of_two_sequences() -> None:
    more = replace(part(8.0), kept=(100.0,))
    more = replace(more, forward=replace(more.forward, multiplications=()))
    twice = replace(TRACED.twice, blocks=(more, more))
    model = replace(TRACED, twice=twice)
    assert model.block_activations(Layout(microbatch=4), Recompute.NOTHING) == 200
    assert model.block_work(Layout(microbatch=4)).forward.multiplications == ()


def test_time_and_memory_of_a_step_take_it_as_they_take_sizes() -> None:
    layout = Layout(pp=2, dp=2, shard=2, microbatches=4)
    assert step_time(TRACED, layout, cluster(1, 8), STACK).total > 0
    assert block_activations(TRACED, layout, STACK) == TRACED.block_activations(
        layout, Recompute.NOTHING
    )
    memory = step_memory(TRACED, layout, STACK)
    assert memory.parameters == 2 * (150 + 60)  # the second stage: a block and the head


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_axes_that_divide_operations_are_refused(axis: str) -> None:
    layout = Layout(**{axis: 2})
    for ask in (TRACED.block_work, TRACED.head_work):
        with pytest.raises(UnsupportedError, match=f"{axis} is 2"):
            ask(layout)
    assert step_time(MODEL, layout, cluster(1, 8), STACK).total > 0
