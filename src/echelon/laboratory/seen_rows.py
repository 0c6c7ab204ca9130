"""Which rows of the batches each forward of a rank took, and from which random stream.

A row is found by its contents, so the code that trains need not say how it shares the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm.object_bytes import flat_bytes
from echelon.laboratory.batch_rows import Row, batch_tensors, num_rows
from echelon.laboratory.one_process import BatchPart, initial_stream
from echelon.laboratory.rank_training import microbatch_rows
from echelon.laboratory.value_recorder import RootCall, TrainingValues
from echelon.plans.plans import Plan


@final
@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One forward of a rank.

    Attributes:
        rows: that it took; None if they are of no batch.
        root: what was recorded of it; None in a pipeline.
    """

    rows: Sequence[Row] | None
    root: RootCall | None


@final
class SeenRows:
    """What all ranks did with the data.

    Args:
        ranks: what each rank recorded.
        batches: of all steps.
        plan: that shares the data; None for a function.

    Attributes:
        share_of: for each rank, which of the different parts of the data it has.
        forwards: of each rank, for each step.
    """

    def __init__(
        self, ranks: Sequence[TrainingValues], batches: Sequence[Any], plan: Plan | None
    ) -> None:
        self._sizes = [num_rows(batch) for batch in batches]
        finder = RowFinder(batches)
        self.forwards: list[list[list[Forward]]] = []
        for rank, values in enumerate(ranks):
            if plan is not None and plan.pp > 1:
                steps = [
                    [Forward(rows, None) for rows in microbatch_rows(plan, rank, step, size)]
                    for step, size in enumerate(self._sizes)
                ]
            else:
                steps = [
                    [Forward(finder.rows(step, root.inputs), root) for root in recorded.roots]
                    for step, recorded in enumerate(values.steps)
                ]
            self.forwards.append(steps)
        if plan is None:
            self.share_of = _shares(self.forwards)
        else:
            self.share_of = [rank % plan.data_size for rank in range(len(ranks))]

    def shares(self, step: int) -> list[list[Forward]]:
        """The forwards of a step by share: those of the first rank that has it."""
        num_shares = max(self.share_of) + 1
        return [self.forwards[self.share_of.index(share)][step] for share in range(num_shares)]

    def coverage(self, step: int) -> Coverage | None:
        """How often each row of the batch of a step was seen; None if that is not known."""
        shares = self.shares(step)
        if any(not share or any(f.rows is None for f in share) for share in shares):
            return None
        rows = {
            self.share_of.index(number): [row for forward in share for row in forward.rows or ()]
            for number, share in enumerate(shares)
        }
        return coverage(step, self._sizes[step], rows)

    def parts(self) -> list[list[BatchPart]]:
        """For each step, the rows and random streams of all forwards of all shares."""
        return [
            [
                BatchPart(tuple(forward.rows or ()), forward.root.stream)
                for share in self.shares(step)
                for forward in share
                if forward.root is not None
            ]
            for step in range(len(self._sizes))
        ]

    def alike_streams(self) -> AlikeStreams | None:
        """The first two forwards of different rows that drew the same numbers; None if none did."""
        for step in range(len(self._sizes)):
            seen: dict[bytes, int] = {}
            for share, root in self._random_roots(step):
                state = bytes(root.stream.numpy())
                if state in seen:
                    is_initial = torch.equal(root.stream, initial_stream())
                    ranks = (self.share_of.index(seen[state]), self.share_of.index(share))
                    return AlikeStreams(step, ranks, is_initial)
                seen[state] = share
        return None

    def _random_roots(self, step: int) -> Iterator[tuple[int, RootCall]]:
        for share, forwards in enumerate(self.shares(step)):
            for forward in forwards:
                if forward.root is not None and forward.root.is_random:
                    yield share, forward.root


def _shares(forwards: Sequence[Sequence[Sequence[Forward]]]) -> list[int]:
    """For each rank, its share: ranks with equal rows in all steps have one, as replicas do."""
    shares: dict[object, int] = {}
    share_of = []
    for rank, steps in enumerate(forwards):
        rows = [forward.rows for step in steps for forward in step]
        is_known = bool(rows) and all(rows)
        key: object = repr([[forward.rows for forward in step] for step in steps])
        share_of.append(shares.setdefault(key if is_known else rank, len(shares)))
    return share_of


@final
@dataclass(frozen=True, slots=True)
class AlikeStreams:
    """Two ranks that drew the same random numbers for different rows.

    Attributes:
        step: in which step they did so first.
        ranks: which two; the same twice if one rank did so in two forwards.
        is_initial: whether the stream is the one that every rank starts with, so nobody seeded it.
    """

    step: int
    ranks: tuple[int, int]
    is_initial: bool


@final
class RowFinder:
    """Finds which rows of the batches a model was called with, by their contents.

    Rows with equal contents are told apart by the order in which they are seen.

    Args:
        batches: of all steps.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = [batch_tensors(batch) for batch in batches]
        self._indices: dict[tuple[int, torch.dtype], dict[bytes, list[Row]]] = {}
        self._num_seen: dict[tuple[int, bytes], int] = defaultdict(int)

    def rows(self, step: int, inputs: Sequence[Tensor]) -> list[Row] | None:
        """The row of each row of a call in that step; None if some are of no batch."""
        for tensor in inputs:
            for column in range(len(self._batches[0])):
                rows = self._rows_of(step, tensor, column)
                if rows is not None:
                    return rows
        return None

    def _rows_of(self, step: int, tensor: Tensor, column: int) -> list[Row] | None:
        shape = self._batches[0][column].shape[1:]
        if not tensor.dim() or not tensor.shape[0] or tensor.dim() != len(shape) + 1:
            return None
        index = self._index(column, tensor.dtype)
        contents = [_content(row) for row in tensor]
        if any(content not in index for content in contents):
            return None
        rows = []
        for content in contents:
            candidates = index[content]
            candidates = [row for row in candidates if row[0] == step] or candidates
            number = self._num_seen[step, content]
            self._num_seen[step, content] += 1
            rows.append(candidates[number % len(candidates)])
        return rows

    def _index(self, column: int, dtype: torch.dtype) -> dict[bytes, list[Row]]:
        key = (column, dtype)
        if key not in self._indices:
            index: dict[bytes, list[Row]] = defaultdict(list)
            for batch, columns in enumerate(self._batches):
                for row, values in enumerate(columns[column].to(dtype)):
                    index[_content(values)].append((batch, row))
            self._indices[key] = dict(index)
        return self._indices[key]


def _content(row: Tensor) -> bytes:
    shape = ",".join(map(str, row.shape)).encode()
    return shape + bytes(flat_bytes(row).numpy())


@final
@dataclass(frozen=True, slots=True)
class Coverage:
    """How often the ranks saw each row of one batch.

    Attributes:
        never: rows that no rank saw.
        repeated: rows that were seen more than once, each with the ranks that saw it.
        foreign: rows of other batches that were seen in this step.
    """

    never: tuple[int, ...]
    repeated: Mapping[int, tuple[int, ...]]
    foreign: tuple[Row, ...]

    @property
    def is_partition(self) -> bool:
        """Whether each row was seen exactly once."""
        return not (self.never or self.repeated or self.foreign)


def coverage(step: int, size: int, rows_by_rank: Mapping[int, Iterable[Row]]) -> Coverage:
    """How often the ``size`` rows of the batch of a step were seen."""
    seen: dict[int, list[int]] = defaultdict(list)
    foreign = []
    for rank, rows in rows_by_rank.items():
        for batch, row in rows:
            if batch == step:
                seen[row].append(rank)
            else:
                foreign.append((batch, row))
    return Coverage(
        never=tuple(row for row in range(size) if row not in seen),
        repeated={row: tuple(ranks) for row, ranks in sorted(seen.items()) if len(ranks) > 1},
        foreign=tuple(foreign),
    )
