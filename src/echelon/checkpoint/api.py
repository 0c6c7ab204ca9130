"""``save``, ``async_save``, ``load`` and ``steps``: training states in folders of steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from echelon import checks
from echelon.checkpoint import files
from echelon.checkpoint.async_save import AsyncSave, Background
from echelon.checkpoint.coordinator import Coordinator, named
from echelon.checkpoint.items import CheckpointItems
from echelon.checkpoint.loading import (
    Loaded,
    Request,
    folders_to_try,
    load_step,
    went_away,
)
from echelon.checkpoint.records import MAX_STEP
from echelon.checkpoint.saving import Saving
from echelon.comm.group import Group
from echelon.errors import (
    ArgumentError,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
)
from echelon.launch.run import entered

Folder = str | os.PathLike[str]

_MOST_LOOKS = 10  # at steps that another job removes while they are being loaded


def save(
    directory: Folder,
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    keep: int | None = None,
    rng: bool = True,
    group: Group | None = None,
    **state: object,
) -> Path:
    """Save the state of a training as one step. All ranks that share it call it.

    Law: after a crash at any instant there is the step or there is not; what there is, is whole.

    Args:
        directory: of the run; each step is a folder in it. On several hosts, one that all see.
        step: number of the step; a step is never saved twice.
        model: plain, or shared by ``DDP``, ``FSDP``, ``Pipeline`` or any of them inside another.
        optimizer: over its parameters.
        keep: how many steps to leave, this one among them; None: all.
        rng: whether the random generators of every rank are saved.
        group: the ranks that share the state; needed only for plain modules on several ranks.
        state: anything else by name: further models and optimizers, objects that have
            ``state_dict()`` and ``load_state_dict()``, and values of Python and tensors, nested.

    Returns:
        the folder of the step.

    Raises:
        ArgumentError: an argument or a value cannot be saved, or ranks ask for different saves.
        CheckpointError: a rank could not write; names it, the path and the errno. Nothing is
            committed, and older steps are as they were.
        CheckpointTooNew: a newer version of echelon has saved the step.
        StateError: in the middle of a training step, or the states of ranks are of different steps.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> layer = nn.Linear(2, 2)
        >>> save(folder, step=3, model=layer, epoch=1).name
        'step-000000003'
        >>> loaded = load(folder, model=layer)
        >>> loaded.step, loaded.values["epoch"]
        (3, 1)
    """
    given = _given_items({"model": model, "optimizer": optimizer}, state, group)
    return _begun("save", directory, step, given, keep=keep, rng=rng).finish()


def async_save(
    directory: Folder,
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    keep: int | None = None,
    rng: bool = True,
    group: Group | None = None,
    **state: object,
) -> AsyncSave:
    """Like ``save``, but return when everything is copied, and write while training goes on.

    One save of a group is under way at a time; the next waits for it. The copy takes as much memory
    of the host as this rank writes, and is kept for the next save.

    Args:
        directory: this and all others as for ``save``.

    Raises:
        ArgumentError, StateError, CheckpointTooNew: as ``save``.
        CheckpointError: the save before this one failed, or this one cannot begin. What goes wrong
            later is raised as ``AsyncSave`` says.
    """
    given = _given_items({"model": model, "optimizer": optimizer}, state, group)
    saving = _begun("async_save", directory, step, given, keep=keep, rng=rng)
    try:  # from here on all ranks are in async_save
        background = Background.of(given.group)
        optimizers = [*given.optimizers.values()]
        return background.start(saving, saving.target, optimizers, given.device)
    except BaseException:
        saving.abandon()
        raise


def load(
    directory: Folder,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    rng: bool = True,
    group: Group | None = None,
    **state: object,
) -> Loaded:
    """Load a step into what is given, in place. All ranks that share it call it.

    The number of ranks and the techniques may be others than when it was saved. What is not given
    is not loaded; values of Python come back in the result.

    Law: either all of it is loaded, or an error is raised and nothing has changed. Each byte of the
    checkpoint is compared with its checksum before.

    Args:
        directory: of the run, or of one of its steps.
        step: which; None: the newest.
        strict: whether everything must fit. If not, what fits is loaded, dtypes are converted, and
            the result says what was left.
        fallback: if the step is damaged, take the newest older one that is whole, and warn.
        rng: whether the random generators go on from where they were.
        state: further models, optimizers and objects with ``load_state_dict()``, by the names under
            which they were saved.

    Raises:
        CheckpointNotFound: there is no such step, or no step at all.
        CheckpointCorrupt: bytes are missing or differ; names file and tensor.
        CheckpointTooNew: a newer version of echelon has saved the step; with ``fallback``, too.
        CheckpointMismatch: with ``strict``: lists what is missing, unexpected and different.
        CheckpointError: it cannot be read; or an object or a module does not take its state, and
            others of them that came before it have theirs.
        ArgumentError: something given cannot take a state, or ranks ask for different loads.
    """
    given = _given_items({"model": model, "optimizer": optimizer}, state, group)
    root = _folder(directory)
    request = Request(root=root, step=step, strict=strict, fallback=fallback, rng=rng)
    _check_request(request)
    _settle(given.group)
    coordinator = Coordinator(given.group, root)
    looks = 0
    while True:
        looks += 1
        tried = folders_to_try(coordinator, given, request)
        try:
            return _load_first(tried, coordinator, given, request)
        except CheckpointError:
            if looks == _MOST_LOOKS or not went_away(coordinator, tried):
                raise


def _load_first(
    tried: Sequence[tuple[int, Path]],
    coordinator: Coordinator,
    given: CheckpointItems,
    request: Request,
) -> Loaded:
    """Load the first step that is whole."""
    skipped: dict[int, str] = {}
    for found, folder in tried:
        try:
            loaded = load_step(coordinator, given, request, folder)
        except CheckpointCorrupt as error:
            if not request.fallback:
                raise
            warnings.warn(f"a damaged checkpoint was passed over: {error}", stacklevel=3)
            skipped[found] = str(error)
        else:
            _count_on(loaded.step, given)
            return replace(loaded, skipped=skipped)
    raise CheckpointNotFound(
        "no step is whole:\n" + "\n".join(f"  {one}" for one in skipped.values()), request.root
    )


def steps(directory: Folder) -> list[int]:
    """The steps that were committed in ``directory``, oldest first; empty if it is not there.

    Raises:
        CheckpointError: it cannot be read.
    """
    root = _folder(directory)
    try:
        return files.steps(root)
    except OSError as error:
        raise named(error, None) from error


def _given_items(
    first: Mapping[str, object], state: Mapping[str, object], group: Group | None
) -> CheckpointItems:
    model, optimizer = first["model"], first["optimizer"]
    checks.instance("model", model, nn.Module, or_none=True)
    checks.instance("optimizer", optimizer, Optimizer, or_none=True)
    checks.instance("group", group, Group, or_none=True)
    given = {name: one for name, one in first.items() if one is not None}
    return CheckpointItems.sort({**given, **state}, group)


def _check_request(request: Request) -> None:
    for name in ("strict", "fallback", "rng"):
        checks.flag(name, getattr(request, name))
    if request.step is not None:
        checks.integer("step", request.step, high=MAX_STEP)


def _count_on(step: int, given: CheckpointItems) -> None:
    """Have reports of failures count the steps of an optimizer from the one that was loaded."""
    world = entered()
    if given.optimizers and world is not None:
        world.step = step


def _settle(group: Group | None) -> None:
    """Wait for the save of ``group`` that is under way; raise what went wrong with it."""
    background = Background.known(group)
    if background is not None:
        background.settle()


def _begun(
    call: str,
    directory: Folder,
    step: int,
    given: CheckpointItems,
    *,
    keep: int | None,
    rng: bool,
) -> Saving:
    """A save whose arguments are right, and which all ranks have begun."""
    checks.flag("rng", rng)
    step = checks.integer("step", step, high=MAX_STEP)
    root = _folder(directory)
    keep = None if keep is None else checks.integer("keep", keep, low=1)
    _settle(given.group)
    saving = Saving(Coordinator(given.group, root), root, step, keep)
    saving.begin(call, given, rng=rng)
    return saving


def _folder(directory: Folder) -> Path:
    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    try:
        if isinstance(path, str) and path and b"\0" not in os.fsencode(path):
            return Path(os.path.abspath(path))
    except UnicodeEncodeError:
        pass  # no file can have this name
    except OSError as error:  # there is no current folder any more
        raise named(error, None) from error
    raise ArgumentError(f"directory is {directory!r:.80}; give the path of a folder")
