"""Which bytes one rank writes, and how those of all ranks make up the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import final

from torch import Tensor

from echelon.checkpoint.format import SavedPiece, SavedTensor
from echelon.checkpoint.header import key_of
from echelon.checkpoint.part import Json, Part, own_name
from echelon.checkpoint.reshard import share
from echelon.checkpoint.tensors import bytes_of, is_plain
from echelon.errors import StateError
from echelon.state.tensor_shard import Replication, TensorShard
from echelon.values.value_types import dtype_name


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Write:
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
    def entry(self) -> tuple[str, str, tuple[int, ...], int]:
        """Of the header."""
        numel = self.values.numel()
        shape = self.shape if numel == prod(self.shape) else (numel,)
        key = key_of(self.name, self.shape, self.start, numel)
        return key, dtype_name(self.values.dtype), shape, self.nbytes

    def bytes(self) -> memoryview:
        """What is to be written."""
        return bytes_of(self.values)


def writes_of(
    parts: Mapping[str, Part], digests: Sequence[Mapping[str, str]], rank: int
) -> list[Write]:
    """What ``rank`` writes of the tensors of its parts, in the order of its file.

    Args:
        digests: of tensors that nobody keeps alike, by rank and name.
    """
    tensors = [one for part in parts.values() for one in part.tensors]
    found = [*_own(tensors, digests, rank), *_firsts(tensors), *_shares(tensors)]
    # Wide elements first: every range then begins at a multiple of the width of its elements.
    return sorted(found, key=lambda write: -write.values.dtype.itemsize)


def _write(held: TensorShard, name: str | None = None) -> Write:
    return Write(
        name=held.name if name is None else name,
        ties=held.names[1:] if name is None else (),
        shape=held.shape,
        start=held.start,
        values=held.values.detach(),
    )


def _own(
    tensors: Sequence[TensorShard], digests: Sequence[Mapping[str, str]], rank: int
) -> list[Write]:
    """The first rank writes its values; others write theirs under another name if they differ."""
    found = []
    for held in tensors:
        if held.replication is Replication.PER_RANK:
            first = next(r for r, own in enumerate(digests) if held.name in own)
            if rank == first:
                found.append(_write(held))
            elif digests[rank][held.name] != digests[first][held.name]:
                found.append(_write(held, own_name(rank, held.name)))
    return found


def _firsts(tensors: Sequence[TensorShard]) -> list[Write]:
    return [
        _write(held)
        for held in tensors
        if held.replication is Replication.PRIMARY and held.copy == 0
    ]


def _shares(tensors: Sequence[TensorShard]) -> list[Write]:
    """Of copies that are alike, each rank writes a share."""
    found = []
    for held in tensors:
        if held.replication is Replication.IDENTICAL:
            itemsize = held.values.dtype.itemsize
            nbytes = held.numel * itemsize
            start, stop = share(held.name, nbytes, itemsize, held.copy, held.num_copies)
            if start < stop or (not prod(held.shape) and held.copy == 0):
                found.append(_part(held, start, stop))
    return found


def _part(held: TensorShard, start: int, stop: int) -> Write:
    write = _write(held)
    if stop - start < held.numel:
        flat = held.values.detach()
        if not is_plain(flat):
            flat = flat.resolve_conj().resolve_neg().contiguous()
        write.values, write.start = flat.view(-1)[start:stop], held.start + start
    return write


def report_of(writes: Sequence[Write]) -> Json:
    """What rank 0 must know of them."""
    found: dict[str, Json] = {}
    for write in writes:
        dtype = dtype_name(write.values.dtype)
        entry = found.setdefault(write.name, [dtype, write.shape, write.ties, []])
        if write.nbytes:
            numel = write.values.numel()
            entry[3].append([write.start, numel, write.offset, write.checksum])
    return found


def assembled(reports: Sequence[Json], path: Path) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint, from what the ranks have written.

    Raises:
        StateError: ranks hold different tensors under one name, or nobody holds some elements.
    """
    found: dict[str, tuple[int, Json, list[SavedPiece]]] = {}
    for rank, report in enumerate(reports):
        for name, (dtype, shape, ties, pieces) in report.items():
            first, entry, known = found.setdefault(name, (rank, (dtype, shape, ties), []))
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
        for name, (_, (dtype, shape, ties), pieces) in found.items()
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
