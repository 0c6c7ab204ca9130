"""``save``, ``async_save``, ``load``, ``steps``, ``prepare_run``: states in folders of steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from echelon import checks
from echelon.checkpoint.async_save import AsyncSave, AsyncSaver
from echelon.checkpoint.coordinator import Coordinator, named
from echelon.checkpoint.items import CheckpointItems
from echelon.checkpoint.loading import (
    Loaded,
    Request,
    folders_to_try,
    load_step,
)
from echelon.checkpoint.place import Folder, place_of, storage_of
from echelon.checkpoint.records import MAX_STEP, step_name
from echelon.checkpoint.saving import UNDER_WAY, SaveOptions, Saving, SkippedSave
from echelon.checkpoint.step_storage import Place
from echelon.checkpoint.tried_steps import TriedSteps
from echelon.comm.group import Group
from echelon.diagnosis.rank_time import during
from echelon.diagnosis.step_rows import Activity
from echelon.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
)
from echelon.launch.run import entered

_MAX_TRIES = 10  # of a load whose steps another job removes meanwhile


@during(Activity.SAVING)
def save(
    directory: Folder,
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    rng: bool = True,
    group: Group | None = None,
    **state: object,
) -> Place:
    """Save the state of a training as one step. All ranks that share it call it.

    Law: after a crash at any instant the step is complete, or it does not exist.

    In a replay of a step (``ec.replay``) nothing is written.

    Args:
        directory: of the run; each step is a folder in it. On several hosts, one that all see. A
            path, or the URL of an object store, such as ``s3://bucket/runs/a``.
        step: number of the step; a step is never saved twice, unless ``overwrite``.
        model: plain, or shared by ``DDP``, ``FSDP``, ``Pipeline`` or any of them inside another.
        optimizer: over its parameters.
        keep: how many steps to leave, this one among them; None: all.
        overwrite: whether a step of this number is replaced, at one instant. Later steps, which are
            of the training that is left, are removed then. A folder of its name with anything that
            no save has written is refused.
        rng: whether the random generators of every rank are saved.
        group: the ranks that share the state; needed only for plain modules on several ranks.
        state: anything else by name: further models and optimizers, objects that have
            ``state_dict()`` and ``load_state_dict()``, and nested Python values and tensors.

    Returns:
        The folder of the step.

    Raises:
        ArgumentError: an argument or a value cannot be saved, or ranks ask for different saves.
        CheckpointError: there is such a step, or the folder has those of an integration; or a rank
            could not write: names it, the path and the errno. Nothing is committed, and older steps
            are as they were.
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
    items = _sorted_items({"model": model, "optimizer": optimizer}, state, group)
    options = SaveOptions(keep=keep, overwrite=overwrite)
    return _begin("save", directory, step, items, options, rng=rng).finish()


def save_as(
    writer: str,
    directory: Folder,
    *,
    step: int,
    keep: int | None,
    group: Group,
    items: Mapping[str, object],
) -> Place:
    """As ``save``, for an integration, whose steps nobody else removes or adds to.

    Args:
        writer: its name.
        items: what is saved, by name.
    """
    main = {name: items.get(name) for name in ("model", "optimizer")}
    rest = {name: item for name, item in items.items() if name not in main}
    options = SaveOptions(keep=keep, writer=writer)
    sorted_items = _sorted_items(main, rest, group)
    return _begin("save", directory, step, sorted_items, options, rng=True).finish()


@during(Activity.SAVING)
def async_save(
    directory: Folder,
    *,
    step: int,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    rng: bool = True,
    group: Group | None = None,
    **state: object,
) -> AsyncSave:
    """Like ``save``, but return when everything is copied, and write while training goes on.

    One save of a group is under way at a time; the next waits for it. The copy takes as much memory
    of the host as this rank writes, and is kept for the next save.

    Args:
        directory: this and all other arguments as for ``save``.

    Raises:
        ArgumentError, StateError, CheckpointTooNew: as ``save``.
        CheckpointError: the save before this one failed, or this one cannot begin. What goes wrong
            later is raised as ``AsyncSave`` says.
    """
    items = _sorted_items({"model": model, "optimizer": optimizer}, state, group)
    options = SaveOptions(keep=keep, overwrite=overwrite)
    saving = _begin("async_save", directory, step, items, options, rng=rng)
    if isinstance(saving, SkippedSave):
        return AsyncSave(saving, None, lambda finish: lambda: None)
    try:  # from here on all ranks are in async_save
        return AsyncSaver.of(items.group).start(saving)
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
    """Load a step in place into the objects given. All ranks that share them call it.

    The number of ranks and the techniques may differ from those of the save. What is not given is
    not loaded; Python values are returned in the result.

    Law: either everything is loaded, or an error is raised and nothing has changed. Before anything
    changes, each byte of the checkpoint is compared with its checksum.

    Args:
        directory: of the run, or of one of its steps.
        model: as for ``save``.
        optimizer: as for ``save``.
        step: the step to load; None: the newest.
        strict: whether everything must fit. If not, what fits is loaded, dtypes are converted, a
            parameter gets all of its optimizer state or none, and the result says what was left.
        fallback: if the step is damaged, take the newest older one that is intact, and warn.
        rng: whether the random generators go on from their saved states.
        group: as for ``save``.
        state: further models, optimizers and objects with ``load_state_dict()``, by the names under
            which they were saved.

    Returns:
        The step, the values, and with ``strict=False`` what did not fit.

    Raises:
        CheckpointNotFound: there is no such step, or no step at all.
        CheckpointCorrupt: bytes are missing or differ; names file and tensor.
        CheckpointTooNew: a newer version of echelon has saved the step; with ``fallback``, too.
        CheckpointMismatch: with ``strict``: lists what is missing, unexpected and different.
        CheckpointError: it cannot be read; or an object or a module does not take its state, after
            others have taken theirs.
        ArgumentError: something given cannot take a state, or ranks ask for different loads.
    """
    items = _sorted_items({"model": model, "optimizer": optimizer}, state, group)
    root = place_of(directory)
    request = Request(root=root, step=step, strict=strict, fallback=fallback, rng=rng)
    _check_request(request)
    _settle(items.group)
    return _load_until_it_stays(Coordinator(items.group, root), items, request)


def _load_until_it_stays(
    coordinator: Coordinator, items: CheckpointItems, request: Request
) -> Loaded:
    """Load a step that no other job has removed or replaced meanwhile."""
    for _ in range(_MAX_TRIES):
        tried = TriedSteps(coordinator, folders_to_try(coordinator, items, request))
        try:
            loaded = _load_first(tried.steps, coordinator, items, request)
        except CheckpointError:
            if not tried.have_changed():
                raise
        else:
            if not tried.was_replaced(loaded.step):
                return loaded
    raise CheckpointError(
        f"its steps were removed or replaced during each of {_MAX_TRIES} tries to load one: load "
        "when nobody saves into it",
        request.root,
    )


def _load_first(
    tried: Sequence[tuple[int, Place]],
    coordinator: Coordinator,
    items: CheckpointItems,
    request: Request,
) -> Loaded:
    """Load the first step that is intact."""
    skipped: dict[int, str] = {}
    for number, folder in tried:
        try:
            loaded = load_step(coordinator, items, request, folder)
        except CheckpointCorrupt as error:
            if not request.fallback:
                raise
            warnings.warn(f"a damaged checkpoint was passed over: {error}", stacklevel=3)
            skipped[number] = str(error)
        else:
            _set_world_step(loaded.step, items)
            return replace(loaded, skipped=skipped)
    problems = "\n".join(f"  {problem}" for problem in skipped.values())
    raise CheckpointNotFound(f"no step is whole:\n{problems}", request.root)


def steps(directory: Folder) -> list[int]:
    """The steps that were committed in ``directory``, oldest first; empty if it does not exist.

    Args:
        directory: of the run.

    Raises:
        CheckpointError: it cannot be read.

    Example:
        >>> steps("/nowhere")
        []
    """
    root = place_of(directory)
    try:
        return storage_of(root).steps(root)
    except OSError as error:
        raise named(error, None) from error


def prepare_run(
    directory: Folder, *, after: int | None = None, group: Group | None = None
) -> Place:
    """Make the folder of a run, and learn before the first step what its first save would raise.

    A training calls it when it begins: with the step that it has loaded, or without one. Steps that
    it would come to again are then an error at once, and not after hours. A training that is to
    replace them saves with ``overwrite=True``, and does not call it. In a replay it does nothing.

    Args:
        directory: of the run, as for ``save``.
        after: the step that was loaded; None: the training begins.
        group: the ranks, all of which call it and raise the same; None: this rank looks alone.

    Returns:
        The folder of the run.

    Raises:
        ArgumentError: ``directory`` is no place, or the ranks name different ones.
        CheckpointError: there are steps later than ``after``; or the folder cannot be made, is that
            of a step, has the steps of an integration, or another save into it is under way.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> prepare_run(folder).name == save(folder, step=3, epoch=1).parent.name
        True
        >>> prepare_run(folder, after=3) == prepare_run(folder, after=7)
        True
    """
    root = place_of(directory)
    after = None if after is None else checks.integer("after", after, high=MAX_STEP)
    checks.instance("group", group, Group, or_none=True)
    world = entered()
    if world is not None and world.is_replay:
        return root
    coordinator = Coordinator(group, root)
    request = {"directory": str(root), "after": after}
    is_first = coordinator.rank == 0

    def look() -> None:
        if is_first:
            _check_run(root, -1 if after is None else after)

    coordinator.run_on_all("a run to prepare", look, request)
    return root


def _check_run(root: Place, after: int) -> None:
    """Raise now what the first save of a resumed training would raise."""
    storage = storage_of(root)
    with ExitStack() as lock:
        try:
            storage.prepare(root, lock)
        except BlockingIOError as error:
            raise CheckpointError(UNDER_WAY, root) from error
        storage.check_writer(root, None)
        later = [step for step in storage.steps(root) if step > after]
    if later:
        steps = f"step {later[0]}" if len(later) == 1 else f"{len(later)} steps, up to {later[-1]}"
        begins = "begins" if after < 0 else f"goes on after step {after}"
        raise CheckpointError(
            f"this training {begins}, and the folder has {steps} already, which its saves would "
            "come to again: go on from there by ec.load, take another folder, or save with "
            "overwrite=True and leave prepare_run out",
            root,
        )


def _sorted_items(
    main: Mapping[str, object], state: Mapping[str, object], group: Group | None
) -> CheckpointItems:
    checks.instance("model", main["model"], nn.Module, or_none=True)
    checks.instance("optimizer", main["optimizer"], Optimizer, or_none=True)
    checks.instance("group", group, Group, or_none=True)
    given = {name: item for name, item in main.items() if item is not None}
    return CheckpointItems.sort({**given, **state}, group)


def _check_request(request: Request) -> None:
    for name in ("strict", "fallback", "rng"):
        checks.flag(name, getattr(request, name))
    if request.step is not None:
        checks.integer("step", request.step, high=MAX_STEP)


def _set_world_step(step: int, items: CheckpointItems) -> None:
    """Have reports of failures count steps from the one that was loaded."""
    world = entered()
    if items.optimizers and world is not None:
        world.step = step


def _settle(group: Group | None) -> None:
    """Wait for the save of ``group`` that is under way, and raise its error if it failed."""
    background = AsyncSaver.known(group)
    if background is not None:
        background.settle()


def _begin(
    call: str,
    directory: Folder,
    step: int,
    items: CheckpointItems,
    options: SaveOptions,
    *,
    rng: bool,
) -> Saving | SkippedSave:
    """Check the arguments of a save, and begin it on all ranks; not in a replay."""
    checks.flag("rng", rng)
    checks.flag("overwrite", options.overwrite)
    if options.keep is not None:
        options = replace(options, keep=checks.integer("keep", options.keep, low=1))
    step = checks.integer("step", step, high=MAX_STEP)
    root = place_of(directory)
    world = entered()
    if world is not None and world.is_replay:
        return SkippedSave(root / step_name(step))
    _settle(items.group)
    saving = Saving(Coordinator(items.group, root), root, step, options)
    saving.begin(call, items, rng=rng)
    return saving
