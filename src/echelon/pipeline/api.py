"""``Pipeline``: a model in stages, some on each rank, that a schedule moves microbatches through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError, ModelMismatch
from echelon.layout import shard_range
from echelon.pipeline.check import check
from echelon.pipeline.execute import Batch, Executor
from echelon.pipeline.ir import Action, Item, Kind, Schedule
from echelon.pipeline.link import Link
from echelon.pipeline.microbatch import join_batches, split_batch
from echelon.pipeline.passes import lower
from echelon.pipeline.schedules import schedule as make_schedule
from echelon.pipeline.stage import Stage
from echelon.world.group import Group

__all__ = ["Pipeline"]

_NO_INPUT, _BAD_INPUT = -1, -2


@final
class Pipeline(nn.Module):
    """Trains a model whose stages lie on the ranks of ``group``.

    Law: gradients are those of the whole model on the whole batch.

    Args:
        stages: the parts of the model, in order, on every rank. Those of other ranks are dropped,
            and may be None.
        group: the ranks that share the stages.
        microbatches: into how many parts ``step`` cuts a batch.
        schedule: a name for ``ec.pipeline.schedule``, or a schedule.
        loss_fn: called with the output of the last stage and the target of a microbatch.
        loss_reduction: ``"mean"`` if ``loss_fn`` gives a mean over rows, so that each microbatch
            counts by its share of them, or ``"sum"``.
        schedule_options: for ``ec.pipeline.schedule``.

    Raises:
        ArgumentError: the stages do not fit the group or the schedule.
        ScheduleError: the schedule cannot run.
        ModelMismatch: the ranks were given different schedules.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | None],
        group: Group,
        *,
        microbatches: int,
        schedule: str | Schedule = "1f1b",
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        **schedule_options: Any,
    ) -> None:
        super().__init__()
        if isinstance(schedule, str):
            schedule = make_schedule(
                schedule, len(stages), microbatches, group.size, **schedule_options
            )
        elif schedule_options:
            raise ArgumentError(f"options {sorted(schedule_options)} belong to a schedule's name")
        _check_fit(schedule, stages, group, microbatches)
        check(schedule)
        self._group, self._schedule = group, schedule
        self._loss_fn, self._reduction = loss_fn, loss_reduction
        self._num_microbatches = microbatches
        mine = schedule.stages_of(group.rank)
        self.stages = nn.ModuleDict({str(index): stages[index] for index in mine})
        splits = any(
            part.kind is Kind.W for order in schedule.orders for item in order for part in item.parts
        )
        self._parts = {
            index: Stage(self.stages[str(index)], index, splits=splits) for index in mine
        }
        self._before, self._after = self._links()
        lowered = lower(schedule)
        _check_agreement(lowered, group)
        self._training = self._executor(lowered)
        self._evaluating: dict[int, Executor] = {}

    def _links(self) -> tuple[dict[int, Link], dict[int, Link]]:
        placement, rank = self._schedule.placement, self._group.rank
        before: dict[int, Link] = {}
        after: dict[int, Link] = {}
        for cut, (left, right) in enumerate(zip(placement, placement[1:], strict=False)):
            if left == right or rank not in (left, right):
                continue
            peer = right if rank == left else left
            link = Link(self._group, peer, cut, self._num_microbatches)
            if rank == left:
                after[cut] = link
            else:
                before[cut + 1] = link
        return before, after

    def _executor(self, lowered: Schedule) -> Executor:
        return Executor(
            lowered,
            self._group.rank,
            self._parts,
            self._before,
            self._after,
            self._reduce,
            self._group.ranks[self._group.rank],
        )

    def _reduce(self, stage: int) -> None:
        """Nobody else has this stage."""

    # Training --------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        weights: Sequence[float] | None = None,
        finalize: bool = True,
        loss_everywhere: bool = False,
        **kwargs: Any,
    ) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to ``.grad``. All ranks call it.

        Args:
            args: of the first stage; used on its rank.
            target: for the loss; used on the rank of the last stage.
            weights: what each microbatch counts, such as its number of tokens; rows if None. Used
                on the rank of the last stage.
            finalize: whether gradients are complete after this.
            loss_everywhere: whether every rank gets the loss.
            kwargs: for every stage of this rank.

        Returns:
            The loss of the batch on the rank of the last stage, or on all; None elsewhere.
        """
        if self._loss_fn is None:
            raise ArgumentError("step() needs a loss_fn: give one to Pipeline(...)")
        batch = self._cut(
            args, kwargs, target, weights, self._num_microbatches, training=True
        )
        self._training.run(batch, finalize=finalize)
        return self._loss_of(batch, loss_everywhere)

    def eval_step(
        self, *args: Any, target: Any = None, loss_everywhere: bool = False, **kwargs: Any
    ) -> Tensor | None:
        """The loss of one batch, of any size, without gradients. All ranks call it."""
        if self._loss_fn is None:
            raise ArgumentError("eval_step() needs a loss_fn: give one to Pipeline(...)")
        batch = self._evaluate(args, kwargs, target, self._loss_fn)
        return self._loss_of(batch, loss_everywhere)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model, without gradients, on the rank of the last stage; else None."""
        batch = self._evaluate(args, kwargs, None, None)
        if not batch.outputs:
            return None
        return join_batches([batch.outputs[i] for i in sorted(batch.outputs)])

    def _evaluate(self, args: Any, kwargs: Any, target: Any, loss_fn: Any) -> Batch:
        rows = self._rows(args, kwargs, target)
        count = min(self._num_microbatches, rows)
        batch = self._cut(args, kwargs, target, None, count, training=False)
        batch.loss_fn = loss_fn
        if count not in self._evaluating:
            self._evaluating[count] = self._executor(lower(_forward_of(self._schedule, count)))
        self._evaluating[count].run(batch)
        return batch

    def _loss_of(self, batch: Batch, everywhere: bool) -> Tensor | None:
        loss = None
        if batch.losses:
            loss = torch.stack([batch.losses[i] for i in sorted(batch.losses)]).sum()
        if not everywhere:
            return loss
        if loss is None:
            loss = torch.zeros((), device=self._group.device)
        return loss

    # The batch -------------------------------------------------------------------------------

    def _rows(self, args: Any, kwargs: Any, target: Any) -> int:
        """Rows of the batch, told by the rank of the first stage."""
        mine = split_batch(args, 1).rows[0] if self._schedule.placement[0] == self._group.rank else 0
        rows = torch.tensor([mine], device=self._group.device)
        self._group.broadcast(rows, self._schedule.placement[0], label="rows of the batch")
        return int(rows.item())

    def _cut(
        self,
        args: Any,
        kwargs: Mapping[str, Any],
        target: Any,
        weights: Sequence[float] | None,
        count: int,
        *,
        training: bool,
    ) -> Batch:
        rows = self._rows(args, kwargs, target)
        is_first = self._schedule.placement[0] == self._group.rank
        if weights is None and self._reduction == "mean":
            bounds = [shard_range(rows, count, i) for i in range(count)]
            weights = [(last - first) / rows for first, last in bounds]
        elif weights is None:
            weights = [1.0] * count
        else:
            total = sum(weights)
            weights = [one / total for one in weights]
        return Batch(
            inputs=split_batch(args, count).parts if is_first else (),
            kwargs=split_batch(kwargs, count, "kwargs").parts if kwargs else (),
            targets=() if target is None else split_batch(target, count, "target").parts,
            weights=weights,
            loss_fn=self._loss_fn,
            training=training,
            keep_outputs=False,
        )


def _check_fit(
    schedule: Schedule, stages: Sequence[nn.Module | None], group: Group, microbatches: int
) -> None:
    found = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    given = (group.size, len(stages), microbatches)
    if found != given:
        raise ArgumentError(
            f"the schedule is for {found[0]} ranks, {found[1]} stages and {found[2]} microbatches; "
            f"the pipeline has {given[0]}, {given[1]} and {given[2]}"
        )
    for index in schedule.stages_of(group.rank):
        if not isinstance(stages[index], nn.Module):
            raise ArgumentError(
                f"stage {index} is {stages[index]!r:.60} on rank {group.rank}, where it runs: give "
                "a torch.nn.Module"
            )


def _check_agreement(lowered: Schedule, group: Group) -> None:
    texts = group.all_gather_object(lowered.to_csv())
    if len(set(texts)) > 1:
        raise ModelMismatch(
            "the schedule", {rank: text[:80] for rank, text in enumerate(texts)}
        )


def _forward_of(schedule: Schedule, microbatches: int) -> Schedule:
    """Forwards only, on the placement of ``schedule``, in the order of waves."""
    orders: list[list[Item]] = [[] for _ in range(schedule.num_ranks)]
    wave = sorted(
        ((mb + stage, stage, mb) for stage in range(schedule.num_stages) for mb in range(microbatches))
    )
    for _, stage, mb in wave:
        orders[schedule.placement[stage]].append(Action(Kind.F, mb, stage))
    return Schedule(
        name="forward-only",
        num_stages=schedule.num_stages,
        num_microbatches=microbatches,
        placement=schedule.placement,
        orders=tuple(map(tuple, orders)),
    )
