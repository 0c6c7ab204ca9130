import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echelon as ec
from echelon.planner.cluster import Cluster
from echelon.planner.device import Device
from echelon.planner.layout import HostStates, Layout
from echelon.planner.layout_space import LayoutFamily, LayoutSpace, SearchLimits
from echelon.planner.memory_table import MemoryTable
from echelon.planner.model_file import read_transformer
from echelon.planner.plan_options import plan_of
from echelon.planner.plan_search import fastest, fitting_cluster, search
from echelon.planner.simulated_step import simulated_time
from echelon.planner.software_stack import SoftwareStack, rates_of
from echelon.planner.step_memory import step_memory
from echelon.planner.step_time import LayoutTimer, StepTime
from echelon.planner.transformer import Transformer
from tests.planner.sizes import DEVICE, HOST, MODEL, RATES, STACK, cluster, layouts

NOISY = SoftwareStack(
    name="noisy",
    rates=replace(RATES, contention=0.4, drift=0.02, launch_s=2e-5, step_s=1e-3, latency_s=2e-5),
)


def simplicity(layout: Layout) -> tuple[int, ...]:
    degrees = (layout.pp, layout.tp, layout.cp, layout.chunks, layout.shard)
    return (sum(degree > 1 for degree in degrees), *degrees)


def exhaustive(
    timer: LayoutTimer, every: list[LayoutFamily], limit: float
) -> list[tuple[Layout, StepTime]]:
    """All layouts that fit, from the fastest on, without a bound and without tables of memory."""
    fitting = [
        layout
        for family in every
        for layout in family.layouts()
        if step_memory(timer.model, layout, timer.stack).total <= limit
    ]
    timed = [
        (layout, simulated_time(timer, layout, timer.step_time(layout)))
        if not layout.has_closed_form
        else (layout, timer.step_time(layout))
        for layout in fitting
    ]
    return sorted(timed, key=lambda pair: (pair[1].total, simplicity(pair[0])))


def check_against_all(
    model: Transformer, place: Cluster, stack: SoftwareStack, limits: SearchLimits, limit: float
) -> None:
    timer = LayoutTimer(model, place, stack)
    every = list(LayoutSpace(model, place, STACK, limits).families())
    pruned = fastest(timer, MemoryTable(model, stack), every, limit, limits.keep)
    best = exhaustive(timer, every, limit)[: limits.keep]
    assert [time.total for _, time in pruned] == [time.total for _, time in best]
    assert [simplicity(layout) for layout, _ in pruned] == [
        simplicity(layout) for layout, _ in best
    ]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    hosts=st.sampled_from([1, 2, 3, 4]),
    devices=st.sampled_from([1, 2, 4, 8]),
    batch=st.sampled_from([8, 12, 16, 48]),
    layers=st.integers(1, 12),
    vocab=st.sampled_from([256, 32768, 400_000]),
    experts=st.sampled_from([1, 4]),
    gigabytes=st.sampled_from([0.5, 2.0, 8.0, 80.0]),
    keep=st.sampled_from([1, 3, 20]),
    noisy=st.booleans(),
    offloads=st.booleans(),
)
def test_the_bounds_lose_none_of_the_best_of_an_exhaustive_search(
    hosts: int, devices: int, batch: int, layers: int, vocab: int, experts: int,
    gigabytes: float, keep: int, noisy: bool, offloads: bool,
) -> None:  # fmt: skip
    model = replace(MODEL, layers=layers, vocab=vocab, experts=experts)
    limits = SearchLimits(global_batch=batch, keep=keep)
    stack = NOISY if noisy else STACK
    place = replace(cluster(hosts, devices), host=HOST if offloads else None)
    check_against_all(model, place, stack, limits, gigabytes * 1e9)


@pytest.mark.slow
def test_a_bound_is_never_above_the_time_of_a_layout() -> None:
    model = replace(MODEL, layers=7)
    for stack in (STACK, NOISY):
        timer = LayoutTimer(model, cluster(2, 8), stack)
        for family in LayoutSpace(
            model, timer.cluster, STACK, SearchLimits(global_batch=32)
        ).families():
            bound = timer.least_seconds(family.base)
            assert all(timer.step_time(layout).total >= bound for layout in family.layouts())


def test_the_bounds_leave_most_layouts_untimed() -> None:
    model, place = replace(MODEL, layers=16), cluster(8, 8)
    timer = LayoutTimer(model, place, STACK)
    timed = 0

    class Counting:
        least_seconds = staticmethod(timer.least_seconds)

        @staticmethod
        def step_time(layout: Layout) -> StepTime:
            nonlocal timed
            timed += 1
            return timer.step_time(layout)

    every = list(LayoutSpace(model, place, STACK, SearchLimits(global_batch=128)).families())
    fastest(Counting(), MemoryTable(model, STACK), every, math.inf, 10)  # type: ignore[arg-type]
    assert 10 <= timed < sum(len(list(family.layouts())) for family in every) / 5


@pytest.mark.slow
def test_all_layouts_are_counted_and_those_that_fit() -> None:
    place, limits = cluster(2, 4), SearchLimits(global_batch=16, max_memory=2e9, keep=5)
    every = list(LayoutSpace(MODEL, place, STACK, limits).families())
    best = exhaustive(LayoutTimer(MODEL, place, STACK), every, 2e9)
    result = search(LayoutSpace(MODEL, place, STACK, limits))
    assert result.num_layouts == sum(len(list(family.layouts())) for family in every)
    assert result.num_fitting == len(best)
    assert result.nearest is not None
    least = min(
        total
        for family in every
        for layout in family.layouts()
        if (total := step_memory(MODEL, layout, STACK).total) > 2e9
    )
    assert result.nearest.memory.total == least


def test_the_best_are_ordered_by_their_simulated_times() -> None:
    model = replace(MODEL, layers=9)
    timer = LayoutTimer(model, cluster(1, 8), STACK)
    limits = SearchLimits(global_batch=64, fixed={"pp": 4, "tp": 1}, keep=20)
    result = search(LayoutSpace(model, timer.cluster, STACK, limits))
    times = [planned.time.total for planned in result.best if planned.time]
    assert times == sorted(times)
    closed = [timer.step_time(planned.layout).total for planned in result.best]
    assert closed != sorted(closed)  # uneven stages wait otherwise than the closed form says


@pytest.mark.slow
def test_v_min_is_chosen_where_no_other_schedule_fits() -> None:
    """405 billion parameters on 512 devices, of which 16 divide the gradients of a stage."""
    model = read_transformer(Path("examples/models/llama-3-405b.json"))
    place = Cluster.parse("64x8 H100")
    stack = SoftwareStack(name="fsdp", rates=rates_of("fsdp"))
    fixed = {"tp": 1, "cp": 1, "ep": 1}
    limits = SearchLimits(global_batch=512, fixed=fixed, plans_only=True)
    result = search(LayoutSpace(model, place, stack, limits))
    assert result.num_fitting == 1
    assert result.best[0].layout.schedule_name == "v-min"
    assert plan_of(result.best[0].layout).schedule == "v-min"
    nearest = result.nearest
    assert nearest is not None
    assert nearest.layout.schedule_name != "v-min"


def test_states_go_to_the_host_where_a_device_has_no_room() -> None:
    """7.5 billion parameters on 2 devices, which need 56 GiB for the optimizer's states alone."""
    model = replace(MODEL, layers=36, hidden=4096, heads=32, kv_heads=32, ffn=16384)
    limits = SearchLimits(global_batch=2, plans_only=True, fixed={"tp": 1, "cp": 1, "ep": 1})
    place = replace(cluster(1, 2), device=replace(DEVICE, memory=40e9))
    assert search(LayoutSpace(model, place, STACK, limits)).num_fitting == 0
    result = search(LayoutSpace(model, replace(place, host=HOST), STACK, limits))
    assert result.num_fitting > 0
    assert all(planned.layout.offload is not HostStates.NOTHING for planned in result.best)


def test_hosts_of_unknown_memory_keep_nothing() -> None:
    limits = SearchLimits(global_batch=2, fixed={"offload": "all"})
    with pytest.raises(ec.ArgumentError, match="give host in the cluster's file"):
        search(LayoutSpace(MODEL, cluster(1, 2), STACK, limits))


def test_hosts_that_are_too_small_are_named_with_what_they_would_keep() -> None:
    place = replace(cluster(1, 2), host=replace(HOST, memory=1e8))
    limits = SearchLimits(global_batch=2, fixed={"offload": "optimizer"})
    states = 20 * MODEL.num_parameters / 2**30
    with pytest.raises(
        ec.ArgumentError, match=f"keep {states:.1f} GiB or more, and it has 0.1 GiB"
    ):
        search(LayoutSpace(MODEL, place, STACK, limits))


@pytest.mark.parametrize("fixed", [{"shard": 1}, {"tp": 2}, {"pp": 2, "offload": "all"}])
def test_axes_that_offload_nothing_say_what_does(fixed: dict[str, int | str]) -> None:
    limits = SearchLimits(global_batch=8, fixed={"offload": "optimizer", **fixed})
    with pytest.raises(ec.ArgumentError, match=r"no plan divides .* What is offloaded are shards"):
        search(LayoutSpace(MODEL, replace(cluster(1, 4), host=HOST), STACK, limits))


def test_fixed_axes_are_kept() -> None:
    limits = SearchLimits(global_batch=16, fixed={"pp": 2, "tp": 2})
    result = search(LayoutSpace(MODEL, cluster(1, 8), STACK, limits))
    assert {(planned.layout.pp, planned.layout.tp) for planned in result.best} == {(2, 2)}


def test_what_does_not_fit_is_refused_with_rank_and_bytes() -> None:
    result = search(
        LayoutSpace(MODEL, cluster(1, 1), STACK, SearchLimits(global_batch=1, max_memory=1e6))
    )
    assert result.best == ()
    assert result.nearest is not None
    assert "rank 0 would have" in str(result.nearest)


def test_a_batch_that_no_plan_divides_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="no plan divides 7 devices"):
        search(
            LayoutSpace(
                replace(MODEL, heads=8),
                cluster(1, 7),
                STACK,
                SearchLimits(global_batch=3, fixed={"pp": 1}),
            )
        )


def test_of_equally_fast_layouts_the_simplest_is_taken() -> None:
    result = search(LayoutSpace(MODEL, cluster(1, 1), STACK, SearchLimits(global_batch=1)))
    assert result.best[0].layout == Layout()


def test_a_batch_that_only_other_axes_divide_says_so() -> None:
    limits = SearchLimits(global_batch=3, fixed={"tp": 1, "cp": 1, "ep": 1}, plans_only=True)
    with pytest.raises(ec.ArgumentError, match="look at tp, cp and ep with axes='all'"):
        search(LayoutSpace(MODEL, cluster(1, 8), STACK, limits))


def test_a_device_smaller_than_its_context_has_no_memory() -> None:
    assert replace(Device.preset("H100"), memory=1e9).usable_bytes == 0


def test_the_hosts_that_would_do_are_the_fewest_of_which_a_plan_fits() -> None:
    """A host keeps states only without cp, also where cp has as many replicas on more hosts."""
    place = replace(cluster(1, 1), host=HOST)
    for limit in (1e8 * step for step in range(2, 80)):
        limits = SearchLimits(global_batch=2, fixed={"tp": 1, "pp": 1}, max_memory=limit)
        fits = [
            hosts
            for hosts in (2, 4, 8, 16)
            for layout in layouts(MODEL, replace(place, hosts=hosts), limits)
            if step_memory(MODEL, layout, STACK).total <= limit
        ]
        larger = fitting_cluster(LayoutSpace(MODEL, place, STACK, limits))
        assert (larger and larger.hosts) == min(fits, default=None)
