"""``ec.plan``: the plans of a cluster that fit, from the best on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from echelon.checks import instance, mapping, one_of
from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.described_model import Describable, described
from echelon.planner.goals import Goal
from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.ranked_plans import Plans
from echelon.planner.software_stack import MeasuredCluster, SoftwareStack, rates_of

Axes = Literal["plan", "all"]
Place = Cluster | MeasuredCluster | str | os.PathLike[str]
_NOT_IN_PLAN = ("tp", "cp", "ep")


def plan(
    model: Describable,
    cluster: Place,
    *,
    global_batch: int,
    seq: int | None = None,
    example: Any = None,
    fixed: Mapping[str, int | str] | None = None,
    max_memory: float | None = None,
    goal: Goal = "tokens/s",
    axes: Axes = "plan",
    stack: str = "fsdp",
    price: float | None = None,
    keep: int = 10,
) -> Plans:
    """Find the plans that fit a cluster, which need not be here, and the best of them.

    Args:
        model: a ``torch.nn.Module``, also on the meta device; a configuration of
            ``transformers``, the path of its JSON or its folder; or sizes: a ``Transformer`` or the
            path of a JSON with its fields.
        cluster: hosts x devices and a device, such as ``"8x8 H100"``, the path of a JSON file, or a
            ``Cluster``; or what ``echelon.planner.measured_cluster.measure_cluster`` returned,
            which has the constants of its own software.
        global_batch: sequences of a step.
        seq: tokens of a sequence; None: as many as the model says.
        example: of a module: a batch, or a tuple of arguments, whose shapes count.
        fixed: values of axes that are given, such as ``{"pp": 4}``, and the ``"schedule"``.
        max_memory: bytes of a device that may be allocated; None: its memory without a margin for
            what the allocator reserves and the context.
        goal: ``"tokens/s"``; ``"cost"`` of a token, which may leave hosts unused; or the least
            ``"memory"``.
        axes: ``"plan"`` looks at what an ``ec.Plan`` says; ``"all"`` at ``tp``, ``cp`` and ``ep``,
            too, which other software has. An axis of these in ``fixed`` means ``"all"`` with the
            others of them 1.
        stack: the software whose constants are used.
        price: of a device for an hour, in any currency; None: that of the cluster's file.
        keep: how many plans are kept.

    Returns:
        the plans from the best on. It is empty if none fits; ``refused`` says why.

    Raises:
        ArgumentError: the model, the device or the stack is not known, or no plan divides the
            devices and the batch.

    Example:
        >>> from echelon.planner.transformer import Transformer
        >>> model = Transformer(
        ...     layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=3072, gated=False,
        ...     vocab=50257, seq=1024, tied=True,
        ... )
        >>> plans = plan(model, "8 A100", global_batch=64)
        >>> plans.best.plan.shard
        8
    """
    limits = limits_of(global_batch, fixed, max_memory, axes, keep)
    place, software = place_of(cluster, price, stack)
    return Plans(LayoutSpace(described(model, seq, example), place, software, limits), goal)


def software_of(stack: str) -> SoftwareStack:
    """The software of a name, with its fitted constants."""
    instance("stack", stack, str)
    return SoftwareStack(name=stack, rates=rates_of(stack))


def limits_of(
    global_batch: int,
    fixed: Mapping[str, int | str] | None,
    max_memory: float | None,
    axes: Axes,
    keep: int,
) -> SearchLimits:
    """What a search may choose, by the arguments of ``plan``."""
    one_of("axes", axes, get_args(Axes))
    if fixed is not None:
        mapping("fixed", fixed)
    given = dict(fixed or {})
    if axes == "plan":
        given = {**dict.fromkeys(_NOT_IN_PLAN, 1), **given}
    return SearchLimits(
        global_batch=global_batch,
        fixed=given,
        max_memory=max_memory,
        keep=keep,
        plans_only=axes == "plan" and all(given[name] == 1 for name in _NOT_IN_PLAN),
    )


def place_of(
    cluster: Place, price: float | None = None, stack: str = "fsdp"
) -> tuple[Cluster, SoftwareStack]:
    """The cluster of a text, a path or an object, with another price if there is one, and the
    constants of the software there."""
    software = cluster.stack if isinstance(cluster, MeasuredCluster) else software_of(stack)
    if isinstance(cluster, MeasuredCluster):
        cluster = cluster.cluster
    if isinstance(cluster, str | os.PathLike):
        cluster = Cluster.parse(os.fspath(cluster))
    if not isinstance(cluster, Cluster):
        raise ArgumentError(
            f"cluster is {cluster!r:.80}; give hosts x devices and a device, such as '8x8 H100', "
            "the path of a JSON file, a Cluster, or what measure_cluster() returned"
        )
    return (cluster if price is None else replace(cluster, price=price)), software
