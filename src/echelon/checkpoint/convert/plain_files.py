"""Weights in safetensors: one file, or the shards and the index that Hugging Face reads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, final

from safetensors import safe_open
from torch import Tensor

from echelon.checkpoint.convert.step_files import SavedTensors
from echelon.checkpoint.files import NewFile, SavedBytes, sync_folder
from echelon.checkpoint.header import header, header_nbytes, read_header
from echelon.checkpoint.tensors import bytes_of
from echelon.comm.buffers import available_nbytes
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointError
from echelon.values.untrusted_json import brief, read_json
from echelon.values.value_types import DTYPES, dtype_name

INDEX = "model.safetensors.index.json"
_MOST_INDEX_NBYTES = 100 << 20
_INDEX_MEMORY = 1 << 30  # that reading one may take
_BEGINNING_NBYTES = 8  # bytes: the length of the header

Facts = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes


def write_plain(tensors: SavedTensors, target: Path, most_nbytes: int | None) -> list[Path]:
    """Write the tensors of a model, one at a time in memory.

    Args:
        target: a file; or, with ``most_nbytes``, a folder for shards and their index.
        most_nbytes: of a shard; a larger tensor has one of its own.

    Returns:
        the files.

    Raises:
        ArgumentError: there is something at ``target``.
    """
    facts = [
        (name, dtype_name(dtype), shape, math.prod(shape) * dtype.itemsize)
        for name, dtype, shape in tensors.facts()
    ]
    if target.exists():
        raise ArgumentError(f"{target} is there already: name a new one")
    if most_nbytes is None:
        _write(tensors, facts, target)
        return [target]
    target.mkdir(parents=True)
    shards = list(_shards(facts, most_nbytes))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for shard, name in zip(shards, names, strict=True):
        _write(tensors, shard, target / name)
    weights = {one[0]: name for shard, name in zip(shards, names, strict=True) for one in shard}
    total = sum(one[3] for one in facts)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    with NewFile(target / INDEX) as file:
        file.write(memoryview(json.dumps(index, indent=2, sort_keys=True).encode()))
    sync_folder(target)
    return [target / name for name in (*names, INDEX)]


def _shards(facts: Sequence[Facts], most_nbytes: int) -> Iterator[list[Facts]]:
    shard: list[Facts] = []
    nbytes = 0
    for one in facts:
        if shard and nbytes + one[3] > most_nbytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(one)
        nbytes += one[3]
    if shard:
        yield shard


def _write(tensors: SavedTensors, facts: Sequence[Facts], path: Path) -> None:
    """One file, under another name until it is complete."""
    # Wide elements first, so that each tensor begins at a multiple of the width of its elements.
    ordered = sorted(facts, key=lambda one: -DTYPES[one[1]].itemsize)
    part = path.with_name(f".{path.name}.part")
    try:
        with NewFile(part) as file:
            file.write(memoryview(header(ordered)))
            for name, *_ in ordered:
                file.write(bytes_of(tensors[name]))
        os.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@final
class PlainFiles:
    """Weights in one file or in shards with an index, read one tensor at a time.

    Raises:
        CheckpointCorrupt: the index or a file is not what it should be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_dir():
            self._file_of = _index(path)
        else:
            self._file_of = dict.fromkeys(_sizes(path), path)

    def tensors(self) -> dict[str, Tensor]:
        """All of them in memory.

        Raises:
            CheckpointError: there is not the memory for them.
        """
        sizes = {file: _sizes(file) for file in {*self._file_of.values()}}
        check_memory(sum(sizes[file][name] for name, file in self._file_of.items()), self._path)
        return {name: self.read(name) for name in self._file_of}

    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                found: Tensor = file.get_tensor(name)
                return found
        except Exception as error:  # safetensors' own class has no base but this
            raise CheckpointCorrupt(f"cannot be read: {error}", path, tensor=name) from error


def check_memory(nbytes: int, path: Path) -> None:
    """Refuse to read so many bytes where there is no room for them.

    Raises:
        CheckpointError: says how much there is.
    """
    available = available_nbytes()
    if nbytes > available:
        raise CheckpointError(
            f"takes {nbytes / 2**20:.0f} MiB of memory, and {available / 2**20:.0f} MiB are "
            "available: convert it where there is more",
            path,
        )


def _sizes(path: Path) -> dict[str, int]:
    """The tensors of a file, and the bytes of each.

    safetensors takes a header in which a name stands twice, and readers differ in which one they
    mean; this one does not.
    """
    with SavedBytes(path.resolve()) as file:  # the user may name a link
        beginning = bytearray(min(file.nbytes, _BEGINNING_NBYTES))
        file.read_into(memoryview(beginning), 0)
        end = header_nbytes(bytes(beginning), path)
        data = bytearray(min(file.nbytes, end))
        file.read_into(memoryview(data), 0)
        entries = read_header(bytes(data), path)
        total = end + sum(nbytes for *_, nbytes in entries)
        if file.nbytes != total:
            raise CheckpointCorrupt(f"has {file.nbytes} bytes instead of {total}", path)
    return {name: nbytes for name, _, _, nbytes in entries}


def _index(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    if not path.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) == 1:
            _check_place(files[0], folder)
            return dict.fromkeys(_sizes(files[0]), files[0])
        raise ArgumentError(f"{folder} holds no {INDEX} and not just one .safetensors file")
    _check_place(path, folder)
    if path.stat().st_size > _MOST_INDEX_NBYTES:
        raise CheckpointCorrupt("is too large for an index", path)
    found = read_json(path.read_bytes(), path, memory=_INDEX_MEMORY)
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict) or not all(type(file) is str for file in weights.values()):
        raise CheckpointCorrupt("is no index of weights", path)
    named = cast(dict[str, str], weights)
    known: dict[str, dict[str, int]] = {}
    for file in sorted({*named.values()}):
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointCorrupt(f"names {brief(file)}, which is no file of the folder", path)
        _check_place(folder / file, folder)
        known[file] = _sizes(folder / file)
    for name, file in named.items():
        if name not in known[file]:
            raise CheckpointCorrupt(f"names {brief(name)} in {file}, which does not hold it", path)
    return {name: folder / file for name, file in named.items()}


def _check_place(file: Path, folder: Path) -> None:
    """Refuse a link out of the folder: who made it may mean a file that only the reader can read.

    Links of Hugging Face's cache lead from ``snapshots/REVISION`` to ``blobs`` beside it.
    """
    place, home = file.resolve().parent, folder.resolve()
    cached = home.parent.name == "snapshots" and place == home.parent.parent / "blobs"
    if place != home and not cached:
        raise CheckpointCorrupt(
            f"is a link to {file.resolve()}, which is not in the folder: copy it there", file
        )
    if not file.is_file():
        raise CheckpointCorrupt("is no ordinary file", file)
