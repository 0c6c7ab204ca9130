from dataclasses import replace

import pytest

import echelon as ec
from echelon.planner.layout import HostStates, Recompute, ShardedStates
from echelon.planner.layout_space import LayoutSpace, SearchLimits, host_bytes
from tests.planner.sizes import HOST, MODEL, STACK, cluster, layouts


def test_every_layout_uses_all_devices_and_the_whole_batch() -> None:
    every = layouts(MODEL, cluster(2, 4), SearchLimits(global_batch=16))
    assert len(every) == len(set(every)) > 50
    assert {(layout.num_ranks, layout.global_batch) for layout in every} == {(8, 16)}
    assert {layout.schedule_name for layout in every} == {
        "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "v-half", "v-min",
    }  # fmt: skip
    assert {layout.sharded for layout in every} == set(ShardedStates)
    assert {layout.recompute for layout in every} == {Recompute.NOTHING, Recompute.BLOCKS}


def test_a_family_has_the_layouts_that_it_counts() -> None:
    for family in LayoutSpace(MODEL, cluster(1, 4), STACK, SearchLimits(global_batch=8)).families():
        members = list(family.layouts())
        assert len(set(members)) == len(members) == len(list(family.choices()))
        same = {(m.tp, m.pp, m.cp, m.microbatch, m.microbatches, m.recompute) for m in members}
        assert len(same) == 1


@pytest.mark.parametrize(
    "fixed",
    [{"pp": 2, "tp": 2}, {"schedule": "zb-v"}, {"schedule": "1f1b", "pp": 4}, {"shard": 4}],
    ids=str,
)
def test_fixed_axes_are_kept_and_nothing_else_is_left_out(fixed: dict[str, int | str]) -> None:
    everything = layouts(MODEL, cluster(1, 8), SearchLimits(global_batch=16))
    kept = [
        layout
        for layout in everything
        if all(
            getattr(layout, "schedule_name" if name == "schedule" else name) == value
            for name, value in fixed.items()
        )
    ]
    limits = SearchLimits(global_batch=16, fixed=fixed)
    assert layouts(MODEL, cluster(1, 8), limits) == kept != []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 8, "fixed": {"zz": 2}}, "fixed has 'zz'"),
        ({"global_batch": 8, "fixed": {"pp": 0}}, "pp is 0"),
        ({"global_batch": 8, "fixed": {"schedule": "zz"}}, "schedule is 'zz'"),
    ],
)
def test_wrong_limits_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        SearchLimits(**options)  # type: ignore[arg-type]


def test_states_are_offloaded_where_the_memory_of_a_host_is_known_and_large_enough() -> None:
    limits = SearchLimits(global_batch=16)
    place = replace(cluster(1, 4), host=HOST)
    on_device = set(layouts(MODEL, cluster(1, 4), limits))
    every = set(layouts(MODEL, place, limits))
    offloaded = every - on_device
    assert on_device < every
    assert {(layout.tp, layout.cp, layout.ep) for layout in offloaded} == {(1, 1, 1)}
    assert {layout.offload for layout in offloaded} == {HostStates.OPTIMIZER, HostStates.ALL}
    small = replace(HOST, memory=4 * host_bytes(MODEL, 1, 4))  # for the largest shards it is not
    shards = {
        layout.shard
        for layout in layouts(MODEL, replace(place, host=small), limits)
        if layout.pp == 1 and layout.offload is not HostStates.NOTHING
    }
    assert shards == {4}
    fixed = SearchLimits(global_batch=16, fixed={"offload": "all"})
    assert {layout.offload for layout in layouts(MODEL, place, fixed)} == {HostStates.ALL}
    with pytest.raises(ec.ArgumentError, match="offload"):
        SearchLimits(global_batch=16, fixed={"offload": "most"})


def test_the_host_keeps_20_bytes_of_each_parameter() -> None:
    elements = 2 * MODEL.block_parameters + MODEL.embedding_parameters + MODEL.head_parameters
    assert host_bytes(MODEL, 2, 4) == 20 * elements / 4
