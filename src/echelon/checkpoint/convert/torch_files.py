"""States as PyTorch's own functions save them: files of ``torch.save``, and DCP.

Both hold ``{"model": state dict, "optimizer": {"state": ..., "param_groups": ...}}``, the latter by
the names of parameters, and whatever values there are beside them.
"""

from __future__ import annotations

import errno
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.convert.plain_files import check_memory
from echelon.checkpoint.convert.step_files import PlainState
from echelon.errors import ArgumentError, CheckpointCorrupt
from echelon.process.atomic_files import naming, system_error_behind

_SMALL_NBYTES = 1 << 20  # a tensor up to this size may overlap itself, as after expand
_MODEL, _OPTIMIZERS = ("model", "state_dict", "model_state_dict"), ("optimizer", "optim")


def to_nested(state: PlainState) -> dict[str, Any]:
    """The dict that these formats hold."""
    nested: dict[str, Any] = {"model": dict(state.model)}
    if state.optimizer is not None:
        nested["optimizer"] = dict(state.optimizer)
    return nested | dict(state.values)


def from_nested(nested: Mapping[str, Any], path: Path, *, weights_only: bool) -> PlainState:
    """The state in a dict with the usual keys, or in the state dict of a model alone.

    Args:
        weights_only: leave everything out but the model.

    Raises:
        ArgumentError: it has no model, or the optimizer has numbers instead of names.
    """
    key = next((name for name in _MODEL if isinstance(nested.get(name), Mapping)), None)
    model = nested if key is None else nested[key]
    for name in (*nested, *model):
        if not isinstance(name, str):
            raise CheckpointCorrupt(f"has the key {name!r:.80}, which is no str", path)
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ArgumentError(
            f"{path} holds no state dict of a model: it has {sorted(map(str, nested))[:10]!r:.400}"
        )
    if weights_only:
        return PlainState(model=tensors)
    others = tuple(str(name) for name, value in model.items() if not isinstance(value, Tensor))
    if key is None:
        return PlainState(model=tensors, left_out=others)
    chosen = next((name for name in _OPTIMIZERS if isinstance(nested.get(name), Mapping)), None)
    rest = {str(k): v for k, v in nested.items() if k not in (key, chosen)}
    optimizer = None
    if chosen is not None:
        try:
            optimizer = _by_name(nested[chosen], path)
        except ArgumentError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"its optimizer has another form than that of a state dict: {error!r:.200}", path
            ) from error
    return PlainState(model=tensors, optimizer=optimizer, values=rest, left_out=others)


def _by_name(optimizer: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """The state of an optimizer by names; None if it is empty."""
    groups = optimizer.get("param_groups", [])
    names: dict[Any, str] = {}
    for group in groups:
        known = group.get("param_names", group["params"])
        names |= dict(zip(group["params"], known, strict=True))
    if any(not isinstance(name, str) for name in names.values()):
        raise ArgumentError(
            f"the optimizer in {path} has numbers of parameters and not their names, so whose its "
            "states are cannot be known: make it with named_parameters(), or take the weights "
            "only (--weights-only)"
        )
    if not names:
        return None
    return {
        "state": {names[key]: dict(state) for key, state in optimizer.get("state", {}).items()},
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [names[param] for param in group["params"]],
            }
            for group in groups
        ],
    }


def read_torch(path: Path) -> dict[str, Any]:
    """Read a file of ``torch.save``; nothing in it is executed.

    Raises:
        CheckpointCorrupt: it is none, or holds more than tensors and plain values, or a tensor
            that is larger than its storage.
        CheckpointError: there is not enough memory.
        OSError: the disk fails, or the file may not be read.
    """
    check_memory(path.stat().st_size, path)
    _check_archive(path)
    problem = ""
    with naming(path):
        try:
            content = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:  # a file from anywhere can make torch's reader raise anything
            # In a truncated archive it seeks to where no file has bytes.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            problem = _why_not_read(error)
    if problem:  # outside of the handler, so that the error does not keep what was read
        raise CheckpointCorrupt(problem, path)
    if not isinstance(content, Mapping):
        raise CheckpointCorrupt(f"holds a {type(content).__name__}, not a dict", path)
    _check_tensors(content, path)
    return dict(content)


def _why_not_read(error: Exception) -> str:
    """The error of torch's reader, without its advice to unpickle the file."""
    classes = re.findall(r"GLOBAL ([\w.]{1,80})", str(error))
    if classes:
        return (
            f"holds a {classes[0]}, which only unpickling could make, and that may run any code: "
            "save a state dict of tensors and plain values"
        )
    first = (str(error).splitlines() or [""])[0]
    why = type(error).__name__ if "Weights only load failed" in first else first
    return f"is no file of torch.save, or a damaged one: {why}"


def _check_archive(path: Path) -> None:
    """Refuse a compressed archive, which may unpack to any size; torch.save compresses nothing."""
    try:
        if not zipfile.is_zipfile(path):
            return  # an old version wrote it, or torch says what it is
        with zipfile.ZipFile(path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointCorrupt(f"is no archive of torch.save: {error}", path) from error
    if packed:
        raise CheckpointCorrupt(
            f"its record {packed[0]!r:.80} is compressed, which torch.save never does", path
        )


def _check_tensors(content: Mapping[Any, Any], path: Path) -> None:
    """Refuse tensors much larger than their storage, which would take memory when written."""
    seen: set[int] = set()
    waiting: list[Any] = [content]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            storage_nbytes = value.untyped_storage().nbytes()
            if value.nbytes > max(storage_nbytes, _SMALL_NBYTES):
                raise CheckpointCorrupt(
                    f"holds a tensor of {value.nbytes} bytes that lies in {storage_nbytes} bytes: "
                    "save a contiguous() copy of it",
                    path,
                )


def write_torch(state: dict[str, Any], path: Path) -> None:
    """Write a new file of ``torch.save``.

    Raises:
        OSError: it cannot be written.
    """
    with naming(path), open(path, "xb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if (cause := system_error_behind(error)) is not None:
                raise cause from None
            raise
