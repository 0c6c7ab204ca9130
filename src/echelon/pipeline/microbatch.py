"""Splits a batch into microbatches: inputs on the rank of the first stage, targets on the last.

Tensors with rows are split along dim 0; ``chunk_spec`` says which they are. The first microbatches
have one row more if the rows are not divisible. Every microbatch gets all other values. The mean
over the batch is the sum of the means of the microbatches, each weighted by its share of the rows.

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
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError
from echelon.modules.autograd import in_other_differentiation
from echelon.modules.nested import tensors
from echelon.pipeline.chunk_spec import (
    ChunkSpecs,
    NamedLeaf,
    NamedLeaves,
    batch_tensor,
    named_leaves,
    option_for,
)
from echelon.pipeline.schedules.ir import Schedule
from echelon.pipeline.step_specs import KindFacts, StepKinds, StepSpecs
from echelon.ranges import shard_range


@final
@dataclass(frozen=True, slots=True)
class Microbatches:
    """A batch in microbatches: by microbatch a value nested like the batch, and its length."""

    values: tuple[Any, ...]
    num_rows: tuple[int, ...]


def split_batch(
    batch: Any, num_parts: int, what: str = "input", *, spec: Any = None, total: int | None = None
) -> Microbatches:
    """Split the tensors of ``batch`` that have rows into ``num_parts`` views.

    Args:
        batch: what errors call ``what``.
        num_parts: into how many parts.
        spec: what the user said about it.
        total: the rows of the batch; if None, all tensors must have as many.

    Example:
        >>> microbatches = split_batch({"x": torch.arange(10), "scale": 2.0}, 4)
        >>> microbatches.num_rows, microbatches.values[3]
        ((3, 3, 2, 2), {'x': tensor([8, 9]), 'scale': 2.0})
    """
    if num_parts < 1:
        raise ArgumentError(f"microbatches must be > 0, not {num_parts}")
    tree = named_leaves(batch, spec, what)
    if total is None:
        total = _rows_of(tree.leaves, what)
        _check_lengths(tree.leaves, total)
    _check_enough(total, num_parts, what)
    return Microbatches(_split(tree, num_parts, total), _rows_of_parts(total, num_parts))


def _split(tree: NamedLeaves, num_parts: int, total: int) -> tuple[Any, ...]:
    """By microbatch a tree of which ``total`` rows are cut."""
    num_rows = _rows_of_parts(total, num_parts)
    columns = [
        _cut(leaf.value, num_rows) if leaf.is_split(total) else (leaf.value,) * num_parts
        for leaf in tree.leaves
    ]
    return tuple(
        pytree.tree_unflatten(parts, tree.structure) for parts in zip(*columns, strict=True)
    )


def _cut(value: Tensor, num_rows: tuple[int, ...]) -> Sequence[Tensor]:
    """Views of the rows of ``value``, which count the writes into them each for itself.

    A forward may write into its input. Views with the count of the whole batch would make
    autograd refuse the backward of one microbatch for the forward of another.
    """
    return [part if part.requires_grad else part.data for part in value.split(num_rows)]


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


def _rows_of(leaves: Sequence[NamedLeaf], what: str) -> int:
    """The rows of the batch by its first tensor."""
    first = batch_tensor(leaves)
    if first is not None:
        return int(first.value.shape[0])
    if any(isinstance(leaf.value, Tensor) for leaf in leaves):
        raise ArgumentError(
            f"{what} tensor must have at least 1 dimension to be cut into microbatches; give "
            "a number as a Python number, which every microbatch gets"
        )
    raise ArgumentError(f"{what} has no tensor, so there is nothing to cut into microbatches")


def _check_lengths(leaves: Sequence[NamedLeaf], total: int) -> None:
    """Refuse a tensor that should have as many rows as the batch, and has not."""
    for leaf in leaves:
        if (leaf.is_undecided or leaf.is_declared) and leaf.value.shape[0] != total:
            raise ArgumentError(
                f"{leaf.text} has dim 0 of length {leaf.value.shape[0]}, and the batch has {total} "
                "rows, which a microbatch takes the same of. If every microbatch needs it whole: "
                f"{option_for(leaf.name)}"
            )


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
_Facts = tuple[int, int, int, int, int]  # of ``_Given``
_NO_FACTS: _Facts = (0, 0, 0, 0, 0)
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
        specs: what is known of the values between stages before the step.
        losses: the weighted losses, on the rank of the last stage.
        has_graph: whether any of them depends on what requires a gradient; one of a microbatch
            without targets may not.
        outputs: the outputs of the last stage, if there is no loss.
    """

    inputs: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    weights: Sequence[float]
    loss_fn: Loss | None
    specs: StepSpecs
    losses: dict[int, Tensor] = field(default_factory=dict)
    has_graph: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Whether backwards follow."""
        return self.specs.training

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
        self,
        group: Group,
        schedule: Schedule,
        loss_reduction: Literal["mean", "sum"],
        specs: ChunkSpecs,
        kinds: StepKinds,
    ) -> None:
        self._group, self._reduction, self._specs = group, loss_reduction, specs
        self._kinds, self._device = kinds, device_of(group.device)
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
        problem, given, facts, counts = None, _Given(), _NO_FACTS, None
        try:
            given = self._given(args, kwargs, target, loss_fn, training=training)
            facts = given.facts()
            _check_mode(training)
            if weights is not None and self._group.rank == self._last:
                counts = _checked_weights(weights, self._num_parts(facts[0], training=training))
        except ArgumentError as error:
            problem = str(error)
        likeness = args if self._group.rank == self._first else (), dict(kwargs)
        kind = self._kinds.facts(likeness, training=training)
        total, kinds = self._agree(given, facts, kind, problem)
        num_parts = self._num_parts(total, training=training)

        def split(what: str, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
            tree = given.trees.get(what)
            return otherwise if tree is None else _split(tree, num_parts, total)

        return Batch(
            inputs=split("input", ()),
            kwargs=split("kwargs", ({},) * num_parts),
            targets=split("target", ()) if loss_fn else (),
            weights=self._weights(counts, total, num_parts),
            loss_fn=loss_fn,
            specs=self._kinds.begin(kinds, training=training),
        )

    def _num_parts(self, num_rows: int, *, training: bool) -> int:
        return self._max_microbatches if training else min(self._max_microbatches, num_rows)

    def _given(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        loss_fn: Loss | None,
        *,
        training: bool,
    ) -> _Given:
        """What this rank has of the batch, and what it needs of it."""
        rank = self._group.rank
        if rank == self._first and not args:
            raise ArgumentError(
                f"Pipeline: rank {rank} must provide input, because it has the first stage"
            )
        if rank == self._last and target is None and loss_fn is not None:
            raise ArgumentError(
                f"Pipeline: rank {rank} must provide a target, because it has the last stage"
            )
        # Arguments for stages of other ranks are ignored: they may be None, or of another batch.
        specs, trees = self._specs, {}
        if kwargs:
            trees["kwargs"] = named_leaves(dict(kwargs), specs.kwargs, "kwargs")
        if rank == self._first:
            trees["input"] = named_leaves(args, specs.args, "input")
        if rank == self._last and target is not None:
            trees["target"] = named_leaves(target, specs.target, "target")
        sure: list[NamedLeaf] = []
        undecided: list[NamedLeaf] = []
        has_other_dim = False
        for what, (leaves, _) in trees.items():
            first = None
            if what != "kwargs":
                num_rows = _rows_of(leaves, what)
                _check_enough(num_rows, self._max_microbatches if training else 1, "the batch")
                first = batch_tensor(leaves)
                assert first is not None, "it has rows"
                sure.append(first)
                has_other_dim = has_other_dim or (what == "input" and first.is_square)
            sure += [leaf for leaf in leaves if leaf.is_declared]
            undecided += [leaf for leaf in leaves if leaf.is_undecided and leaf is not first]
        return _Given(trees, sure, undecided, has_other_dim)

    def _agree(
        self, given: _Given, facts: _Facts, kind: KindFacts, problem: str | None
    ) -> tuple[int, list[KindFacts]]:
        """The number of rows of the first stage, and what the step is like on all ranks.

        Raises on all ranks if one has a problem.
        """
        facts = (_UNUSABLE, 0, 0, 0, 0) if problem else facts
        numbers = (*facts, *kind)
        local = self._device.numbers(numbers, torch.int64)
        gathered = local.new_empty(self._group.size * len(numbers))
        self._group.all_gather_single(gathered, local, label="rows of the batch")
        by_rank: list[list[int]] = gathered.view(self._group.size, -1).tolist()
        if any(rows == _UNUSABLE for rows, *_ in by_rank):
            self._refuse(problem)
        lengths = {rank: rows for rank, (rows, *_) in enumerate(by_rank) if rows}
        if len(set(lengths.values())) > 1:
            raise ArgumentError(f"ranks were given batches of different length, by rank: {lengths}")
        total = by_rank[self._first][0]
        has_other_dim = any(facts[1] for facts in by_rank) and self._max_microbatches > 1
        if any(
            shortest not in (0, total)
            or longest not in (0, total)
            or (self._max_microbatches > 1 and (is_square or (has_other_dim and longest)))
            for _, _, shortest, longest, is_square, _, _ in by_rank
        ):
            self._refuse(given.problem(total, self._max_microbatches, has_other_dim=has_other_dim))
        return total, [(digest, has_changed) for *_, digest, has_changed in by_rank]

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

    def _weights(
        self, counts: Sequence[float] | None, num_rows: int, num_parts: int
    ) -> list[float]:
        if self._reduction == "sum" and counts is None:
            return [1.0] * num_parts
        counts = _rows_of_parts(num_rows, num_parts) if counts is None else counts
        total = sum(counts)
        return [count / total for count in counts]


@final
@dataclass(frozen=True, slots=True)
class _Given:
    """What a rank has of a batch.

    Attributes:
        trees: the arguments that its stages take, by what errors call them.
        sure: those that have rows: the first of input and target, and what the user said.
        undecided: those whose length says whether they have.
        has_other_dim: whether another dim of the input is as long as the batch.
    """

    trees: Mapping[str, NamedLeaves] = field(default_factory=dict)
    sure: Sequence[NamedLeaf] = ()
    undecided: Sequence[NamedLeaf] = ()
    has_other_dim: bool = False

    def facts(self) -> _Facts:
        """Numbers that all ranks decide by; the rows are 0 if this rank knows none."""
        num_rows = self.sure[0].value.shape[0] if self.sure else 0
        _check_lengths(self.sure, num_rows)
        lengths = [leaf.value.shape[0] for leaf in self.undecided]
        return (
            num_rows,
            self.has_other_dim,
            min(lengths, default=0),
            max(lengths, default=0),
            any(leaf.is_square for leaf in self.undecided),
        )

    def problem(self, total: int, num_parts: int, *, has_other_dim: bool) -> str | None:
        """Why nobody can know what the tensors of this rank are; None if it is known."""
        try:
            _check_lengths(self.undecided, total)
        except ArgumentError as error:
            return str(error)
        for leaf in self.undecided if num_parts > 1 else ():
            if has_other_dim or leaf.is_square:
                whose = (
                    "of another of its dims" if leaf.is_square else "of another dim of the input"
                )
                option = option_for(leaf.name)
                return (
                    f"{leaf.text} has as many rows as the batch, and {total} is also the length "
                    f"{whose}, so that its shape does not say whether it belongs to rows of the "
                    f"batch. If every microbatch needs it whole: {option}. If it has a row for "
                    f"each of the batch: {option.replace('Replicate()', 'TensorChunkSpec(0)')}"
                )
        return None


def _check_transforms(value: Any) -> None:
    if in_other_differentiation(tensors(value)):
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
