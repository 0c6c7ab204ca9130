"""Weights in safetensors: one file, or the shards and the index that Hugging Face reads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from safetensors import safe_open
from torch import Tensor

from echelon.checkpoint.files import NewFile, sync_folder
from echelon.checkpoint.format import DTYPES, dtype_name
from echelon.checkpoint.header import header
from echelon.checkpoint.interchange.native import SavedTensors
from echelon.checkpoint.tensors import bytes_of
from echelon.errors import ArgumentError, CheckpointCorrupt

__all__ = ["PlainFiles", "write_plain"]

INDEX = "model.safetensors.index.json"
_MOST_INDEX_NBYTES = 100 << 20

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
        if path.is_dir():
            self._file_of = _index(path)
        else:
            self._file_of = dict.fromkeys(_names(path), path)

    def tensors(self) -> dict[str, Tensor]:
        """All of them in memory."""
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


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except Exception as error:
        raise CheckpointCorrupt(f"is no safetensors file: {error}", path) from error


def _index(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    if not path.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) == 1:
            return dict.fromkeys(_names(files[0]), files[0])
        raise ArgumentError(f"{folder} holds no {INDEX} and not just one .safetensors file")
    if path.stat().st_size > _MOST_INDEX_NBYTES:
        raise CheckpointCorrupt("is too large for an index", path)
    try:
        weights = json.loads(path.read_bytes())["weight_map"]
        found = {str(name): str(file) for name, file in weights.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt("is no index of weights", path) from error
    for file in found.values():
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointCorrupt(f"names {file!r:.80}, which is no file of the folder", path)
    return {name: folder / file for name, file in found.items()}
