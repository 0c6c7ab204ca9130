"""``measure_cluster``: the machine at hand as a cluster, from half a minute of ranks at work."""

from __future__ import annotations

import os
from collections.abc import Sequence

from echelon.checks import integer, positive
from echelon.launch.run import run
from echelon.planner.cluster import Cluster
from echelon.planner.device import Device
from echelon.planner.rank_rates import RankRates, measure_rates, median_rates
from echelon.planner.software_stack import MeasuredCluster, Rates, SoftwareStack


def measure_cluster(ranks: int = 2, *, seconds: float = 30.0) -> MeasuredCluster:
    """Measure local processes that communicate over shared memory, all at the same time.

    Each uses its share of the processors.

    Args:
        seconds: about how long.

    Raises:
        ArgumentError: no rank, or no time.
    """
    integer("ranks", ranks, low=1)
    positive("seconds", seconds)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    rates = run(measure_rates, ranks, "processes", args=(seconds, threads))
    return as_cluster(rates, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def as_cluster(measured: Sequence[RankRates], memory: float) -> MeasuredCluster:
    """The cluster of one host on which a plan would take as long as it did there.

    Rates of the device are what was measured, so those of the stack are 1, except where work of the
    same kind reaches only a part.

    Args:
        measured: by each rank.
        memory: bytes of the host.
    """
    rates = median_rates(measured)
    device = Device(
        name="measured",
        memory=memory / len(measured),
        peak=rates.matmul,
        matmul=rates.matmul,
        attention=rates.attention,
        bandwidth=rates.bandwidth,
        link=rates.bus,
        bus=rates.bus,
        processors=1,
        source="echelon.planner.measured_cluster",
    )
    constants = Rates(
        matmul=1.0,
        waves=0.0,
        kernel_s=rates.kernel_s,
        launch_s=0.0,
        memory=rates.memory,
        attention=1.0,
        scores=1.0,
        score_passes=4.0,
        block_passes=10.0,
        ffn_passes=2.0,
        logit_bytes=8.0,
        bus=1.0,
        latency_s=rates.latency_s,
        network=1.0,
        network_latency_s=rates.latency_s,
        message=1.0,
        contention=rates.contention,
        optimizer=rates.optimizer / rates.bandwidth,
        drift=0.0,
        step_s=0.0,
    )
    cluster = Cluster(hosts=1, devices_per_host=len(measured), device=device, network=rates.bus)
    stack = SoftwareStack(
        name="measured",
        rates=constants,
        gradient_bytes=4,
        parameter_bytes=4,
    )
    return MeasuredCluster(cluster=cluster, stack=stack)
