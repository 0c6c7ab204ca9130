from dataclasses import replace

import pytest

from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.step_time import LayoutTimer, step_time
from tests.planner.sizes import HOST, MODEL, STACK, cluster

LAYOUTS = [
    Layout(),
    Layout(dp=8),
    Layout(shard=8, sharded=ShardedStates.PARAMETERS, microbatches=2),
    Layout(tp=2, pp=2, dp=2, microbatches=8, recompute=Recompute.BLOCKS),
    Layout(cp=2, shard=4, sharded=ShardedStates.OPTIMIZER),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_term_is_negative_and_the_total_is_their_sum(layout: Layout) -> None:
    time = step_time(MODEL, layout, cluster(1, 8), STACK)
    assert min(time.terms().values()) >= 0
    assert time.total == pytest.approx(sum(time.terms().values()))


def test_the_bubble_of_equal_stages_is_that_of_1f1b() -> None:
    layout = Layout(pp=4, microbatches=8)
    time = step_time(MODEL, layout, cluster(1, 8), STACK)
    last = (time.matmul + time.attention + time.memory + time.message) / 8
    head = LayoutTimer(MODEL, cluster(1, 8), STACK).head(layout).total
    assert time.bubble == pytest.approx(3 * (last - head))


def test_chunks_divide_the_bubble_and_multiply_the_messages() -> None:
    model = replace(MODEL, layers=8)
    silent = replace(STACK, rates=replace(STACK.rates, message=0.0))
    few, many = (Layout(pp=4, chunks=v, microbatches=8) for v in (1, 2))
    bubbles = [step_time(model, layout, cluster(1, 8), silent).bubble for layout in (few, many)]
    assert bubbles[1] == pytest.approx(bubbles[0] / 2)
    messages = [step_time(model, layout, cluster(1, 8), STACK).message for layout in (few, many)]
    assert messages[1] == pytest.approx(2 * messages[0])
    assert messages[0] == pytest.approx(8 * 2 * (2 * 2048 * 1024) / 200e9)


def test_the_ranks_of_tp_send_their_parts_of_a_message_and_gather_it() -> None:
    together = Layout(tp=4, pp=2, microbatches=2, sequence_parallel=True)
    apart = replace(together, sequence_parallel=False)
    nbytes = 2 * 2048 * 1024
    sent = [step_time(MODEL, layout, cluster(1, 8), STACK).message for layout in (together, apart)]
    assert sent[0] == pytest.approx(4 * nbytes / 4 / 200e9)
    assert sent[1] == pytest.approx(4 * (nbytes / 4 / 200e9 + 3 / 4 * nbytes / 100e9))


def test_gradients_that_overlap_are_reduced_in_buckets_with_a_latency_each() -> None:
    rates = replace(STACK.rates, contention=0.5)
    place, layout = cluster(1, 8), Layout(dp=2)
    quick, slow = (
        step_time(MODEL, layout, place, replace(STACK, rates=replace(rates, latency_s=latency)))
        for latency in (0.0, 1e-9)
    )
    elements = MODEL.layers * MODEL.block_parameters + MODEL.embedding_parameters
    buckets = -(-2 * elements // 25_000_000)
    latency = 2 * 1e-9 * (1 + 0.2)
    contended = 0.5 * (buckets - 1)  # those that the backward hides
    assert slow.reduce - quick.reduce == pytest.approx(latency * (1 + contended), rel=1e-3)


def test_the_only_bucket_is_reduced_after_the_backward() -> None:
    place, layout = cluster(2, 8), Layout(tp=8, dp=2)
    overlaps, alone = (
        step_time(MODEL, layout, place, replace(STACK, overlaps_reduction=overlaps)).reduce
        for overlaps in (True, False)
    )
    assert overlaps == alone > 0


def test_the_optimizer_is_that_of_the_rank_with_the_slowest_stages() -> None:
    blocks = [5, 3]
    timer = LayoutTimer(replace(MODEL, layers=8), cluster(1, 8), STACK)
    layout = Layout(pp=2, microbatches=2)
    head = timer.head(layout).total / timer.block(layout, timer.rings(layout)).total
    assert head > 2  # blocks, so the rank that has the head is slower
    elements = 3 * MODEL.block_parameters + MODEL.embedding_parameters
    assert timer.step_time(layout, blocks).optimizer == pytest.approx(42 * elements / 1e12)


def test_a_slower_network_is_never_faster() -> None:
    layout = Layout(dp=16)
    slow, fast = (
        step_time(MODEL, layout, replace(cluster(2, 8), network=rate), STACK).total
        for rate in (1e9, 100e9)
    )
    assert slow > fast


def test_gradients_that_overlap_the_backward_cost_their_last_part() -> None:
    layout = Layout(dp=8)
    alone = step_time(MODEL, layout, cluster(1, 8), replace(STACK, overlaps_reduction=False))
    overlapped = step_time(MODEL, layout, cluster(1, 8), STACK)
    assert 0 < overlapped.reduce < alone.reduce


def test_parameters_and_activations_move_with_their_width() -> None:
    wide = replace(STACK, parameter_bytes=4)
    sharded = Layout(shard=8, sharded=ShardedStates.PARAMETERS)
    pipeline = Layout(pp=4, microbatches=8)
    narrow_gather, wide_gather = (
        step_time(MODEL, sharded, cluster(1, 8), stack).gather for stack in (STACK, wide)
    )
    assert wide_gather > narrow_gather
    narrow_hop, wide_hop = (
        step_time(MODEL, pipeline, cluster(1, 8), stack).message for stack in (STACK, wide)
    )
    assert wide_hop == pytest.approx(2 * narrow_hop)


def test_the_host_updates_its_shards_at_the_rate_of_its_memory() -> None:
    """34 bytes for AdamW and 10 for each added gradient, of a memory that 8 devices share; and a
    16-bit copy of the weights, of which nothing is hidden, where the device keeps them."""
    place = replace(cluster(1, 8), host=HOST)
    shard = (4 * MODEL.block_parameters + MODEL.embedding_parameters) / 8
    for offload, copied in ((HostStates.OPTIMIZER, 2), (HostStates.ALL, 0)):
        layout = Layout(shard=8, microbatches=3, sharded=ShardedStates.PARAMETERS, offload=offload)
        time = step_time(MODEL, layout, place, STACK)
        update = (34 + 3 * 10) * shard * 8 / 400e9
        assert time.optimizer == pytest.approx(update + copied * shard / 20e9)
        on_device = step_time(MODEL, replace(layout, offload=HostStates.NOTHING), place, STACK)
        assert time.gather > on_device.gather
        assert time.total > on_device.total
    layout = Layout(shard=8, sharded=ShardedStates.OPTIMIZER, offload=HostStates.OPTIMIZER)
    time = step_time(MODEL, layout, place, STACK)
    assert time.optimizer == pytest.approx(34 * shard * 8 / 400e9 + 4 * shard / 20e9)
