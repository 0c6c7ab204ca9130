"""States as PyTorch's own functions save them: files of ``torch.save``, and DCP.

Both hold ``{"model": state dict, "optimizer": {"state": ..., "param_groups": ...}}``, the latter by
the names of parameters, and whatever values there are beside them.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.convert.plain_files import check_memory
from echelon.checkpoint.convert.step_files import PlainState
from echelon.checkpoint.files import sync_folder
from echelon.errors import ArgumentError, CheckpointCorrupt

_SMALL_NBYTES = 1 << 20  # of a tensor that lies on itself, as after expand
_MODEL, _OPTIMIZERS = ("model", "state_dict", "model_state_dict"), ("optimizer", "optim")


def to_nested(state: PlainState) -> dict[str, Any]:
    """The one dict that these formats hold."""
    found: dict[str, Any] = {"model": dict(state.model)}
    if state.optimizer is not None:
        found["optimizer"] = dict(state.optimizer)
    return found | dict(state.values)


def from_nested(found: Mapping[str, Any], path: Path) -> PlainState:
    """A state, from a dict as people make it; or, if it holds tensors alone, those of a model.

    Raises:
        ArgumentError: there is no model in it, or the optimizer has numbers instead of names.
    """
    key = next((one for one in _MODEL if isinstance(found.get(one), Mapping)), None)
    model = found if key is None else found[key]
    for name in (*found, *model):
        if not isinstance(name, str):
            raise CheckpointCorrupt(f"has the key {name!r:.80}, which is no str", path)
    tensors = {name: one for name, one in model.items() if isinstance(one, Tensor)}
    if not tensors:
        raise ArgumentError(
            f"{path} holds no state dict of a model: it has {sorted(map(str, found))[:10]!r:.400}"
        )
    others = tuple(str(name) for name, one in model.items() if not isinstance(one, Tensor))
    if key is None:
        return PlainState(model=tensors, left_out=others)
    chosen = next((one for one in _OPTIMIZERS if isinstance(found.get(one), Mapping)), None)
    rest = {str(k): v for k, v in found.items() if k not in (key, chosen)}
    optimizer = None
    if chosen is not None:
        try:
            optimizer = _by_name(found[chosen], path)
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
        "state": {names[key]: dict(own) for key, own in optimizer.get("state", {}).items()},
        "param_groups": [
            {
                **{key: one for key, one in group.items() if key != "param_names"},
                "params": [names[param] for param in group["params"]],
            }
            for group in groups
        ],
    }


def read_torch(path: Path) -> dict[str, Any]:
    """A file of ``torch.save``; nothing in it is executed.

    Raises:
        CheckpointCorrupt: it is none, or holds more than tensors and plain values, or a tensor
            that is larger than what it lies in.
        CheckpointError: there is not the memory for it.
    """
    check_memory(path.stat().st_size, path)
    _check_archive(path)
    problem = ""
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # whatever torch's reader stumbles over in a file of anybody
        problem = _why_not_read(error)
    if problem:  # outside of the handler, so that the error does not keep what was read
        raise CheckpointCorrupt(problem, path)
    if not isinstance(found, Mapping):
        raise CheckpointCorrupt(f"holds a {type(found).__name__}, not a dict", path)
    _check_tensors(found, path)
    return dict(found)


def _why_not_read(error: Exception) -> str:
    """What torch's reader said, without its advice to unpickle the file."""
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
    """Refuse an archive that is larger when it is unpacked; torch.save packs nothing."""
    try:
        if not zipfile.is_zipfile(path):
            return  # of an old version, or torch says what it is
        with zipfile.ZipFile(path) as archive:
            packed = [one.filename for one in archive.infolist() if one.compress_type]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointCorrupt(f"is no archive of torch.save: {error}", path) from error
    if packed:
        raise CheckpointCorrupt(
            f"its record {packed[0]!r:.80} is compressed, which torch.save never does", path
        )


def _check_tensors(found: Mapping[Any, Any], path: Path) -> None:
    """Refuse tensors that a few bytes stand for: they take memory when they are written."""
    seen: set[int] = set()
    waiting: list[Any] = [found]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif isinstance(one, Tensor) and one.layout is torch.strided and not one.is_meta:
            there = one.untyped_storage().nbytes()
            if one.nbytes > max(there, _SMALL_NBYTES):
                raise CheckpointCorrupt(
                    f"holds a tensor of {one.nbytes} bytes that lies in {there} bytes: save a "
                    "contiguous() copy of it",
                    path,
                )


def write_torch(state: dict[str, Any], path: Path) -> None:
    """Write such a file, under another name until it is complete."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
