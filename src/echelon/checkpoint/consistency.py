"""Checks that a manifest does not contradict itself, so that its checkpoint can be read exactly.

Nothing here trusts a type, because anybody may have made the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast, final

import numpy as np
import numpy.typing as npt

from echelon.checkpoint.checksum import are_checksums, is_checksum
from echelon.checkpoint.records import (
    MAX_HEADER_NBYTES,
    MAX_PIECES,
    MAX_STEP,
    SavedFile,
    SavedTensor,
    is_tensor_name,
    rank_of,
)
from echelon.errors import ArgumentError
from echelon.values.untrusted_json import brief
from echelon.values.value_types import DTYPES, TOO_MANY, is_size, tensor_problem

Whole = npt.NDArray[np.int64]

_MIN_HEADER, _MAX_HEADER = 10, 8 + MAX_HEADER_NBYTES  # with the 8 bytes of the length
_MAX_THREADS = 2**20


@final
class Inconsistent(ArgumentError):
    """A manifest contradicts itself, or is none.

    Attributes:
        what: the contradiction.
        tensor: the tensor whose entry is wrong; None where it is no single one.
    """

    def __init__(self, what: str, tensor: str | None = None) -> None:
        super().__init__(what if tensor is None else f"{tensor!r}: {what}")
        self.what, self.tensor = what, tensor


def check_manifest(
    step: int,
    threads: Sequence[int],
    versions: Mapping[str, str],
    files: tuple[SavedFile, ...],
    tensors: Mapping[str, SavedTensor],
) -> None:
    """Refuse the fields of a manifest from which a checkpoint cannot be read exactly.

    Raises:
        Inconsistent: says what is wrong, and in which tensor.
    """
    if not is_size(step, MAX_STEP + 1):
        raise Inconsistent(f"the step is {brief(step)}, which is none")
    for count in threads:
        if not is_size(count, _MAX_THREADS) or count == 0:
            raise Inconsistent(f"a rank has {brief(count)} threads, which cannot be")
    for package, version in versions.items():
        if type(package) is not str or type(version) is not str:
            raise Inconsistent(f"the version of {brief(package)} is {brief(version)}")
    _check_files(files)
    _check_names(tensors)
    listed = tuple(tensors.values())
    for tensor in listed:
        problem = tensor_problem(tensor.dtype, tensor.shape)
        if problem is not None:
            raise Inconsistent(problem, tensor.name)
    pieces = _Pieces.of(listed)
    _check_ranges(pieces, listed)
    _check_places(pieces, listed, files)


def _check_files(files: tuple[SavedFile, ...]) -> None:
    last, last_rank = "", -1
    for file in files:
        rank = rank_of(file.name)
        if rank is None:
            raise Inconsistent(f"a file is named {brief(file.name)}, which is no name of a file")
        if rank <= last_rank:
            raise Inconsistent(f"file {file.name} comes after {last}; files come by rank, once")
        last, last_rank = file.name, rank
        if not (
            is_size(file.nbytes)
            and is_size(file.header_nbytes, _MAX_HEADER + 1)
            and _MIN_HEADER <= file.header_nbytes <= file.nbytes
        ):
            raise Inconsistent(
                f"file {file.name} has {brief(file.nbytes)} bytes, "
                f"of which {brief(file.header_nbytes)} are its header: that cannot be"
            )
        if not is_checksum(file.header_checksum):
            raise Inconsistent(f"file {file.name}: {_no_checksum(file.header_checksum)}")


def _no_checksum(value: object) -> str:
    return f"{brief(value)} is no checksum"


def _check_names(tensors: Mapping[str, SavedTensor]) -> None:
    seen: set[str] = set()
    for key, tensor in tensors.items():
        if key != tensor.name:
            raise Inconsistent(f"the tensor {brief(tensor.name)} is listed as {brief(key)}")
        for name in (tensor.name, *tensor.ties):
            if not is_tensor_name(name):
                raise Inconsistent(f"a tensor is named {brief(name)}, which cannot be a name")
            if name in seen:
                raise Inconsistent(f"two tensors are named {brief(name)}")
            seen.add(name)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """All pieces of a manifest, one array for each field, in order of tensors and then of starts.

    ``tensor`` has the index of each piece's tensor, ``itemsize`` the bytes of an element of it.
    """

    tensor: Whole
    itemsize: Whole
    file: Whole
    start: Whole
    numel: Whole
    offset: Whole

    @classmethod
    def of(cls, tensors: Sequence[SavedTensor]) -> _Pieces:
        """The pieces of ``tensors``, once their types are known to be right."""
        counts = [len(tensor.pieces) for tensor in tensors]
        if sum(counts) > MAX_PIECES:
            raise Inconsistent(f"there are {sum(counts)} pieces, more than {MAX_PIECES}")
        pieces = [piece for tensor in tensors for piece in tensor.pieces]
        owner = np.repeat(np.arange(len(tensors)), counts)
        columns = []
        for i in range(4):  # one field at a time, to save memory: there may be a million pieces
            column = cast(list[int], [piece[i] for piece in pieces])
            if (
                set(map(type, column)) - {int}
                or min(column, default=0) < 0
                or max(column, default=0) >= TOO_MANY
            ):
                wrong = next(i for i, value in enumerate(column) if not is_size(value))
                raise Inconsistent(
                    f"a piece has {brief(column[wrong])} in it", tensors[owner[wrong]].name
                )
            columns.append(np.array(column, np.int64))
        checksums = [piece.checksum for piece in pieces]
        if not are_checksums(checksums):
            wrong = next(i for i, value in enumerate(checksums) if not is_checksum(value))
            raise Inconsistent(_no_checksum(checksums[wrong]), tensors[owner[wrong]].name)
        sizes = np.array([DTYPES[tensor.dtype].itemsize for tensor in tensors], np.int64)
        return cls(owner, sizes[owner], *columns)


def _check_ranges(pieces: _Pieces, tensors: Sequence[SavedTensor]) -> None:
    """Refuse pieces that do not cover their tensors exactly once, in order."""
    stop = pieces.start + pieces.numel
    first = np.zeros(len(tensors), np.int64)
    expected, covered = _ends(pieces.tensor, stop, first)
    for index in np.flatnonzero((pieces.start != expected) | (pieces.numel == 0))[:1]:
        raise Inconsistent(
            f"its pieces cover [0:{expected[index]}], and the next is "
            f"[{pieces.start[index]}:{stop[index]}]",
            tensors[pieces.tensor[index]].name,
        )
    for tensor, numel in zip(tensors, covered.tolist(), strict=True):
        if numel != prod(tensor.shape):
            raise Inconsistent(
                f"its pieces cover {numel} of {prod(tensor.shape)} elements", tensor.name
            )


def _check_places(
    pieces: _Pieces, tensors: Sequence[SavedTensor], files: Sequence[SavedFile]
) -> None:
    """Refuse files with a byte that belongs to no piece, or to two. Ranges were checked before."""
    for index in np.flatnonzero(pieces.file >= len(files))[:1]:
        raise Inconsistent(
            f"a piece is in file {pieces.file[index]} of {len(files)}",
            tensors[pieces.tensor[index]].name,
        )
    headers = np.array([saved.header_nbytes for saved in files], np.int64)
    lengths = np.array([saved.nbytes for saved in files], np.int64)
    ends = pieces.offset + pieces.numel * pieces.itemsize
    outside = (pieces.offset < headers[pieces.file]) | (ends > lengths[pieces.file])
    for index in np.flatnonzero(outside)[:1]:
        saved = files[pieces.file[index]]
        raise Inconsistent(
            f"it would be bytes {pieces.offset[index]} to {ends[index]} of {saved.name}, "
            f"which has data in bytes {saved.header_nbytes} to {saved.nbytes}",
            tensors[pieces.tensor[index]].name,
        )
    order = np.lexsort((pieces.offset, pieces.file))
    file, begin = pieces.file[order], pieces.offset[order]
    expected, covered = _ends(file, ends[order], headers)
    for index in np.flatnonzero(begin != expected)[:1]:
        raise Inconsistent(
            f"it begins at byte {begin[index]} of {files[file[index]].name}, where byte "
            f"{expected[index]} is the first that no other has",
            tensors[pieces.tensor[order[index]]].name,
        )
    for saved, nbytes in zip(files, covered.tolist(), strict=True):
        if nbytes != saved.nbytes:
            raise Inconsistent(
                f"{saved.name} has {saved.nbytes} bytes, and its header and pieces have {nbytes}"
            )


def _ends(owner: Whole, stop: Whole, first: Whole) -> tuple[Whole, Whole]:
    """Where ranges must begin, and their owners end, to lie end to end from ``first`` on.

    ``owner`` and ``stop`` have an item for each range, in order, and ``first`` for each owner.
    """
    is_first = np.diff(owner, prepend=-1) > 0
    is_last = np.diff(owner, append=len(first)) > 0
    ends = first.copy()
    ends[owner[is_last]] = stop[is_last]
    return np.where(is_first, first[owner], np.roll(stop, 1)), ends
