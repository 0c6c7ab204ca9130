"""What is best: the most tokens in a second, the cheapest tokens, or the least memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, final, get_args

from echelon.checks import one_of
from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.layout_space import SearchLimits
from echelon.planner.operations import PlannedModel
from echelon.planner.plan_search import PlannedLayout, SearchResult, search
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.survey import survey

Goal = Literal["tokens/s", "cost", "memory"]


@final
@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The best plans for a goal.

    Attributes:
        best: from the best on, each with the hosts that it uses.
        limit: bytes that may be allocated on one device.
        num_layouts: that were looked at.
        num_fitting: of these within the memory.
    """

    best: tuple[tuple[Cluster, PlannedLayout], ...]
    limit: float
    num_layouts: int
    num_fitting: int


def ranking(
    model: PlannedModel,
    cluster: Cluster,
    stack: SoftwareStack,
    limits: SearchLimits,
    goal: Goal,
) -> Ranking:
    """Rank the plans of a cluster.

    Args:
        goal: ``"tokens/s"`` uses all devices; so does ``"memory"``, and takes the least on the rank
            that has most. ``"cost"`` may leave hosts unused, and takes the plan whose tokens cost
            least.

    Raises:
        ArgumentError: no plan divides the ranks and the batch, or a cost has no price.
    """
    one_of("goal", goal, get_args(Goal))
    if goal == "cost":
        return _cheapest(model, cluster, stack, limits)
    result = search(model, cluster, stack, limits)
    best = result.best
    if goal == "memory" and best:
        best = survey(model, cluster, stack, limits, best[0].limit).smallest
    return _ranking([(cluster, planned) for planned in best], [result])


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, and its parts with half as many hosts, a quarter, and so on.

    Example:
        >>> [part.hosts for part in parts_of(Cluster.parse("6x8 H100"))]
        [6, 3, 1]
    """
    hosts = cluster.hosts
    while hosts:
        yield replace(cluster, hosts=hosts)
        hosts //= 2


def _cheapest(
    model: PlannedModel, cluster: Cluster, stack: SoftwareStack, limits: SearchLimits
) -> Ranking:
    if cluster.price is None:
        raise ArgumentError(
            "goal is 'cost', and the cluster has no price of a device for an hour: give price, or "
            "write it into the cluster's file"
        )
    results, candidates = list[SearchResult](), list[tuple[float, Cluster, PlannedLayout]]()
    for part in parts_of(cluster):
        try:
            result = search(model, part, stack, limits)
        except ArgumentError:
            if part.hosts == cluster.hosts:
                raise
            continue  # fewer hosts may divide nothing
        results.append(result)
        for planned in result.best:
            candidates.append((planned.time.total * part.num_devices, part, planned))
    candidates.sort(key=lambda candidate: candidate[0])
    best = [(part, planned) for _, part, planned in candidates[: limits.keep]]
    return _ranking(best, results)


def _ranking(best: list[tuple[Cluster, PlannedLayout]], results: list[SearchResult]) -> Ranking:
    shown = [*(planned for _, planned in best), *(result.nearest for result in results)]
    return Ranking(
        best=tuple(best),
        limit=next(planned.limit for planned in shown if planned is not None),
        num_layouts=sum(result.num_layouts for result in results),
        num_fitting=sum(result.num_fitting for result in results),
    )
