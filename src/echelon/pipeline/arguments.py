"""The arguments of a pipeline: checks each of them, and that all ranks have the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, final, get_args

import torch
from torch import nn

from echelon import checks
from echelon.comm.agreement import compare
from echelon.comm.group import Group
from echelon.errors import ArgumentError, ModelMismatch
from echelon.modules.model_agreement import refuse_scale_grad_by_freq
from echelon.pipeline.data_parallel import ReduceEvery, Shardable, is_torch_wrapper
from echelon.pipeline.schedules.ir import Schedule


def check_arguments(
    stages: Sequence[nn.Module | None],
    group: Group,
    microbatches: int,
    schedule: str | Schedule,
    loss_fn: Callable[..., Any] | None,
    replicate: Group | None,
    schedule_options: Mapping[str, object],
) -> None:
    """Refuse arguments of wrong types or values."""
    checks.instance("group", group, Group)
    if replicate is not None and not isinstance(replicate, Group):
        raise ArgumentError(
            f"replicate is {replicate!r:.80}; give the Group of ranks that have the same stages, "
            "another axis of the mesh that group is an axis of"
        )
    if isinstance(stages, nn.Module) and not isinstance(stages, nn.Sequential | nn.ModuleList):
        raise ArgumentError(
            f"stages is a {type(stages).__name__}; give a list of modules, such as "
            "ec.pipeline.split(model, num_stages)"
        )
    if not isinstance(stages, Sequence | nn.Sequential | nn.ModuleList):
        raise ArgumentError(
            f"stages is {stages!r:.80}; give a list of modules, such as "
            "ec.pipeline.split(model, num_stages)"
        )
    if not isinstance(schedule, str | Schedule):
        raise ArgumentError(
            f"schedule is {schedule!r:.80}; give a name such as '1f1b', or a Schedule, such as "
            "ec.pipeline.Schedule.from_csv(text)"
        )
    if schedule_options and isinstance(schedule, Schedule):
        raise ArgumentError(f"options {sorted(schedule_options)} belong to a schedule's name")
    checks.integer("microbatches", microbatches, low=1)
    checks.function("loss_fn", loss_fn, "output and target", or_none=True)
    if microbatches > 1:
        for stage in stages:
            if isinstance(stage, nn.Module):
                refuse_scale_grad_by_freq(stage, "one microbatch")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """The options of ``Pipeline`` that can be checked without its stages.

    Attributes:
        loss_reduction: how losses of microbatches become that of the batch.
        recompute: whether stages keep their inputs only, and run again in backward.
        reduce_every: when gradients of stages in ``DDP`` or ``FSDP`` are reduced.
        window_nbytes: bytes of unsharded parameters that a rank may hold; None: all stages'.
        materialize: gives values to a module on meta; None: its ``reset_parameters()``.
        results_everywhere: whether losses and outputs go to all ranks where a call does not say.
    """

    loss_reduction: Literal["mean", "sum"] = "mean"
    recompute: bool = False
    reduce_every: ReduceEvery = "step"
    window_nbytes: int | None = None
    materialize: Callable[[nn.Module], None] | None = None
    results_everywhere: bool = False

    def __post_init__(self) -> None:
        checks.one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        checks.flag("recompute", self.recompute)
        checks.flag("results_everywhere", self.results_everywhere)
        checks.one_of("reduce_every", self.reduce_every, get_args(ReduceEvery))
        if self.window_nbytes is not None:
            checks.integer("window_nbytes", self.window_nbytes)
        checks.function("materialize", self.materialize, "a module", or_none=True)

    def facts(self) -> dict[str, object]:
        """The options that all ranks give alike."""
        names = ("loss_reduction", "reduce_every", "window_nbytes", "results_everywhere")
        return {name: getattr(self, name) for name in names}

    def check_effects(self, schedule: Schedule, loss_fn: Callable[..., Any] | None) -> None:
        """Refuse options that would do nothing."""
        if loss_fn is None and self.loss_reduction != "mean":
            raise ArgumentError(
                f"loss_reduction is {self.loss_reduction!r} without a loss_fn, so there is no loss "
                "of microbatches to reduce: give loss_fn, or leave loss_reduction out"
            )
        for name, is_given in (
            ("recompute", self.recompute),
            ("reduce_every", self.reduce_every != "step"),
        ):
            if is_given and not schedule.has_backward:
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}, and schedule {schedule.name!r} has no "
                    f"backward: leave {name} out, or use another schedule"
                )


def check_choices(
    stages: Sequence[nn.Module | None], options: Mapping[str, object], group: Group
) -> None:
    """Refuse ranks with different options or stages, on every rank. All ranks call it.

    A stage that several ranks have must have parameters of the same shapes on all of them. Names,
    dtypes and devices may differ: a rank may have cast, moved or compiled its own stages.
    """
    facts = {name: str(value) for name, value in options.items()}
    facts["stages"] = str(len(stages))
    params = {
        index: _shapes_of(stage) for index, stage in enumerate(stages) if _has_plain_shapes(stage)
    }
    digests = {
        index: _digest([shape for _, shape in names_and_shapes])
        for index, names_and_shapes in params.items()
    }
    facts_by_rank, digests_by_rank = zip(*group.all_gather_object((facts, digests)), strict=True)
    compare("option", facts_by_rank)
    for index in range(len(stages)):
        if len({digests[index] for digests in digests_by_rank if index in digests}) > 1:
            _refuse_stage(index, group.all_gather_object(params.get(index)))


def _digest(shapes: Sequence[str]) -> str:
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


def _has_plain_shapes(stage: nn.Module | None) -> bool:
    """Whether no wrapper changes the shapes of the parameters of a stage."""
    return isinstance(stage, nn.Module) and not any(
        isinstance(module, Shardable) or is_torch_wrapper(module) for module in stage.modules()
    )


def _shapes_of(stage: nn.Module | None) -> list[tuple[str, str]]:
    """The name and the shape of each parameter."""
    return [
        (name, "no shape" if nn.parameter.is_lazy(param) else str(list(param.shape)))
        for name, param in (() if stage is None else stage.named_parameters())
    ]


def _refuse_stage(index: int, params_by_rank: Sequence[list[tuple[str, str]] | None]) -> None:
    known = {rank: params for rank, params in enumerate(params_by_rank) if params is not None}
    columns = zip_longest(*known.values(), fillvalue=("", "not there"))
    for position, column in enumerate(columns):
        if len({shape for _, shape in column}) > 1:
            texts = {
                rank: " ".join(param).strip() for rank, param in zip(known, column, strict=True)
            }
            raise ModelMismatch(f"parameter {position} of stage {index}", texts)


def local_stages(
    schedule: Schedule, stages: Sequence[nn.Module | None], group: Group, microbatches: int
) -> dict[int, nn.Module]:
    """The stages of this rank, by number; refuses those that do not fit the schedule."""
    sizes = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    if sizes != (group.size, len(stages), microbatches):
        raise ArgumentError(
            f"the schedule is for {sizes[0]} ranks, {sizes[1]} stages and {sizes[2]} microbatches; "
            f"the pipeline has {group.size}, {len(stages)} and {microbatches}"
        )
    local: dict[int, nn.Module] = {}
    for index in schedule.stages_of(group.rank):
        stage = stages[index]
        if not isinstance(stage, nn.Module):
            raise ArgumentError(
                f"stage {index} is {stage!r:.60} on rank {group.rank}, where it runs: give a "
                "torch.nn.Module"
            )
        local[index] = stage
    return local


def check_devices(stages: Mapping[int, nn.Module], device: torch.device) -> None:
    """Refuse stages on another device than the group; sharded stages may be offloaded."""
    for index, stage in stages.items():
        if isinstance(stage, Shardable):
            continue
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            if nn.parameter.is_lazy(tensor):
                raise ArgumentError(
                    f"stage {index} has {name!r}, which has no shape yet: run the model once "
                    "before it is cut"
                )
            if not tensor.is_meta and tensor.device != device:
                raise ArgumentError(
                    f"stage {index} has {name!r} on {tensor.device}, and this rank computes on "
                    f"{device}: move the stage with .to(group.device)"
                )


def check_agreement(lowered: Schedule, group: Group) -> None:
    """Refuse ranks with different schedules. All ranks call it."""
    texts = group.all_gather_object(lowered.to_csv())
    if len(set(texts)) > 1:
        raise ModelMismatch("the schedule", {rank: text[:80] for rank, text in enumerate(texts)})
