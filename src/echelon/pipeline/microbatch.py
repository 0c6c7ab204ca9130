"""Splits a batch into microbatches: inputs on the rank of the first stage, targets on the last.

Every tensor in the arguments is split along dim 0; the first microbatches have one row more if the
rows are not divisible. Every microbatch gets all values that are not tensors. The mean over the
batch is the sum of the means of the microbatches, each weighted by its share of the rows.

The ranks exchange how many rows they have before any of them begins, so that a batch that one rank
cannot use is an error on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
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
    """A batch in microbatches: by microbatch a value nested like the batch, and its length."""

    values: tuple[Any, ...]
    num_rows: tuple[int, ...]


def split_batch(batch: Any, num_parts: int, what: str = "input") -> Microbatches:
    """Split every tensor of ``batch``, which errors call ``what``, into ``num_parts`` views.

    Example:
        >>> microbatches = split_batch({"x": torch.arange(10), "scale": 2.0}, 4)
        >>> microbatches.num_rows, microbatches.values[3]
        ((3, 3, 2, 2), {'x': tensor([8, 9]), 'scale': 2.0})
    """
    if num_parts < 1:
        raise ArgumentError(f"microbatches must be > 0, not {num_parts}")
    leaves, spec = pytree.tree_flatten(batch)
    total = _common_length(leaves, what)
    _check_enough(total, num_parts, what)
    num_rows = _rows_of_parts(total, num_parts)
    columns = [
        leaf.split(num_rows) if isinstance(leaf, Tensor) else (leaf,) * num_parts for leaf in leaves
    ]
    values = [pytree.tree_unflatten(parts, spec) for parts in zip(*columns, strict=True)]
    return Microbatches(tuple(values), num_rows)


@lru_cache(maxsize=256)
def _rows_of_parts(total: int, num_parts: int) -> tuple[int, ...]:
    bounds = [shard_range(total, num_parts, i) for i in range(num_parts)]
    return tuple(stop - start for start, stop in bounds)


def _check_enough(num_rows: int, num_parts: int, what: str) -> None:
    if num_rows < num_parts:
        raise ArgumentError(
            f"{what} has {num_rows} rows for {num_parts} microbatches: give a larger batch or "
            "fewer microbatches"
        )


def _common_length(leaves: Sequence[Any], what: str) -> int:
    """The length of dim 0, which all tensors must share."""
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
    return lengths[0]


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))


def join_microbatches(values: Sequence[Any]) -> Any:
    """Undo ``split_batch``: tensors are joined along dim 0.

    Tensors without dims are stacked, one number for each microbatch. Values that are not tensors
    are those of the first microbatch.

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
_UNUSABLE = -1  # a number of rows that tells other ranks that this one cannot use its batch


@final
@dataclass(slots=True)
class Batch:
    """The input of one step on this rank, and its output; lists and dicts are by microbatch.

    Attributes:
        inputs: the arguments of the first stage; empty if another rank has it.
        kwargs: keyword arguments of every stage of this rank.
        targets: the targets of the loss.
        weights: what the loss of each microbatch counts.
        loss_fn: None if there is no loss.
        training: whether backwards follow.
        losses: the weighted losses, on the rank of the last stage.
        outputs: the outputs of the last stage, if there is no loss.
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
        """The loss of an output of the last stage."""
        assert self.loss_fn is not None
        return self.loss_fn(output, self.targets[microbatch])


@final
class BatchSplitter:
    """Splits the arguments of a step, and checks with all ranks that they fit together.

    With ``"mean"`` a microbatch counts by its share of the rows, with ``"sum"`` each counts 1.
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
        """Split the arguments of this rank. All ranks call it.

        In training there are as many microbatches as in the schedule, otherwise at most so many.
        """
        _check_transforms((args, kwargs, target))  # before any communication, which they break too
        problem, num_rows, counts = None, 0, None
        try:
            num_rows = self._local_num_rows(args, kwargs, target, loss_fn, training=training)
            _check_mode(training)
            counts = None if weights is None else _checked_weights(weights, self._max_microbatches)
        except ArgumentError as error:
            problem = str(error)
        total = self._agree(num_rows, problem)
        num_parts = self._max_microbatches if training else min(self._max_microbatches, total)
        # Arguments for stages of other ranks are ignored: they may be None, or of another batch.
        is_first, is_last = self._group.rank == self._first, self._group.rank == self._last
        targets = split_batch(target, num_parts, "target").values if is_last and loss_fn else ()
        return Batch(
            inputs=split_batch(args, num_parts).values if is_first else (),
            kwargs=self._split_kwargs(kwargs, num_parts),
            targets=targets,
            weights=self._weights(counts, total, num_parts),
            loss_fn=loss_fn,
            training=training,
        )

    def _local_num_rows(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_fn: Loss | None,
        *,
        training: bool,
    ) -> int:
        """The length of the arguments of this rank; 0 if it has none and needs none."""
        rank = self._group.rank
        if rank == self._first and not args:
            raise ArgumentError(
                f"Pipeline: rank {rank} must provide input, because it has the first stage"
            )
        if rank == self._last and target is None and loss_fn is not None:
            raise ArgumentError(
                f"Pipeline: rank {rank} must provide a target, because it has the last stage"
            )
        trees: dict[str, Any] = {}
        if rank == self._first:
            trees["input"] = args
        if rank == self._last and target is not None:
            trees["target"] = target
        if _has_tensors(dict(kwargs)):
            trees["kwargs"] = dict(kwargs)
        lengths = {
            what: _common_length(pytree.tree_leaves(tree), what) for what, tree in trees.items()
        }
        if len(set(lengths.values())) > 1:
            raise ArgumentError(f"dim 0 differs on rank {rank}: {lengths}")
        for num_rows in lengths.values():
            _check_enough(num_rows, self._max_microbatches if training else 1, "the batch")
        return max(lengths.values(), default=0)

    def _agree(self, num_rows: int, problem: str | None) -> int:
        """The number of rows of the first stage; raises on all ranks if one has a problem."""
        local = torch.tensor([_UNUSABLE if problem else num_rows], device=self._group.device)
        gathered = local.new_empty(self._group.size)
        self._group.all_gather_single(gathered, local, label="rows of the batch")
        by_rank: list[int] = gathered.tolist()
        if _UNUSABLE in by_rank:
            self._refuse(problem)
        lengths = {rank: length for rank, length in enumerate(by_rank) if length}
        if len(set(lengths.values())) > 1:
            raise ArgumentError(f"ranks were given batches of different length, by rank: {lengths}")
        return by_rank[self._first]

    def _refuse(self, problem: str | None) -> None:
        problems = self._group.all_gather_object(problem)
        if problem is not None:
            raise ArgumentError(problem)
        raise ArgumentError(
            "; ".join(
                f"rank {rank} cannot use its batch: {text}"
                for rank, text in enumerate(problems)
                if text is not None
            )
        )

    def _split_kwargs(self, kwargs: Mapping[str, Any], num_parts: int) -> tuple[Any, ...]:
        if _has_tensors(dict(kwargs)):
            return split_batch(dict(kwargs), num_parts, "kwargs").values
        return (dict(kwargs),) * num_parts

    def _weights(
        self, counts: Sequence[float] | None, num_rows: int, num_parts: int
    ) -> list[float]:
        if self._reduction == "sum" and counts is None:
            return [1.0] * num_parts
        counts = _rows_of_parts(num_rows, num_parts) if counts is None else counts
        total = sum(counts)
        return [count / total for count in counts]


def _check_transforms(value: Any) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
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


def _checked_weights(weights: Sequence[float], num_parts: int) -> list[float]:
    try:
        numbers = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != num_parts or min(numbers) < 0 or not 0 < sum(numbers) < math.inf:
        raise ArgumentError(
            f"weights are {weights!r:.80}; give one number >= 0 for each of the {num_parts} "
            "microbatches, not all of them 0"
        )
    return numbers
