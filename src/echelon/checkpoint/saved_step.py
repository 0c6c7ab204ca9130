"""One committed step, open for reading: its manifest, its tensors, and how two steps differ."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from echelon.checkpoint.checksum import Checksum
from echelon.checkpoint.files import SavedBytes, check_entries, read_manifest
from echelon.checkpoint.format import Manifest
from echelon.checkpoint.records import MANIFEST, SavedPiece, SavedTensor, step_name
from echelon.checkpoint.reshard import reads
from echelon.checkpoint.sections import check_sections
from echelon.checkpoint.tensors import land, landing, memory_of
from echelon.errors import CheckpointCorrupt
from echelon.values.value_types import DTYPES

_CHUNK_NBYTES = 1 << 19  # read, and hashed while it is in the cache
_MOST_OPEN = 64  # files; a step of many ranks has more than a process may open

# A piece, by the name of its tensor and its place there.
PieceKey = tuple[str, int]


@final
class SavedStep:
    """A step, open for reading. A context manager.

    Args:
        folder: of the step.
        data: the bytes of its manifest, if they were read already.

    Raises:
        CheckpointTooNew: a newer version has written it.
        CheckpointCorrupt: it is no step, or files are missing, of another size, or too many.
    """

    def __init__(self, folder: Path, data: bytes | None = None) -> None:
        self.folder = folder
        if folder.is_symlink() or not folder.is_dir():
            raise CheckpointCorrupt("is no folder of a checkpoint", folder)
        if data is None:
            data = read_manifest(folder)
        path = str(folder / MANIFEST)
        self.manifest = Manifest.parse(data, path)
        check_sections(self.manifest, path)
        self.sections: Mapping[str, Any] = self.manifest.sections  # of the form that was checked
        if folder.name.startswith("step-") and folder.name != step_name(self.manifest.step):
            raise CheckpointCorrupt(f"holds step {self.manifest.step}", folder)
        check_entries(folder, {file.name: file.nbytes for file in self.manifest.files})
        self._open: dict[int, SavedBytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def verify(self, rank: int, size: int, done: Container[PieceKey] = ()) -> None:
        """Compare the bytes of the files that fall to ``rank`` of ``size`` with their checksums.

        Law: the files of all ranks are those of the step.

        Args:
            done: pieces that were compared already.

        Raises:
            CheckpointCorrupt: names file and tensor.
        """
        buffer = memoryview(bytearray(_CHUNK_NBYTES))
        for index in range(rank, len(self.manifest.files), size):
            saved = self.manifest.files[index]
            head = _hashed(self._file(index), 0, saved.header_nbytes, buffer)
            if head != saved.header_checksum:
                raise CheckpointCorrupt("the header differs from its checksum", self._path(index))
        for tensor, i, piece in self._pieces():
            if piece.file % size == rank and (tensor.name, i) not in done:
                nbytes = piece.numel * DTYPES[tensor.dtype].itemsize
                found = _hashed(self._file(piece.file), piece.offset, nbytes, buffer)
                if found != piece.checksum:
                    raise self._differs(tensor, piece)

    def read(
        self, tensor: SavedTensor, start: int, values: Tensor, check: tuple[int, int] | None = None
    ) -> list[PieceKey]:
        """Read the range of ``tensor`` from ``start`` on into ``values``.

        Args:
            check: a rank and the number of ranks: compare whole pieces that fall to that rank.

        Returns:
            the pieces that were compared.

        Raises:
            CheckpointCorrupt: a piece differs from its checksum.
        """
        dtype = DTYPES[tensor.dtype]
        landed = landing(values, dtype)
        compared = []
        for read in reads(tensor.pieces, start, values.numel()):
            piece = tensor.pieces[read.piece]
            target = memory_of(landed[read.at : read.at + read.numel])
            file, offset = self._file(piece.file), piece.offset + read.skip * dtype.itemsize
            falls_to_us = check is not None and piece.file % check[1] == check[0]
            if falls_to_us and read.numel == piece.numel:
                if _read_hashed(file, offset, target) != piece.checksum:
                    raise self._differs(tensor, piece)
                compared.append((tensor.name, read.piece))
            else:
                file.read_into(target, offset)
        land(values, landed)
        return compared

    def reach(self, tensor: SavedTensor, start: int, numel: int) -> None:
        """Open the files of a range, so that nothing but the disk can refuse it later."""
        if len(self.manifest.files) <= _MOST_OPEN:
            for read in reads(tensor.pieces, start, numel):
                self._file(tensor.pieces[read.piece].file)

    def _pieces(self) -> Iterator[tuple[SavedTensor, int, SavedPiece]]:
        for tensor in self.manifest.tensors.values():
            for i, piece in enumerate(tensor.pieces):
                yield tensor, i, piece

    def _file(self, index: int) -> SavedBytes:
        found = self._open.get(index)
        if found is None:
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            saved = self.manifest.files[index]
            found = self._open[index] = SavedBytes(self._path(index), saved.nbytes)
        return found

    def _path(self, index: int) -> Path:
        return self.folder / self.manifest.files[index].name

    def _differs(self, tensor: SavedTensor, piece: SavedPiece) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"elements {piece.start} to {piece.start + piece.numel} differ from their checksum",
            self._path(piece.file),
            tensor=tensor.name,
        )


def is_whole(folder: Path) -> bool:
    """Whether every byte of a step is as it was written.

    Raises:
        CheckpointTooNew: nobody here can say that, because a newer version has written it.
        OSError: it cannot be read.
    """
    try:
        with SavedStep(folder) as step:
            step.verify(0, 1)
    except CheckpointCorrupt:
        return False
    return True


def _hashed(file: SavedBytes, offset: int, nbytes: int, buffer: memoryview) -> str:
    """The checksum of a range of a file."""
    checksum = Checksum()
    for start in range(0, nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), nbytes - start)]
        file.read_into(chunk, offset + start)
        checksum.update(chunk)
    return checksum.hexdigest()


def _read_hashed(file: SavedBytes, offset: int, target: memoryview) -> str:
    """Read a range of a file; its checksum."""
    checksum = Checksum()
    for start in range(0, len(target), _CHUNK_NBYTES):
        chunk = target[start : start + _CHUNK_NBYTES]
        file.read_into(chunk, offset + start)
        checksum.update(chunk)
    return checksum.hexdigest()


class Difference(NamedTuple):
    """One name under which two steps differ.

    Attributes:
        name: of a tensor, or of what was saved beside tensors.
        what: how.
    """

    name: str
    what: str


def differences(one: SavedStep, other: SavedStep) -> Iterator[Difference]:
    """What differs, in the order of names. Cuts into files and pieces do not count."""
    mine, theirs = one.manifest.tensors, other.manifest.tensors
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            yield Difference(name, f"only in {(one if name in mine else other).folder}")
        else:
            what = _difference(one, mine[name], other, theirs[name])
            if what is not None:
                yield Difference(name, what)
    for name in sorted({*one.sections, *other.sections}):
        if name not in one.sections or name not in other.sections:
            yield Difference(name, f"only in {(one if name in one.sections else other).folder}")
        elif one.sections[name] != other.sections[name]:
            yield Difference(*_first_of(name, one.sections[name], other.sections[name]))


def _first_of(name: str, mine: Any, theirs: Any) -> tuple[str, str]:
    """Where two values that differ do so first, and how."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({*mine, *theirs}):
            if key not in mine or key not in theirs:
                return f"{name}.{key}", "is in one of them only"
            if mine[key] != theirs[key]:
                is_plain = mine.get("kind") == "value" and key == "value"  # what users call it
                inside = name if is_plain else f"{name}.{key}"
                return _first_of(inside, mine[key], theirs[key])
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        return _first_of(f"{name}[{at}]", mine[at], theirs[at])
    return name, f"{mine!r:.80} and {theirs!r:.80}"


def _difference(
    one: SavedStep, mine: SavedTensor, other: SavedStep, theirs: SavedTensor
) -> str | None:
    """How two tensors differ; None if they do not."""
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return f"{mine.dtype}{list(mine.shape)} and {theirs.dtype}{list(theirs.shape)}"
    if [(p.start, p.checksum) for p in mine.pieces] == [
        (p.start, p.checksum) for p in theirs.pieces
    ]:
        return None
    values, others = _read(one, mine), _read(other, theirs)
    differ = values.view(-1).view(torch.uint8) != others.view(-1).view(torch.uint8)
    if not bool(differ.any()):
        return None
    if not values.is_floating_point():
        return f"{int((values != others).sum())} of {values.numel()} elements differ"
    most = (values.double() - others.double()).abs().max().item()
    count = int(differ.view(values.numel(), -1).any(1).sum())
    return f"{count} of {values.numel()} elements differ, by at most {most:.3g}"


def _read(step: SavedStep, saved: SavedTensor) -> Tensor:
    values = torch.empty(saved.shape, dtype=DTYPES[saved.dtype], device="cpu")
    step.read(saved, 0, values)
    return values
