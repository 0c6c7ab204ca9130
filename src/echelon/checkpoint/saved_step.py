"""One committed step, open for reading: its manifest, its tensors, and how two steps differ."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor

from echelon.checkpoint.checksum import Checksum
from echelon.checkpoint.format import Manifest
from echelon.checkpoint.place import storage_of
from echelon.checkpoint.records import MANIFEST, SavedPiece, SavedTensor, step_name
from echelon.checkpoint.reshard import reads
from echelon.checkpoint.sections import check_sections
from echelon.checkpoint.step_storage import OpenFile, Place
from echelon.checkpoint.tensors import land, landing, memory_of
from echelon.errors import CheckpointCorrupt
from echelon.values.value_types import DTYPES

_CHUNK_NBYTES = 1 << 19  # read, and hashed while it is in the cache

# A piece, by the name of its tensor and its index there.
PieceKey = tuple[str, int]


class Share(NamedTuple):
    """The files of a step that one rank of several verifies: each ``size``-th from ``rank`` on."""

    rank: int
    size: int


ALL_FILES = Share(0, 1)


@final
class SavedStep:
    """A step, open for reading; a context manager.

    Args:
        folder: of the step.
        data: the bytes of its manifest, if they were read already.

    Raises:
        CheckpointTooNew: a newer version has written it.
        CheckpointCorrupt: it is no step, or files are missing, unexpected or of another size.
    """

    def __init__(self, folder: Place, data: bytes | None = None) -> None:
        self.folder = folder
        self._storage = storage_of(folder)
        if not self._storage.is_step(folder):
            raise CheckpointCorrupt("is no folder of a checkpoint", folder)
        if data is None:
            data = self._storage.read_manifest(folder)
        path = str(folder / MANIFEST)
        self.manifest = Manifest.parse(data, path)
        check_sections(self.manifest, path)
        self.sections: Mapping[str, Any] = self.manifest.sections  # their form was checked
        if folder.name.startswith("step-") and folder.name != step_name(self.manifest.step):
            raise CheckpointCorrupt(f"holds step {self.manifest.step}", folder)
        self._storage.check_entries(
            folder, {file.name: file.nbytes for file in self.manifest.files}
        )
        self._open: dict[int, OpenFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def verify(self, share: Share = ALL_FILES, done: Container[PieceKey] = ()) -> None:
        """Compare the bytes of the files of a share with their checksums.

        Law: the shares of all ranks have all files of the step.

        Args:
            done: pieces that were compared already.

        Raises:
            CheckpointCorrupt: names file and tensor.
        """
        rank, size = share
        buffer = memoryview(bytearray(_CHUNK_NBYTES))
        for index in range(rank, len(self.manifest.files), size):
            saved = self.manifest.files[index]
            head = _hashed(self._file(index), 0, saved.header_nbytes, buffer)
            if head != saved.header_checksum:
                raise CheckpointCorrupt("the header differs from its checksum", self._path(index))
        for tensor in self.manifest.tensors.values():
            itemsize = DTYPES[tensor.dtype].itemsize
            for i, piece in enumerate(tensor.pieces):
                if piece.file % size == rank and (tensor.name, i) not in done:
                    file, nbytes = self._file(piece.file), piece.numel * itemsize
                    if _hashed(file, piece.offset, nbytes, buffer) != piece.checksum:
                        raise self._differs(tensor, piece)

    def read(
        self, tensor: SavedTensor, start: int, values: Tensor, check: Share | None = None
    ) -> list[PieceKey]:
        """Read the range of ``tensor`` from ``start`` on into ``values``.

        Args:
            check: a share of the files, of which pieces that are read as a whole are compared with
                their checksums.

        Returns:
            The pieces that were compared.

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
            is_ours = check is not None and piece.file % check.size == check.rank
            if is_ours and read.numel == piece.numel:
                if _read_hashed(file, offset, target) != piece.checksum:
                    raise self._differs(tensor, piece)
                compared.append((tensor.name, read.piece))
            else:
                file.read_into(target, offset)
        land(values, landed)
        return compared

    def whole(self, tensor: SavedTensor) -> Tensor:
        """The whole tensor, in new memory."""
        values = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="cpu")
        self.read(tensor, 0, values)
        return values

    def reach(self, tensor: SavedTensor, start: int, numel: int) -> None:
        """Open the files of a range, so that only a failing disk can prevent the read later."""
        if len(self.manifest.files) <= self._storage.max_open_files:
            for read in reads(tensor.pieces, start, numel):
                self._file(tensor.pieces[read.piece].file)

    def _file(self, index: int) -> OpenFile:
        file = self._open.get(index)
        if file is None:
            while len(self._open) >= self._storage.max_open_files:
                self._open.pop(next(iter(self._open))).close()
            saved = self.manifest.files[index]
            file = self._open[index] = self._storage.open(self._path(index), saved.nbytes)
        return file

    def _path(self, index: int) -> Place:
        return self.folder / self.manifest.files[index].name

    def _differs(self, tensor: SavedTensor, piece: SavedPiece) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"elements {piece.start} to {piece.start + piece.numel} differ from their checksum",
            self._path(piece.file),
            tensor=tensor.name,
        )


def is_whole(folder: Place) -> bool:
    """Whether every byte of a step is as it was written.

    Raises:
        CheckpointTooNew: a newer version has written it, so this one cannot know.
        OSError: it cannot be read.
    """
    try:
        with SavedStep(folder) as step:
            step.verify()
    except CheckpointCorrupt:
        return False
    return True


def _hashed(file: OpenFile, offset: int, nbytes: int, buffer: memoryview) -> str:
    """Compute the checksum of a range of a file."""
    checksum = Checksum()
    for start in range(0, nbytes, len(buffer)):
        chunk = buffer[: min(len(buffer), nbytes - start)]
        file.read_into(chunk, offset + start)
        checksum.update(chunk)
    return checksum.hexdigest()


def _read_hashed(file: OpenFile, offset: int, target: memoryview) -> str:
    """Read a range of a file and compute its checksum."""
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
        what: how they differ.
    """

    name: str
    what: str


def differences(first: SavedStep, second: SavedStep) -> Iterator[Difference]:
    """How two steps differ, in the order of names; how they are cut into files does not count."""
    tensors, others = first.manifest.tensors, second.manifest.tensors
    for name in sorted({*tensors, *others}):
        if name not in tensors or name not in others:
            yield Difference(name, f"only in {(first if name in tensors else second).folder}")
        else:
            what = difference(first, tensors[name], second, others[name])
            if what is not None:
                yield Difference(name, what)
    for name in sorted({*first.sections, *second.sections}):
        if name not in first.sections or name not in second.sections:
            only = first if name in first.sections else second
            yield Difference(name, f"only in {only.folder}")
        elif first.sections[name] != second.sections[name]:
            yield _first_difference(name, first.sections[name], second.sections[name])


def _first_difference(name: str, value: Any, other: Any) -> Difference:
    """Where two JSON values that differ do so first."""
    if isinstance(value, dict) and isinstance(other, dict):
        for key in sorted({*value, *other}):
            if key not in value or key not in other:
                return Difference(f"{name}.{key}", "is in one of them only")
            if value[key] != other[key]:
                is_plain = value.get("kind") == "value" and key == "value"  # as users name it
                inside = name if is_plain else f"{name}.{key}"
                return _first_difference(inside, value[key], other[key])
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        i = next(i for i, (a, b) in enumerate(zip(value, other, strict=True)) if a != b)
        return _first_difference(f"{name}[{i}]", value[i], other[i])
    return Difference(name, f"{value!r:.80} and {other!r:.80}")


def difference(
    first: SavedStep, saved: SavedTensor, second: SavedStep, other: SavedTensor
) -> str | None:
    """How two tensors differ; None if they are equal."""
    if (saved.dtype, saved.shape) != (other.dtype, other.shape):
        return f"{saved.dtype}{list(saved.shape)} and {other.dtype}{list(other.shape)}"
    if _checksums(saved) == _checksums(other):
        return None
    values, other_values = first.whole(saved), second.whole(other)
    differ = values.view(-1).view(torch.uint8) != other_values.view(-1).view(torch.uint8)
    if not bool(differ.any()):
        return None
    if not values.is_floating_point():
        return f"{int((values != other_values).sum())} of {values.numel()} elements differ"
    largest = (values.double() - other_values.double()).abs().max().item()
    count = int(differ.view(values.numel(), -1).any(1).sum())
    return f"{count} of {values.numel()} elements differ, by at most {largest:.3g}"


def _checksums(saved: SavedTensor) -> list[tuple[int, str]]:
    return [(piece.start, piece.checksum) for piece in saved.pieces]
