from dataclasses import replace

import pytest

from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.step_memory import block_activations, microbatches_under_way, step_memory
from tests.planner.sizes import MODEL, STACK


@pytest.mark.parametrize(
    ("sharded", "gigabytes"),
    [
        (ShardedStates.NOTHING, 120.0),
        (ShardedStates.OPTIMIZER, 31.4),
        (ShardedStates.GRADIENTS, 16.6),
        (ShardedStates.PARAMETERS, 1.9),
    ],
)
def test_the_states_are_those_of_the_table_of_zero(
    sharded: ShardedStates, gigabytes: float
) -> None:
    """Rajbhandari et al., arXiv 1910.02054, figure 1: 7.5 B parameters on 64 ranks, K = 12."""
    width = 25
    model = replace(MODEL, layers=1, hidden=width, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1)
    parameters = model.num_parameters
    memory = step_memory(model, Layout(shard=64, sharded=sharded), STACK)
    states = memory.parameters + memory.gradients + memory.optimizer
    assert states / parameters * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_the_first_stage_of_1f1b_keeps_as_many_microbatches_as_there_are_stages() -> None:
    layout = Layout(pp=4, microbatches=16)
    assert [microbatches_under_way(layout, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert microbatches_under_way(replace(layout, microbatches=2), 0) == 2


def test_recomputed_blocks_keep_their_input_alone() -> None:
    layout = Layout(microbatch=3, recompute=Recompute.BLOCKS)
    assert block_activations(MODEL, layout, STACK) == 3 * 2048 * 1024 * 2


def test_gathered_parameters_are_those_of_two_blocks() -> None:
    memory = step_memory(MODEL, Layout(shard=8, sharded=ShardedStates.PARAMETERS), STACK)
    assert memory.gathered == 2 * 2 * MODEL.block_parameters
