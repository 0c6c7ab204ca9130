from dataclasses import replace

import pytest

from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.step_memory import (
    RankParts,
    RankStates,
    block_activations,
    rank_states,
    step_memory,
)
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


def test_recomputed_blocks_keep_their_input_alone() -> None:
    layout = Layout(microbatch=3, recompute=Recompute.BLOCKS)
    assert block_activations(MODEL, layout, STACK) == 3 * 2048 * 1024 * 2


def test_parameters_of_two_blocks_are_gathered_and_gradients_of_a_third_are_whole() -> None:
    memory = step_memory(MODEL, Layout(shard=8, sharded=ShardedStates.PARAMETERS), STACK)
    assert memory.gathered == (2 * 2 + 2) * MODEL.block_parameters


def test_the_host_keeps_states_of_shards() -> None:
    def states(sharded: ShardedStates, offload: HostStates) -> RankStates:
        layout = Layout(shard=4, sharded=sharded, offload=offload)
        return rank_states(MODEL, layout, STACK, RankParts.of(layout, [MODEL.layers], 0))

    size = MODEL.num_parameters
    kept = states(ShardedStates.PARAMETERS, HostStates.NOTHING)
    mirrored = states(ShardedStates.PARAMETERS, HostStates.OPTIMIZER)
    assert mirrored[:3] == (2 * size / 4, 0, 0)
    assert mirrored.gathered == kept.gathered
    assert states(ShardedStates.PARAMETERS, HostStates.ALL)[:3] == (0, 0, 0)
    whole = 2 * size + 2 * size / 4  # all weights in 16 bits, and the shard that is gathered
    assert states(ShardedStates.GRADIENTS, HostStates.OPTIMIZER)[:3] == (whole, 0, 0)
    assert states(ShardedStates.OPTIMIZER, HostStates.OPTIMIZER)[:3] == (whole, 2 * size, 0)
