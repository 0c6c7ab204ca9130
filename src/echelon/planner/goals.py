"""What is best: the most tokens in a second, the cheapest tokens, or the least memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

from echelon.checks import one_of
from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.layout_space import LayoutSpace
from echelon.planner.plan_search import SearchResult, search
from echelon.planner.survey import survey

Goal = Literal["tokens/s", "cost", "memory"]


def ranking(space: LayoutSpace, goal: Goal) -> SearchResult:
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
        return _cheapest(space)
    result = search(space)
    if goal == "memory" and result.best:
        return replace(result, best=survey(space).smallest)
    return result


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


def _cheapest(space: LayoutSpace) -> SearchResult:
    if space.cluster.price is None:
        raise ArgumentError(
            "goal is 'cost', and the cluster has no price of a device for an hour: give price, or "
            "write it into the cluster's file"
        )
    results = [search(space)]
    for part in [*parts_of(space.cluster)][1:]:
        try:
            results.append(search(space.on(part)))
        except ArgumentError:
            continue  # fewer hosts may divide nothing
    plans = [plan for result in results for plan in result.best]
    plans.sort(key=lambda plan: plan.seconds * plan.cluster.num_devices)
    return replace(
        results[0],
        best=tuple(plans[: space.limits.keep]),
        num_layouts=sum(result.num_layouts for result in results),
        num_fitting=sum(result.num_fitting for result in results),
    )
