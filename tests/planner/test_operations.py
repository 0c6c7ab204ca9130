from dataclasses import replace

import pytest

from echelon.planner.layout import Layout
from echelon.planner.operations import block_work, head_work
from echelon.planner.software_stack import Attention
from tests.planner.sizes import MODEL, RATES, STACK


def flops(work: object) -> float:
    return sum(product.flops for product in work.multiplications)  # type: ignore[attr-defined]


def test_the_operations_of_all_blocks_and_the_head_are_those_of_the_model() -> None:
    stack = replace(STACK, attention=Attention.UNFUSED)
    passes = block_work(MODEL, Layout(), stack)
    block = sum(flops(work) + work.attention_flops for work in passes)
    head = flops(head_work(MODEL, Layout(), RATES))
    assert MODEL.layers * block + head == pytest.approx(MODEL.flops(causal=False))


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_ranks_that_share_a_block_share_its_operations(axis: str) -> None:
    alone, shared = (block_work(MODEL, Layout(**{axis: n}), STACK) for n in (1, 2))
    for one, half in zip(alone, shared, strict=True):
        assert flops(half) == pytest.approx(flops(one) / 2)
        assert half.attention_flops == pytest.approx(one.attention_flops / 2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_bytes_that_a_block_moves_are_those_of_a_hand_calculation(
    sequence_parallel: bool, gated: bool
) -> None:
    stack = replace(STACK, attention=Attention.FUSED)
    layout = Layout(tp=4, sequence_parallel=sequence_parallel)
    work = block_work(replace(MODEL, gated=gated), layout, stack)
    residual = 10 * 2 * 2048 * 1024 / (4 if sequence_parallel else 1)  # 10 passes, 2 bytes
    inner = 2 * 2 * 2048 * 4096 / 4 * (1.5 if gated else 1)
    assert work.forward.moved == pytest.approx(residual + inner)
    assert work.backward.moved == pytest.approx(1.6 * (residual + inner))


def test_experts_compute_for_the_tokens_that_are_sent_to_them() -> None:
    mixture = replace(MODEL, experts=8, active_experts=2)
    dense, sparse = (block_work(model, Layout(), STACK).forward for model in (MODEL, mixture))
    expert = 2 * 2 * MODEL.seq * MODEL.hidden * MODEL.ffn
    assert flops(sparse) == pytest.approx(flops(dense) + expert)
    divided = block_work(mixture, Layout(shard=4, ep=4), STACK).forward
    assert flops(divided) == pytest.approx(flops(sparse))
