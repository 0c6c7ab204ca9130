"""What if there were more devices, and what if they fail: scaling, and time lost to failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from echelon.checks import integer, positive
from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.layout_space import LayoutSpace
from echelon.planner.operations import PlannedModel
from echelon.planner.plan_search import search
from echelon.planner.priced_plan import PricedPlan

# What a checkpoint has of a parameter: a master weight and two moments of AdamW in float32.
_SAVED_BYTES = 12
_HOUR = 3600.0


@final
@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The best plan of one size of a cluster.

    Attributes:
        cluster: of this size.
        plan: the best one; None where there is none.
        reason: why there is none; empty where there is one.
        tokens: of a step.
    """

    cluster: Cluster
    plan: PricedPlan | None
    reason: str
    tokens: int

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite without a plan."""
        return math.inf if self.plan is None else self.plan.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all devices; 0 without a plan."""
        return self.tokens / self.step_s

    def device_hours(self, tokens: float) -> float:
        """What a training on so many tokens takes: devices x seconds of a step x steps / 3600."""
        return self.cluster.num_devices * self.step_s * tokens / self.tokens / _HOUR


def scaled(space: LayoutSpace, sizes: Sequence[int]) -> list[ScalePoint]:
    """The best plan for each number of devices, all with the same batch.

    Args:
        space: of a cluster whose hosts are taken; its own number of them does not matter.
        sizes: numbers of devices: whole hosts, or a part of one.

    Raises:
        ArgumentError: a number is neither.
    """
    limits, points = replace(space.limits, keep=1), []
    tokens = limits.global_batch * space.model.seq
    for size in sizes:
        part = cluster_of(space.cluster, size)
        plan, reason = None, ""
        try:
            result = search(replace(space, cluster=part, limits=limits))
        except ArgumentError as error:
            reason = str(error)
        else:
            if result.best:
                plan = result.best[0]
            elif result.nearest is not None:
                reason = f"no plan fits: {result.nearest}"
        points.append(ScalePoint(cluster=part, plan=plan, reason=reason, tokens=tokens))
    return points


def cluster_of(cluster: Cluster, size: int) -> Cluster:
    """As many devices of the same hosts.

    Example:
        >>> cluster_of(Cluster.parse("2x8 H100"), 64).hosts
        8
    """
    integer("size", size, low=1)
    each = cluster.devices_per_host
    if size < each:
        network, host = cluster.network * size / each, cluster.host
        if host is not None:  # the other devices have their part of it
            memory, bandwidth = host.memory * size / each, host.bandwidth * size / each
            host = replace(host, memory=memory, bandwidth=bandwidth)
        return replace(cluster, hosts=1, devices_per_host=size, network=network, host=host)
    if size % each:
        raise ArgumentError(f"size is {size}: give a multiple of the {each} devices of a host")
    return replace(cluster, hosts=size // each)


@final
@dataclass(frozen=True, kw_only=True)
class FailureCost:
    """What failures and checkpoints cost a training.

    Attributes:
        save_s: seconds for which a checkpoint stops the training.
        interval_s: seconds of training between two checkpoints.
        lost: expected seconds besides training, for each second of it.
    """

    save_s: float
    interval_s: float
    lost: float


def checkpoint_bytes(model: PlannedModel) -> int:
    """Of the state of a training: 12 for each parameter, in mixed precision with AdamW."""
    return int(_SAVED_BYTES * model.num_parameters)


def failure_cost(
    model: PlannedModel, cluster: Cluster, *, mtbf_s: float, save_rate: float, restart_s: float
) -> FailureCost:
    """The best interval between checkpoints, and what is lost with it.

    Args:
        mtbf_s: seconds between two failures of one host, in the mean; ``hosts`` of them fail so
            many times as often.
        save_rate: bytes/s at which one host saves; all save at the same time.
        restart_s: seconds from a failure until the training goes on, with loading.
    """
    for name, value in (("mtbf_s", mtbf_s), ("save_rate", save_rate), ("restart_s", restart_s)):
        positive(name, value)
    mtbf = mtbf_s / cluster.hosts
    save_s = checkpoint_bytes(model) / (save_rate * cluster.hosts)
    interval = daly_interval(save_s, mtbf)
    return FailureCost(
        save_s=save_s,
        interval_s=interval,
        lost=lost_time(interval, save_s, mtbf, restart_s),
    )


def young_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose least, to first order: sqrt(2 x save x MTBF).

    Young, "A first order approximation to the optimum checkpoint interval", 1974.

    Example:
        >>> young_interval(save_s=50.0, mtbf_s=10_000.0)
        1000.0
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose least, of higher order.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006,
    equation 37: with r = sqrt(save / (2 MTBF)), Young's interval x (1 + r / 3 + r^2 / 9) - save;
    the MTBF where a save takes twice as long as that or more.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    part = math.sqrt(save_s / (2 * mtbf_s))
    return young_interval(save_s, mtbf_s) * (1 + part / 3 + part**2 / 9) - save_s


def lost_time(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Expected seconds besides training for each second of it.

    Daly 2006, equation 20, of failures that come at random with the same rate: a training of T
    seconds takes MTBF x exp(restart / MTBF) x (exp((interval + save) / MTBF) - 1) x T / interval.
    Infinite where that is more than a number can say.
    """
    try:
        stretched = mtbf_s * math.exp(restart_s / mtbf_s)
        stretched *= math.expm1((interval_s + save_s) / mtbf_s) / interval_s
    except OverflowError:
        return math.inf
    return stretched - 1
