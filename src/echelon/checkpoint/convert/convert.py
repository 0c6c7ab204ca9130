"""Converts from one format to another; what was written is read again and compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.c10d.dcp import is_dcp, read_dcp, write_dcp
from echelon.checkpoint import files
from echelon.checkpoint.convert.plain_files import INDEX, PlainFiles, write_plain
from echelon.checkpoint.convert.step_files import (
    PlainState,
    SavedTensors,
    model_in,
    names_that_fit,
    others_in,
    read_step,
    write_step,
)
from echelon.checkpoint.convert.torch_files import (
    from_nested,
    read_torch,
    to_nested,
    write_torch,
)
from echelon.checkpoint.coordinator import named
from echelon.checkpoint.place import storage_of
from echelon.checkpoint.records import step_name, step_of
from echelon.checkpoint.save_lock import remove_unused
from echelon.checkpoint.saved_step import SavedStep
from echelon.checkpoint.step_storage import Place
from echelon.checkpoint.store_path import StorePath
from echelon.comm.object_bytes import flat_bytes
from echelon.errors import ArgumentError, CheckpointError, CheckpointNotFound
from echelon.process.atomic_files import draft_folder, move_new, sync_tree

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")


class Form(Enum):
    """The formats of a state on disk."""

    ECHELON = "echelon"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"


@final
@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        to: the form to write; None: the form that the name of the target implies.
        step: the step of a source with several, and the number of a step that is written; None:
            the newest, and the number of the source, or 0 where it has none.
        section: name of the model in a step; None: its only one.
        weights_only: leave optimizer and values out.
        shard_nbytes: size of the shards of safetensors that are written; None: one file.
        trust_pickle: whether a DCP may be read, whose metadata can run any code.
    """

    to: Form | None = None
    step: int | None = None
    section: str | None = None
    weights_only: bool = False
    shard_nbytes: int | None = None
    trust_pickle: bool = False


class Converted(NamedTuple):
    """The result of a conversion.

    Attributes:
        written: files or folders.
        left_out: names in the source that the target lacks, though the options did not ask for it.
    """

    written: Sequence[Place]
    left_out: tuple[str, ...]


def form_of(path: Place) -> Form:
    """The form of the state at ``path``; in a store there is only echelon's own.

    Raises:
        ArgumentError: nothing is there, or nothing of a known form.
    """
    if isinstance(path, StorePath):
        return Form.ECHELON
    if path.is_dir():
        if is_dcp(path):
            return Form.DCP
        if (path / INDEX).exists() or (
            any(path.glob("*.safetensors")) and step_of(path.name) is None
        ):
            return Form.SAFETENSORS
        if step_of(path.name) is not None or files.steps(path):
            return Form.ECHELON
    elif path.is_file():
        return Form.SAFETENSORS if path.suffix == ".safetensors" else Form.TORCH
    elif path.exists():
        raise ArgumentError(f"{path} is neither a file nor a folder")
    else:
        raise ArgumentError(f"{path} is not there")
    raise ArgumentError(
        f"{path} is no checkpoint: give the folder of a run or of a step, a .safetensors file, a "
        "folder of them, a DCP, or a file of torch.save"
    )


def step_at(path: Place, step: int | None = None) -> Place:
    """The folder of a step: ``path`` itself, or a folder in it.

    Raises:
        CheckpointNotFound: there is no such step.
    """
    storage = storage_of(path)
    if step is None and step_of(path.name) is not None and storage.is_step(path):
        return path
    known = storage.steps(path)
    if not known:
        raise CheckpointNotFound(f"no step was committed here{_hint(path)}", path)
    chosen = known[-1] if step is None else step
    if chosen not in known:
        committed = ", ".join(map(str, known))
        raise CheckpointNotFound(f"step {chosen} is not there; committed: {committed}", path)
    return path / step_name(chosen)


def steps_at(path: Place) -> list[Place]:
    """The folders of all steps: ``path`` itself, or those in it.

    Raises:
        CheckpointNotFound: there is none.
    """
    if step_at(path) == path:
        return [path]
    return [path / step_name(step) for step in storage_of(path).steps(path)]


def _hint(run: Place) -> str:
    """The folders below one without steps that have some."""
    if isinstance(run, StorePath):
        return ""
    inside = [path for path in run.glob("*") if path.is_dir() and os.access(path, os.R_OK)]
    below = sorted(path.name for path in inside if files.steps(path))
    return f"; there are steps in {', '.join(map(repr, below[:10]))} below it" if below else ""


def convert(source: Place, target: Place, options: ConvertOptions) -> Converted:
    """Write the state at ``source`` to ``target`` in another form, read it again, and compare.

    Raises:
        ArgumentError: one of them is of no known form, or ``target`` exists.
        CheckpointError: the source is damaged, or what was written is not what was read.
    """
    if isinstance(target, StorePath):
        if options.to not in (None, Form.ECHELON) or options.shard_nbytes is not None:
            raise ArgumentError("only echelon's own format is written into an object store")
        return _write_step(_read(source, options), target, options)
    made = _form_to_make(target, options)
    if made is not Form.ECHELON and os.path.lexists(target):
        raise ArgumentError(f"{target} is there already: name a new one")
    if options.shard_nbytes is not None and made is not Form.SAFETENSORS:
        raise ArgumentError("shards are for safetensors")
    target = Path(os.path.abspath(target))
    if form_of(source) is Form.ECHELON and made is Form.SAFETENSORS:
        with _verified(source, options) as step:
            model = model_in(step, options.section)
            tensors = SavedTensors(step, model)
            with _draft_of(target) as draft:
                written = write_plain(tensors, draft, options.shard_nbytes)
                _compare(tensors, PlainFiles(draft), target)
            beside = () if options.weights_only else others_in(step, model)
        return Converted([target / path.relative_to(draft) for path in written], beside)
    state = _read(source, options)
    if made is Form.SAFETENSORS:
        raise ArgumentError("make a checkpoint of echelon of it first, and safetensors of that")
    if made is Form.ECHELON:
        return _write_step(state, target, options)
    with _draft_of(target) as draft:
        if made is Form.TORCH:
            write_torch(to_nested(state), draft)
            _compare_nested(to_nested(state), read_torch(draft), target, "")
        else:
            write_dcp(to_nested(state), draft)
            _compare_nested(_as_dcp_keeps(to_nested(state)), read_dcp(draft), target, "")
    return Converted([target], state.left_out)


@contextmanager
def _draft_of(target: Path) -> Iterator[Path]:
    """Where ``target`` is written and compared; after the block it has its name, in one step.

    What an interrupted conversion to this target has left is removed.

    Raises:
        CheckpointError: something has come to be at ``target``, or the disk fails.
    """
    draft = target.parent  # until there is a folder for it
    try:
        with _leaving_nothing(target.parent):
            files.make_folder(target.parent)
            with draft_folder(target) as draft:
                yield draft / target.name
                sync_tree(draft)
                move_new(draft / target.name, target)
    except OSError as error:
        failed = Path(error.filename or target)
        if failed.is_relative_to(draft):  # whoever reads the error knows the target only
            error.filename = str(target.parent / failed.relative_to(draft))
        raise named(error, None) from error


@contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """If the block fails, remove the folder and those above it that it has made and left empty."""
    missing = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        yield
    except BaseException:
        for each in missing:  # the inner ones come first
            remove_unused(each)
        raise


def _write_step(state: PlainState, target: Place, options: ConvertOptions) -> Converted:
    """Write a step of the run at ``target``, and compare it with the state."""
    with nullcontext() if isinstance(target, StorePath) else _leaving_nothing(target):
        folder = write_step(state, target, state.step if options.step is None else options.step)
    with SavedStep(folder) as step:
        _compare(state.model, SavedTensors(step, "model"), target)
    nameless = sorted(state.values.keys() - {*names_that_fit(state.values)})
    return Converted([folder], (*state.left_out, *nameless))


def _as_dcp_keeps(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without its empty dicts, which a DCP cannot hold."""
    kept = {
        key: _as_dcp_keeps(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
    }
    return {
        key: value for key, value in kept.items() if not (isinstance(value, dict) and not value)
    }


def _form_to_make(target: Path, options: ConvertOptions) -> Form:
    if options.to is not None:
        return options.to
    if target.suffix == ".safetensors" or options.shard_nbytes is not None:
        return Form.SAFETENSORS
    if target.suffix in _TORCH_SUFFIXES:
        return Form.TORCH
    if target.suffix[1:2].isalpha() and not target.is_dir():
        raise ArgumentError(
            f"{target} ends in {target.suffix!r}, which says no form that is known: end it in "
            f".safetensors, {', '.join(_TORCH_SUFFIXES)}, or in nothing for the folder of a run, "
            "or say --to echelon, safetensors, dcp or torch"
        )
    return Form.ECHELON


@contextmanager
def _verified(source: Place, options: ConvertOptions) -> Iterator[SavedStep]:
    """A step whose checksums were compared."""
    with SavedStep(step_at(source, options.step)) as step:
        step.verify()
        yield step


def _read(source: Place, options: ConvertOptions) -> PlainState:
    """Read the state at ``source`` into memory."""
    form = form_of(source)
    if form is Form.ECHELON:
        with _verified(source, options) as step:
            state = read_step(step, options.section)
        return PlainState(model=state.model, step=state.step) if options.weights_only else state
    assert isinstance(source, Path)
    if form is Form.SAFETENSORS:
        return PlainState(model=PlainFiles(source).load())
    if form is Form.TORCH:
        return from_nested(read_torch(source), source, weights_only=options.weights_only)
    if not options.trust_pickle:
        raise ArgumentError(
            f"{source} is a DCP, whose metadata are a pickle: reading it runs whatever its "
            "author put there. If you have written it, say --trust-pickle"
        )
    return from_nested(read_dcp(source), source, weights_only=options.weights_only)


def _compare(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], path: Place) -> None:
    if set(actual) != set(expected):
        raise CheckpointError("has other tensors than it was made of", path)
    for name in expected:
        _compare_nested(expected[name], actual[name], path, name)


def _compare_nested(expected: Any, actual: Any, path: Place, where: str) -> None:
    """Refuse a state that is not equal to the expected one, bit for bit."""
    if isinstance(expected, Tensor):
        same = (
            isinstance(actual, Tensor)
            and (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            and torch.equal(flat_bytes(actual), flat_bytes(expected))  # a NaN equals itself
        )
    elif isinstance(expected, Mapping):
        same = isinstance(actual, Mapping) and actual.keys() == expected.keys()
        for key in expected if same else ():
            _compare_nested(expected[key], actual[key], path, f"{where}.{key}".lstrip("."))
    elif isinstance(expected, list | tuple):
        same = isinstance(actual, list | tuple) and len(actual) == len(expected)
        for i, item in enumerate(expected if same else ()):
            _compare_nested(item, actual[i], path, f"{where}[{i}]")
    else:
        same = actual == expected or (actual != actual and expected != expected)
    if not same:
        raise CheckpointError(f"{where!r} is not what it was made of", path)
