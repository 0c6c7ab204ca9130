"""A layout as the options of an ``ec.Plan``, and what a script does besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.errors import UnsupportedError
from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates

if TYPE_CHECKING:
    from echelon.plans.plans import Plan

_WITHOUT_PLAN = ("tp", "cp", "ep")
_STRATEGY = {
    ShardedStates.OPTIMIZER: "SHARD_OPTIMIZER",
    ShardedStates.GRADIENTS: "SHARD_GRAD_OP",
    ShardedStates.PARAMETERS: "FULL_SHARD",
}


def layout_text(layout: Layout) -> str:
    """The axes of a layout, without those of length 1, and what is sharded and computed again.

    Example:
        >>> layout_text(Layout(pp=2, shard=4, sharded=ShardedStates.OPTIMIZER, microbatches=8))
        'pp=2,shard=4 (optimizer)'
    """
    axes = (*_WITHOUT_PLAN, "pp", "dp", "shard")
    text = ",".join(f"{axis}={getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1)
    if layout.sharded is not ShardedStates.NOTHING:
        text += f" ({layout.sharded.name.lower()})"
    if layout.offload is not HostStates.NOTHING:
        text += f" offload={layout.offload.value}"
    if layout.schedule is not None:
        text += f" {layout.schedule}"
    if layout.chunks > 1:
        text += f" chunks={layout.chunks}"
    if layout.recompute is not Recompute.NOTHING:
        text += " recompute" if layout.recompute is Recompute.BLOCKS else " recompute=attention"
    return text.strip() or "one device"


def missing_in_plan(layout: Layout) -> str:
    """Why no ``ec.Plan`` says what this layout does, and what to do; empty if one does.

    Example:
        >>> missing_in_plan(Layout(tp=8, dp=2))[:32]
        'an ec.Plan has no tp, and this l'
    """
    axes = [name for name in _WITHOUT_PLAN if getattr(layout, name) > 1]
    if axes:
        lengths = ", ".join(f"{name}={getattr(layout, name)}" for name in axes)
        return (
            f"an ec.Plan has no {' and no '.join(axes)}, and this layout has {lengths}: fix "
            f"{', '.join(f'{name}=1' for name in axes)}, or search with axes 'plan'"
        )
    if layout.recompute is Recompute.ATTENTION and layout.pp > 1:
        return "an ec.Plan computes a stage again or nothing of it, and this layout only attention"
    if layout.sharded is ShardedStates.OPTIMIZER and layout.shard > 1 and layout.dp > 1:
        return (
            f"an ec.Plan with dp={layout.dp} and shard={layout.shard} shards gradients or "
            "parameters, too, and this layout only the optimizer: fix dp=1"
        )
    return ""


def plan_options(layout: Layout, *, tied: bool = False, in_16_bits: bool = True) -> dict[str, Any]:
    """The fields of the ``ec.Plan`` that are not their defaults, with names instead of objects.

    Args:
        tied: whether the first and the last stage share a parameter, so that no stage may compute
            in another dtype than its own.
        in_16_bits: whether the plan was priced in 16 bits; in the dtype of the model otherwise.

    Raises:
        UnsupportedError: no ``ec.Plan`` says what the layout does; the sentence says which axis.

    Example:
        >>> plan_options(Layout(dp=4)), plan_options(Layout(pp=2, microbatches=8))
        ({'dp': 4}, {'pp': 2, 'microbatches': 8, 'schedule': '1f1b'})
    """
    reason = missing_in_plan(layout)
    if reason:
        raise UnsupportedError(reason)
    axes = {name: getattr(layout, name) for name in ("pp", "dp", "shard")}
    options: dict[str, Any] = {name: length for name, length in axes.items() if length > 1}
    if layout.pp > 1:
        options["microbatches"] = layout.microbatches
        options["schedule"] = layout.schedule_name
    if layout.chunks > 1:
        options["chunks"] = layout.chunks
    shards = layout.shard > 1
    if shards:
        options["strategy"] = _STRATEGY[layout.sharded]
    pipeline: dict[str, Any] = {}
    if layout.pp > 1 and layout.recompute is Recompute.BLOCKS:
        pipeline["recompute"] = True
    if layout.pp > 1 and shards and layout.sharded is ShardedStates.GRADIENTS:
        pipeline["reduce_every"] = "microbatch"
    if pipeline:
        options["pipeline"] = pipeline
    fsdp: dict[str, Any] = {}
    if shards and in_16_bits and not (tied and layout.pp > 1):
        fsdp["precision"] = {"compute": "bfloat16", "reduce": "bfloat16"}
    if shards and layout.offload is not HostStates.NOTHING:
        fsdp["offload"] = layout.offload.name
    if fsdp:
        options["fsdp"] = fsdp
    return options


def plan_text(layout: Layout, *, tied: bool = False, in_16_bits: bool = True) -> str:
    """The call of ``ec.Plan`` as a line of a script.

    Example:
        >>> plan_text(Layout(pp=2, microbatches=8, recompute=Recompute.BLOCKS))
        "ec.Plan(pp=2, microbatches=8, schedule='1f1b', pipeline={'recompute': True})"
    """
    texts = []
    for name, value in plan_options(layout, tied=tied, in_16_bits=in_16_bits).items():
        text = repr(value)
        if name == "strategy":
            text = f"ec.Strategy.{value}"
        elif name == "fsdp":
            dtypes = value.get("precision", {}).items()
            precision = ", ".join(f"{what}=torch.{dtype}" for what, dtype in dtypes)
            items = [f"'precision': ec.MixedPrecision({precision})"] if dtypes else []
            if "offload" in value:
                items.append(f"'offload': ec.Offload.{value['offload']}")
            text = f"{{{', '.join(items)}}}"
        texts.append(f"{name}={text}")
    return f"ec.Plan({', '.join(texts)})"


def plan_of(layout: Layout, *, tied: bool = False, in_16_bits: bool = True) -> Plan:
    """The ``ec.Plan`` itself, for ``ec.parallelize``.

    Raises:
        UnsupportedError: no ``ec.Plan`` says what the layout does; the sentence says which axis.
    """
    options = plan_options(layout, tied=tied, in_16_bits=in_16_bits)
    # The rest of the planner does without torch.
    import torch

    from echelon.fsdp.policy import MixedPrecision, Offload, Strategy
    from echelon.plans.plans import Plan

    if "strategy" in options:
        options["strategy"] = Strategy[options["strategy"]]
    if "fsdp" in options:
        dtypes = options["fsdp"].get("precision")
        if dtypes is not None:
            options["fsdp"]["precision"] = MixedPrecision(
                **{what: getattr(torch, dtype) for what, dtype in dtypes.items()}
            )
        if "offload" in options["fsdp"]:
            options["fsdp"]["offload"] = Offload[options["fsdp"]["offload"]]
    return Plan(**options)


def beside_plan(layout: Layout, *, tied: bool = False, in_16_bits: bool = True) -> list[str]:
    """What a script does itself, because no field of ``ec.Plan`` says it."""
    sentences = []
    if layout.pp == 1 and layout.microbatches > 1:
        sequences = "1 sequence" if layout.microbatch == 1 else f"{layout.microbatch} sequences"
        sentence = (
            f"It calls backward {layout.microbatches} times for each step, each time with "
            f"{sequences} for a rank"
        )
        if layout.sharded in (ShardedStates.NOTHING, ShardedStates.OPTIMIZER):
            sentence += ", all but the last time in model.no_sync()"
        sentences.append(f"{sentence}.")
    if layout.pp == 1 and layout.recompute is not Recompute.NOTHING:
        what = "each block" if layout.recompute is Recompute.BLOCKS else "attention"
        sentences.append(f"It calls {what} by torch.utils.checkpoint.checkpoint.")
    options = plan_options(layout, tied=tied, in_16_bits=in_16_bits)
    if in_16_bits and "precision" not in options.get("fsdp", {}):
        sentences.append("It computes under torch.autocast in bfloat16.")
    if not in_16_bits:
        sentences.append("It computes in float32, as was measured.")
    return sentences
