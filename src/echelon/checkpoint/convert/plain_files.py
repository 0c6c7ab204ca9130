"""Weights in safetensors: one file, or the shards and the index that Hugging Face reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast, final

import torch
from safetensors import safe_open
from torch import Tensor

from echelon.checkpoint.convert.step_files import SavedTensors
from echelon.checkpoint.files import NewFile, SavedBytes
from echelon.checkpoint.header import Entry, header, header_nbytes, read_header
from echelon.checkpoint.tensors import bytes_of
from echelon.comm.buffers import available_nbytes
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointError
from echelon.process.plain_file import read_plain
from echelon.values.untrusted_json import brief, read_json
from echelon.values.value_types import DTYPES, FILE_DTYPES, dtype_name

INDEX = "model.safetensors.index.json"
_MAX_INDEX_NBYTES = 100 << 20
_SHARD = re.compile(r".*-([0-9]+)-of-([0-9]+)\.safetensors")
_INDEX_MEMORY = 1 << 30  # bytes that reading an index may take
_LENGTH_NBYTES = 8  # the length of the header comes first


def write_plain(tensors: SavedTensors, target: Path, max_nbytes: int | None) -> list[Path]:
    """Write the tensors of a model, of which one is in memory at a time; returns the files.

    Nobody reads them yet: the caller gives them their names when all are there.

    Args:
        target: a new file; or, with ``max_nbytes``, a new folder for shards and their index.
        max_nbytes: size of a shard, which only a single tensor may exceed; None: one file.

    Raises:
        ArgumentError: a tensor has a dtype that safetensors does not have.
    """
    entries = [_entry(*facts) for facts in tensors.facts()]
    if max_nbytes is None:
        _write(tensors, entries, target)
        return [target]
    target.mkdir()
    shards = list(_shards(entries, max_nbytes))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for shard, name in zip(shards, names, strict=True):
        _write(tensors, shard, target / name)
    weights = {
        entry.key: name for shard, name in zip(shards, names, strict=True) for entry in shard
    }
    total = sum(entry.nbytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    with NewFile(target / INDEX) as file:
        file.write(memoryview(json.dumps(index, indent=2, sort_keys=True).encode()))
    return [target / name for name in (*names, INDEX)]


def _entry(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Entry:
    if dtype_name(dtype) not in FILE_DTYPES:
        raise ArgumentError(
            f"{name!r} is {dtype}, which safetensors does not have: convert to a file of "
            "torch.save (a target that ends with .pt) or to DCP"
        )
    return Entry(name, dtype_name(dtype), shape, math.prod(shape) * dtype.itemsize)


def _shards(entries: Sequence[Entry], max_nbytes: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    nbytes = 0
    for entry in entries:
        if shard and nbytes + entry.nbytes > max_nbytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(entry)
        nbytes += entry.nbytes
    if shard:
        yield shard


def _write(tensors: SavedTensors, entries: Sequence[Entry], path: Path) -> None:
    """Write one file."""
    # Wide elements come first, so each tensor begins at a multiple of the width of its elements.
    ordered = sorted(entries, key=lambda entry: -DTYPES[entry.dtype].itemsize)
    with NewFile(path) as file:
        file.write(memoryview(header(ordered)))
        for entry in ordered:
            file.write(bytes_of(tensors[entry.key]))


@final
class PlainFiles(Mapping[str, Tensor]):
    """Weights in one file or in shards with an index, read when they are asked for.

    Raises:
        CheckpointCorrupt: the index or a file is not what it should be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places = _index(path) if path.is_dir() else _places(path)

    def load(self) -> dict[str, Tensor]:
        """Read all tensors into memory.

        Raises:
            CheckpointError: there is not enough memory.
        """
        check_memory(sum(place.nbytes for place in self._places.values()), self._path)
        return dict(self)

    def __getitem__(self, name: str) -> Tensor:
        path = self._places[name].file
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except Exception as error:  # the class of safetensors' error has no narrower base
            raise CheckpointCorrupt(f"cannot be read: {error}", path, tensor=name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Place(NamedTuple):
    """The file of a tensor, and the bytes that the tensor takes."""

    file: Path
    nbytes: int


def check_memory(nbytes: int, path: Path) -> None:
    """Raise ``CheckpointError`` if less than ``nbytes`` of memory are available."""
    available = available_nbytes()
    if nbytes > available:
        raise CheckpointError(
            f"takes {nbytes / 2**20:.0f} MiB of memory, and {available / 2**20:.0f} MiB are "
            "available: convert it where there is more",
            path,
        )


def _places(path: Path) -> dict[str, _Place]:
    """The tensors of a file.

    safetensors accepts a header that has a name twice, and readers differ in which of the two they
    take; such a header is refused here.
    """
    with SavedBytes(path.resolve()) as file:  # the user may name a link
        prefix = bytearray(min(file.nbytes, _LENGTH_NBYTES))
        file.read_into(memoryview(prefix), 0)
        end = header_nbytes(bytes(prefix), path)
        data = bytearray(min(file.nbytes, end))
        file.read_into(memoryview(data), 0)
        entries = read_header(bytes(data), path)
        total = end + sum(entry.nbytes for entry in entries)
        if file.nbytes != total:
            raise CheckpointCorrupt(f"has {file.nbytes} bytes instead of {total}", path)
    return {entry.key: _Place(path, entry.nbytes) for entry in entries}


def _index(folder: Path) -> dict[str, _Place]:
    """The tensors of a folder: of its index, or of its only file."""
    path = folder / INDEX
    if not path.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) == 1:
            _check_place(files[0], folder)
            shard = _SHARD.fullmatch(files[0].name)
            if shard is not None and int(shard[2]) != 1:
                raise CheckpointCorrupt(
                    f"is one of {int(shard[2])} files by its name, and the others and {INDEX} are "
                    "not there: convert again, or name the file itself",
                    files[0],
                )
            return _places(files[0])
        raise ArgumentError(f"{folder} holds no {INDEX} and not just one .safetensors file")
    _check_place(path, folder)
    if path.stat().st_size > _MAX_INDEX_NBYTES:
        raise CheckpointCorrupt("is too large for an index", path)
    # Hugging Face's cache has links; the place of this one is checked.
    data = read_plain(path, _MAX_INDEX_NBYTES, follows=True)
    index = read_json(data, path, memory=_INDEX_MEMORY)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(type(file) is str for file in weights.values()):
        raise CheckpointCorrupt("is no index of weights", path)
    named = cast(dict[str, str], weights)
    known: dict[str, dict[str, _Place]] = {}
    for file in sorted({*named.values()}):
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointCorrupt(f"names {brief(file)}, which is no file of the folder", path)
        _check_place(folder / file, folder)
        known[file] = _places(folder / file)
    for name, file in named.items():
        if name not in known[file]:
            raise CheckpointCorrupt(f"names {brief(name)} in {file}, which does not hold it", path)
    return {name: known[file][name] for name, file in named.items()}


def _check_place(file: Path, folder: Path) -> None:
    """Refuse a link out of the folder, which could expose a file that only the reader may read.

    Links in Hugging Face's cache are allowed: from ``snapshots/REVISION`` to ``blobs`` beside it.
    """
    place, home = file.resolve().parent, folder.resolve()
    cached = home.parent.name == "snapshots" and place == home.parent.parent / "blobs"
    if place != home and not cached:
        raise CheckpointCorrupt(
            f"is a link to {file.resolve()}, which is not in the folder: copy it there", file
        )
    if not file.is_file():
        raise CheckpointCorrupt("is no ordinary file", file)
