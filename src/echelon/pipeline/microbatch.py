"""A batch in microbatches: input on the rank of the first stage, targets on that of the last.

Every tensor in the arguments is cut along dim 0, the first microbatches one row longer where it
does not come out even; what is no tensor goes to every microbatch. A mean over the whole batch is
the sum of the means of the microbatches, each weighted by its share of the rows.

Every rank hears what the others were given before any of them begins, so that a batch that cannot
be used is an error everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.comm.group import Group
from echelon.errors import ArgumentError
from echelon.modules.autograd import in_other_differentiation
from echelon.pipeline.schedules.ir import Schedule
from echelon.ranges import shard_range


@final
@dataclass(frozen=True, slots=True)
class Microbatches:
    """One batch in microbatches.

    Attributes:
        values: nested like the batch, by microbatch.
        rows: length of dim 0, by microbatch.
    """

    values: tuple[Any, ...]
    rows: tuple[int, ...]


def split_batch(batch: Any, num_parts: int, what: str = "input") -> Microbatches:
    """Cut every tensor of ``batch`` along dim 0 into ``num_parts`` views.

    Args:
        batch: tensors in any nesting, and whatever else, which every part gets.
        num_parts: of which none may be empty.
        what: the name of ``batch`` in errors.

    Raises:
        ArgumentError: there is no tensor, one is sparse or has no dim 0, their lengths differ, or
            there are fewer rows than parts.

    Example:
        >>> microbatches = split_batch({"x": torch.arange(10), "scale": 2.0}, 4)
        >>> microbatches.rows, microbatches.values[3]
        ((3, 3, 2, 2), {'x': tensor([8, 9]), 'scale': 2.0})
    """
    if num_parts < 1:
        raise ArgumentError(f"microbatches must be > 0, not {num_parts}")
    leaves, spec = pytree.tree_flatten(batch)
    total = _rows_of(leaves, num_parts, what)
    bounds = [shard_range(total, num_parts, i) for i in range(num_parts)]
    rows = tuple(last - first for first, last in bounds)
    columns = [
        leaf.split(rows) if isinstance(leaf, Tensor) else (leaf,) * num_parts for leaf in leaves
    ]
    values = [pytree.tree_unflatten(row, spec) for row in zip(*columns, strict=True)]
    return Microbatches(tuple(values), rows)


def _rows_of(leaves: Sequence[Any], num_parts: int, what: str) -> int:
    """Length of dim 0, which all tensors share."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ArgumentError(f"{what} has no tensor, so there is nothing to cut into microbatches")
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else tensor.layout
            raise ArgumentError(
                f"{what} has a tensor that is {kind}, which cannot be cut into microbatches: give "
                "a dense one, and make it sparse or nested inside of the first stage"
            )
        if not tensor.dim():
            raise ArgumentError(
                f"{what} tensor must have at least 1 dimension to be cut into microbatches; give "
                "a number as a Python number, which every microbatch gets"
            )
    lengths = sorted({tensor.shape[0] for tensor in tensors})
    if len(lengths) > 1:
        raise ArgumentError(
            f"tensors of {what} have dim 0 of lengths {lengths}: they must agree, since a "
            "microbatch takes the same rows of each"
        )
    if lengths[0] < num_parts:
        raise ArgumentError(
            f"{what} has {lengths[0]} rows for {num_parts} microbatches: give a larger batch or "
            "fewer microbatches"
        )
    return lengths[0]


def join_microbatches(values: Sequence[Any]) -> Any:
    """Undo ``split_batch``: tensors are joined along dim 0.

    Tensors without dims are stacked, one number for each microbatch; what is no tensor is that of
    the first microbatch.

    Example:
        >>> join_microbatches([{"y": torch.tensor([1])}, {"y": torch.tensor([2, 3])}])
        {'y': tensor([1, 2, 3])}
    """
    flat = [pytree.tree_flatten(value) for value in values]
    spec = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join(column) for column in columns], spec)


def _join(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(tuple(column)) if column[0].dim() else torch.stack(tuple(column))


Loss = Callable[[Any, Any], Tensor]
_UNUSABLE = -1  # in the place of the number of rows


@final
@dataclass(slots=True)
class Batch:
    """The input of one step on this rank, and its output.

    Attributes:
        inputs: by microbatch, the arguments of the first stage; empty where another rank has it.
        kwargs: by microbatch, keyword arguments of every stage of this rank.
        targets: by microbatch, what the loss compares with.
        weights: by microbatch, what its loss counts.
        loss_fn: None where there is no loss.
        training: whether backwards follow.
        losses: by microbatch, weighted; filled where the last stage is.
        outputs: by microbatch, what the last stage gave where there is no loss.
    """

    inputs: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    weights: Sequence[float]
    loss_fn: Loss | None
    training: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    def loss(self, microbatch: int, output: Any) -> Tensor:
        """What the loss function gives for the output of the last stage."""
        assert self.loss_fn is not None
        return self.loss_fn(output, self.targets[microbatch] if self.targets else None)


@final
class BatchSplitter:
    """Cuts what ranks were given into the batch of one step, and checks that it fits together.

    Args:
        loss_reduction: ``"mean"`` where a microbatch counts by its share of the rows; ``"sum"``.
    """

    def __init__(
        self, group: Group, schedule: Schedule, loss_reduction: Literal["mean", "sum"]
    ) -> None:
        self._group, self._reduction = group, loss_reduction
        self._first, self._last = schedule.placement[0], schedule.placement[-1]
        self._max_microbatches = schedule.num_microbatches

    def batch(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        weights: Sequence[float] | None,
        loss_fn: Loss | None,
        *,
        training: bool,
    ) -> Batch:
        """Cut what this rank was given. All ranks call it.

        Args:
            training: then there are as many microbatches as the schedule has; else at most.

        Raises:
            ArgumentError: on every rank, what a rank was given cannot be used; or on this one, it
                takes derivatives that cannot go from rank to rank.
        """
        _check_transforms((args, kwargs, target))  # inside of one, nothing can be sent either
        problem, rows, counts = None, 0, None
        try:
            rows = self._rows(args, kwargs, target, loss_fn is not None)
            self._check_rows(rows, training)
            _check_mode(training)
            counts = None if weights is None else _checked_weights(weights, self._max_microbatches)
        except ArgumentError as error:
            problem = str(error)
        local_rows = torch.tensor([_UNUSABLE if problem else rows], device=self._group.device)
        gathered = local_rows.new_empty(self._group.size)
        self._group.all_gather_single(gathered, local_rows, label="rows of the batch")
        rows_by_rank = gathered.tolist()
        if _UNUSABLE in rows_by_rank:
            self._refuse(problem)
        self._check_equal(rows_by_rank)
        total = rows_by_rank[self._first]
        count = self._max_microbatches if training else min(self._max_microbatches, total)
        # What other ranks were given is not looked at: it may be None, or of another batch.
        is_first, is_last = self._group.rank == self._first, self._group.rank == self._last
        targets = split_batch(target, count, "target").values if is_last and loss_fn else ()
        return Batch(
            inputs=split_batch(args, count).values if is_first else (),
            kwargs=self._kwargs(kwargs, count),
            targets=targets,
            weights=self._weights(counts, total, count),
            loss_fn=loss_fn,
            training=training,
        )

    def _rows(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, needs_target: bool
    ) -> int:
        """How many rows this rank was given; 0 if it was not given any and needs none."""
        rank = self._group.rank
        if rank == self._first and not args:
            raise ArgumentError(
                f"Pipeline: rank {rank} must provide input, because it has the first stage"
            )
        if rank == self._last and target is None and needs_target:
            raise ArgumentError(
                f"Pipeline: rank {rank} must provide a target, because it has the last stage"
            )
        lengths = {}
        if args and rank == self._first:
            lengths["input"] = split_batch(args, 1).rows[0]
        if target is not None and rank == self._last:
            lengths["target"] = split_batch(target, 1, "target").rows[0]
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(dict(kwargs))):
            lengths["kwargs"] = split_batch(dict(kwargs), 1, "kwargs").rows[0]
        if len(set(lengths.values())) > 1:
            raise ArgumentError(f"dim 0 differs on rank {rank}: {lengths}")
        return max(lengths.values(), default=0)

    def _check_rows(self, rows: int, training: bool) -> None:
        if rows == 0 and self._group.rank == self._first:
            raise ArgumentError("input has no rows")
        if training and 0 < rows < self._max_microbatches:
            raise ArgumentError(
                f"the batch has {rows} rows for {self._max_microbatches} microbatches: give "
                "a larger batch or fewer microbatches"
            )

    def _refuse(self, problem: str | None) -> None:
        problems = {
            rank: text
            for rank, text in enumerate(self._group.all_gather_object(problem))
            if text is not None
        }
        if problem is not None:
            raise ArgumentError(problem)
        raise ArgumentError(
            "; ".join(
                f"rank {rank} cannot use its batch: {text}" for rank, text in problems.items()
            )
        )

    def _check_equal(self, rows_by_rank: Sequence[int]) -> None:
        given = {rank: rows for rank, rows in enumerate(rows_by_rank) if rows}
        if len(set(given.values())) > 1:
            raise ArgumentError(f"ranks were given batches of different length, by rank: {given}")

    def _kwargs(self, kwargs: Mapping[str, Any], count: int) -> tuple[dict[str, Any], ...]:
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(dict(kwargs))):
            return split_batch(dict(kwargs), count, "kwargs").values
        return (dict(kwargs),) * count

    def _weights(self, given: Sequence[float] | None, rows: int, count: int) -> list[float]:
        if given is not None:
            total = sum(given)
            return [weight / total for weight in given]
        if self._reduction == "sum":
            return [1.0] * count
        bounds = [shard_range(rows, count, i) for i in range(count)]
        return [(last - first) / rows for first, last in bounds]


def _check_transforms(value: Any) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    if in_other_differentiation(leaves):
        raise ArgumentError(
            "a pipeline inside of torch.func (grad, jvp, vmap, ...) or of forward-mode "
            "differentiation: its stages run on several ranks, and such derivatives on one. Take "
            "them of the plain model, or train with pipe.step(x, target=y)"
        )


def _check_mode(training: bool) -> None:
    if training and torch.is_inference_mode_enabled():
        raise ArgumentError(
            "step() trains, and under torch.inference_mode() nothing has gradients: call it "
            "outside, or use eval_step()"
        )


def _checked_weights(given: Sequence[float], count: int) -> list[float]:
    try:
        numbers = [float(weight) for weight in given]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
        raise ArgumentError(
            f"weights are {given!r:.80}; give one number >= 0 for each of the {count} "
            "microbatches, not all of them 0"
        )
    return numbers
