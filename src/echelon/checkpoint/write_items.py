"""Which ranges one rank writes, and how those of all ranks make up the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import final

from torch import Tensor

from echelon.checkpoint.header import Entry, key_of
from echelon.checkpoint.records import SavedPiece, SavedTensor
from echelon.checkpoint.reshard import share
from echelon.checkpoint.sections import Json, Section, per_rank_name
from echelon.checkpoint.tensors import bytes_of, is_plain
from echelon.errors import StateError
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.value_types import COMPLEX128, dtype_name


@final
@dataclass(slots=True, kw_only=True, eq=False)
class WriteItem:
    """A range of a tensor that this rank writes.

    Attributes:
        name: in the checkpoint.
        ties: further names.
        shape: of the whole tensor.
        start: of the range in the flattened tensor.
        values: its elements.
        offset: of its first byte in the file; known when it is written.
        checksum: of its bytes; known when they are written.
    """

    name: str
    ties: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    values: Tensor
    offset: int = 0
    checksum: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.values.numel() * self.values.dtype.itemsize

    @property
    def entry(self) -> Entry:
        """What the header of the file says of the range."""
        numel = self.values.numel()
        shape = self.shape if numel == prod(self.shape) else (numel,)
        key = key_of(self.name, self.shape, self.start, numel)
        dtype = dtype_name(self.values.dtype)
        if dtype == COMPLEX128:  # safetensors does not have it
            dtype, shape = "F64", (*shape, 2)
        return Entry(key, dtype, shape, self.nbytes)

    def bytes(self) -> memoryview:
        """The bytes of the range."""
        return bytes_of(self.values)


def plan_writes(
    sections: Mapping[str, Section], digests: Sequence[Mapping[str, str]], rank: int
) -> list[WriteItem]:
    """What ``rank`` writes of the tensors of its sections, in the order of its file.

    ``digests`` are those of tensors whose values may differ between ranks, by rank and name.
    """
    shards = [shard for section in sections.values() for shard in section.tensors]
    by_kind: dict[Replication, list[TensorShard]] = {kind: [] for kind in Replication}
    for shard in shards:
        by_kind[shard.replication].append(shard)
    items = [
        *_differing(by_kind[Replication.PER_RANK], digests, rank),
        *(_item(shard) for shard in by_kind[Replication.PRIMARY] if shard.copy == 0),
        *_shares(by_kind[Replication.IDENTICAL]),
    ]
    # Wide elements come first, so each range begins at a multiple of the width of its elements.
    return sorted(items, key=lambda item: -item.values.dtype.itemsize)


def _item(shard: TensorShard) -> WriteItem:
    return WriteItem(
        name=shard.name,
        ties=shard.names[1:],
        shape=shard.shape,
        start=shard.start,
        values=shard.values.detach(),
    )


def _differing(
    shards: Sequence[TensorShard], digests: Sequence[Mapping[str, str]], rank: int
) -> Iterator[WriteItem]:
    """The first rank writes its values; others write theirs, under another name, if they differ."""
    for shard in shards:
        first = next(r for r, known in enumerate(digests) if shard.name in known)
        if rank == first:
            yield _item(shard)
        elif digests[rank][shard.name] != digests[first][shard.name]:
            yield _item(replace(shard, names=(per_rank_name(rank, shard.name),)))


def _shares(shards: Sequence[TensorShard]) -> Iterator[WriteItem]:
    """Each rank writes a share of a range of which several ranks have identical copies."""
    for shard in shards:
        itemsize = shard.values.dtype.itemsize
        nbytes = shard.numel * itemsize
        start, stop = share(shard.name, nbytes, itemsize, shard.copy, shard.num_copies)
        if start == stop and (0 not in shard.shape or shard.copy > 0):
            continue  # other ranks write all of it; an empty tensor is written by the first copy
        if stop - start == shard.numel:
            yield _item(shard)
        else:
            flat = shard.values.detach()
            if not is_plain(flat):
                flat = flat.resolve_conj().resolve_neg().contiguous()
            values = flat.view(-1)[start:stop]
            yield _item(replace(shard, start=shard.start + start, values=values))


def report_items(items: Sequence[WriteItem]) -> Json:
    """What a rank has written: dtype, shape, ties and pieces, by the names of tensors."""
    report: dict[str, Json] = {}
    for item in items:
        dtype = dtype_name(item.values.dtype)
        entry = report.setdefault(item.name, [dtype, item.shape, item.ties, []])
        if item.nbytes:
            entry[3].append([item.start, item.values.numel(), item.offset, item.checksum])
    return report


def merge_reports(reports: Sequence[Json], path: object) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint, from what the ranks have written.

    Raises:
        StateError: ranks hold different tensors under one name, or nobody holds some elements.
    """
    tensors: dict[str, tuple[int, Json, list[SavedPiece]]] = {}
    for rank, report in enumerate(reports):
        for name, (dtype, shape, ties, pieces) in report.items():
            first, entry, known = tensors.setdefault(name, (rank, (dtype, shape, ties), []))
            if (dtype, shape) != tuple(entry[:2]):
                raise StateError(
                    f"{name!r} is {dtype}{shape} on rank {rank} and {entry[0]}{entry[1]} on rank "
                    f"{first}: build the same model on all ranks, and step the same optimizer"
                )
            known += [
                SavedPiece(file=rank, start=start, numel=numel, offset=offset, checksum=checksum)
                for start, numel, offset, checksum in pieces
            ]
    return {
        name: SavedTensor(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            pieces=_covering(name, pieces, prod(shape)),
            ties=tuple(ties),
        )
        for name, (_, (dtype, shape, ties), pieces) in tensors.items()
    }


def _covering(name: str, pieces: Sequence[SavedPiece], numel: int) -> tuple[SavedPiece, ...]:
    """The pieces in order, which must cover the tensor exactly once."""
    ordered = tuple(sorted(pieces, key=lambda piece: piece.start))
    end = 0
    for piece in ordered:
        if piece.start != end:
            what = "several ranks hold" if piece.start < end else "no rank holds"
            raise StateError(f"{what} elements {min(piece.start, end)} and on of {name!r}")
        end += piece.numel
    if end != numel:
        raise StateError(f"no rank holds elements {end} to {numel} of {name!r}")
    return ordered
