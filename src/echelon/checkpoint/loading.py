"""How ranks load together.

::

    rank 0   [1] chooses the step and gives its manifest to all
    each     [2] plans which ranges it reads, and reports what does not fit
    each     [3] compares its share of all bytes with their checksums, and reads into new memory:
                 states of a new optimizer, values
    each     [4] gives optimizers, modules and objects their states; if one of them refuses,
                 optimizers are restored, and parameters have not changed
    each     [5] reads into the memory of the model

A corrupt byte is an error of [3] on all ranks, before anything that the user can see has changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch

from echelon import events
from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.items import RANDOM, CheckpointItems
from echelon.checkpoint.load_plan import LoadPlan, ReadItem
from echelon.checkpoint.optimizer_loading import OptimizerLoader
from echelon.checkpoint.place import place_of, storage_of
from echelon.checkpoint.random_states import GENERATORS, RandomStates
from echelon.checkpoint.records import step_name, step_of
from echelon.checkpoint.saved_step import PieceKey, SavedStep, Share, difference
from echelon.checkpoint.sections import Json
from echelon.checkpoint.step_storage import Place
from echelon.checkpoint.tensors import check_writable
from echelon.errors import (
    ArgumentError,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
)


@final
@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: the step that was loaded.
        path: its folder.
        values: what was saved and is no model, optimizer or object with a state, by name.
        missing: names that the checkpoint does not have, with ``strict=False``.
        unexpected: names in the checkpoint that nothing here took, with ``strict=False``.
        differing: what was converted to another dtype, or left out because its shape or its group
            of parameters differs, by name, with ``strict=False``.
        apart: names whose values differed between ranks, where another number of ranks has loaded:
            all got the values of the first rank. Random generators went on from their own states,
            and those of new ranks from new ones.
        skipped: with ``fallback``: newer steps that are damaged, and how.
    """

    step: int
    path: Place
    values: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    differing: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    skipped: Mapping[int, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks of a load.

    Attributes:
        root: the folder of a run, or of one step.
        step: the step to load; None: the newest.
        strict: whether everything has to fit.
        fallback: whether an older step will do where newer ones are damaged.
        rng: whether random generators are restored.
    """

    root: Place
    step: int | None
    strict: bool
    fallback: bool
    rng: bool


def folders_to_try(
    coordinator: Coordinator, items: CheckpointItems, request: Request
) -> list[tuple[int, Place]]:
    """The steps to try, in that order, with their folders. All ranks call it.

    Raises:
        CheckpointNotFound: there is no such step.
        ArgumentError: the ranks are asked for different loads, or something cannot be loaded.
    """
    fields: dict[str, Json] = {
        "call": "load",
        "directory": str(request.root),
        "step": request.step,
        "strict": request.strict,
        "fallback": request.fallback,
        "rng": request.rng,
        "names": items.names,
        "kinds": items.kinds,
    }

    def look() -> Json:
        _check_stateful(items)
        return _steps_to_try(request) if coordinator.rank == 0 else None

    steps = coordinator.run_on_all("a request to load", look, fields)[0]
    return [(step, place_of(folder)) for step, folder in steps]


def _steps_to_try(request: Request) -> list[tuple[int, str]]:
    root = request.root
    step_of_root = step_of(root.name)
    storage = storage_of(root)
    known = storage.steps(root)
    is_step = step_of_root is not None and not known and storage.is_step(root)
    if request.step is None and step_of_root is not None and is_step:
        return [(step_of_root, str(root))]
    newest = max(known, default=-1) if request.step is None else request.step
    if newest not in known:
        if request.step is None:
            raise CheckpointNotFound("no step was committed here", root)
        committed = ", ".join(map(str, known)) or "none"
        raise CheckpointNotFound(f"step {newest} is not there; committed: {committed}", root)
    tried = [step for step in reversed(known) if step <= newest]
    return [
        (step, str(root / step_name(step))) for step in tried[: None if request.fallback else 1]
    ]


def load_step(
    coordinator: Coordinator, items: CheckpointItems, request: Request, folder: Place
) -> Loaded:
    """Load one step. All ranks call it.

    Raises:
        CheckpointCorrupt: it is damaged; nothing was changed.
        CheckpointMismatch: with ``strict``, it is of another model or state; nothing was changed.
    """
    read = partial(storage_of(folder).read_manifest, folder)
    data = coordinator.broadcast_bytes("the manifest of a load", read)
    with ExitStack() as stack:
        loading = _Loading(coordinator, items, request, folder)
        coordinator.run_on_all("the plan of a load", lambda: loading.open(data, stack))
        loading.compare()
        facts = {"rank": coordinator.world_rank, "step": loading.step.manifest.step}
        with events.span("checkpoint.load", nbytes=loading.nbytes, **facts):
            coordinator.run_on_all("bytes of a load", loading.verify)
            try:
                coordinator.run_on_all("states of a load", loading.install)
            except BaseException:
                loading.undo()
                raise
            coordinator.run_on_all("the end of a load", loading.fill)
    return loading.loaded()


@final
class _Loading:
    """The load of one step: ``open``, ``compare``, ``verify``, ``install``, ``fill``."""

    def __init__(
        self, coordinator: Coordinator, items: CheckpointItems, request: Request, folder: Place
    ) -> None:
        self._coordinator, self._items, self._request = coordinator, items, request
        self._folder = folder
        self._optimizers: list[OptimizerLoader] = []
        self._states: dict[str, Any] = {}  # of objects, by name
        self._extras: list[tuple[str, torch.nn.Module, Any]] = []
        self._values: dict[str, Any] = {}
        self._random: Any = None
        self._unexpected: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the values that this rank gets; checksums make it read a share of all."""
        items = [*self._plan.in_place, *self._plan.new]
        return sum(item.values.nbytes for item in items)

    def open(self, data: bytes, stack: ExitStack) -> None:
        """[2] Read the manifest, and plan what is read. Nothing is changed."""
        self.step = stack.enter_context(SavedStep(self._folder, data))
        manifest, items = self.step.manifest, self._items
        rank, size = self._coordinator.rank, self._coordinator.size
        plan = self._plan = LoadPlan(
            manifest=manifest, path=str(self._folder), rank=rank, size=size
        )
        sections = self.step.sections
        for name, state in items.modules.items():
            if self._section(name, "module") is not None:
                for shard in state.tensors:
                    plan.add_read(shard)
                for extra in state.extras:
                    self._place_extra(sections[name]["extras"], extra.name, extra.module)
        for name, optimizer in items.optimizers.items():
            section = self._section(name, "optimizer")
            if section is not None:
                shards = items.shards_by_param
                self._optimizers.append(OptimizerLoader(name, optimizer, section, shards, plan))
        for name in items.objects:
            section = self._section(name, "object", "value")  # a dict may come from another format
            if section is not None:
                state = self._states[name] = plan.value(section, name)
                if section["kind"] == "value" and not isinstance(state, dict):
                    plan.differing[name] = "saved as value, here object"
        for name, section in sections.items():
            if section.get("kind") == "value" and name not in items.objects:
                self._values[name] = plan.value(section, name)
        if self._request.rng and sections.get(RANDOM, {}).get("kind") == "random":
            was_there = rank < plan.saved_size
            self._random = plan.value(sections[RANDOM], RANDOM, restores_per_rank=was_there)
            if plan.saved_size < min(2, size):  # one rank does not show what others would have had
                plan.not_restored.append(RANDOM)
        self._compare_ties()

    def _compare_ties(self) -> None:
        """Record which names of a tensor have other values in the step than its first name.

        Other formats have the values of each name.
        """
        for name, (saved, other) in self._plan.ties.items():
            what = difference(self.step, saved, self.step, other)
            if what is not None:
                problem = f"one tensor with {saved.name} here, saved apart: {what}"
                self._plan.differing[name] = problem

    def _section(self, name: str, *kinds: str) -> Json | None:
        """What the step has under a name; records what does not fit."""
        section = self.step.sections.get(name)
        if section is None:
            self._plan.missing.append(name)
        elif section.get("kind") not in kinds:
            self._plan.differing[name] = f"saved as {section.get('kind')}, here {kinds[0]}"
            return None
        return section

    def _place_extra(self, extras: Json, name: str, module: torch.nn.Module) -> None:
        if name not in extras:
            self._plan.missing.append(name)
            return
        self._extras.append((name, module, self._plan.value(extras[name], name)))

    def _expected(self) -> list[str]:
        """The names in the step of what was asked for."""
        asked = {*self._items.modules, *self._items.optimizers, *self._items.objects}
        names = {name for name in self.step.manifest.tensors if name.split("/", 1)[0] in asked}
        for name in self._items.optimizers:
            for group in self.step.sections.get(name, {}).get("groups", ()):
                names |= {f"{name}/{param}" for param in group["params"]}
        return sorted(names)

    def _used_bits(self) -> str:
        """Which of the expected names have a place on this rank, one bit each, in hex."""
        used = self._plan.used
        return hex(int("0" + "".join("01"[name in used] for name in self._expected()), 2))

    def compare(self) -> None:
        """[2] Put together what does not fit on any rank.

        Raises:
            CheckpointMismatch: with ``strict``, on all ranks.
        """
        plan = self._plan

        def report() -> Json:
            return {
                "missing": plan.missing,
                "differing": plan.differing,
                "used": self._used_bits(),
                "groups": [optimizer.found for optimizer in self._optimizers],
            }

        used = 0
        missing: dict[str, None] = {}
        differing: dict[str, str] = {}
        reports = self._coordinator.run_on_all("what fits of a load", report)
        for facts in reports:
            used |= int(facts["used"], 16)
            missing |= dict.fromkeys(facts["missing"])
            differing = facts["differing"] | differing
        for i, optimizer in enumerate(self._optimizers):
            differing |= optimizer.match([facts["groups"][i] for facts in reports])
        names = self._expected()
        self._unexpected = tuple(
            name for i, name in enumerate(names) if not used >> (len(names) - 1 - i) & 1
        )
        if self._request.strict and (missing or differing or self._unexpected):
            raise CheckpointMismatch(self._folder, [*missing], self._unexpected, differing)
        self._missing, self._differing = tuple(missing), differing

    def verify(self) -> None:
        """[3] Compare checksums, and read into new memory."""
        share = Share(self._coordinator.rank, self._coordinator.size)
        done: set[PieceKey] = set()
        for item in self._plan.new:
            done.update(self._read(item, share))
        self.step.verify(share, done)
        for item in self._plan.in_place:
            self.step.reach(item.saved, item.start, item.values.numel())
        check_writable((item.saved.name, item.values) for item in self._plan.in_place)
        if self._random is not None:
            self._random = self._random_states(self._random)

    def _random_states(self, saved: object) -> RandomStates:
        plan, device = self._plan, self._items.device
        states = RandomStates.of(saved, device, self._folder)
        if plan.rank < plan.saved_size:
            return states
        section = self.step.sections[RANDOM]
        differing = plan.differing_members(section, RANDOM) if plan.saved_size > 1 else GENERATORS
        return states.for_rank(plan.rank, differing, device)

    def _read(self, item: ReadItem, check: Share | None = None) -> list[PieceKey]:
        return self.step.read(item.saved, item.start, item.values, check)

    def install(self) -> None:
        """[4] Install what may be refused; the user's objects last, which cannot be undone."""
        for optimizer in self._optimizers:
            optimizer.install()
        for name, module, state in self._extras:
            with self._naming(name):
                module.set_extra_state(state)
        for name, state in self._states.items():
            with self._naming(name):
                self._items.objects[name].load_state_dict(state)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the object in an error that it raises when it takes its state."""
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"{name} does not take its state: {type(error).__name__}: {error}", self._folder
            ) from error

    def undo(self) -> None:
        """Restore the optimizers."""
        for optimizer in self._optimizers:
            optimizer.undo()

    def fill(self) -> None:
        """[5] Read into the model."""
        for state in self._items.modules.values():
            state.before_write()
        try:
            for item in self._plan.in_place:
                self._read(item)
        except (OSError, CheckpointCorrupt) as error:
            raise CheckpointError(
                f"could no longer be read when it was being loaded, so the model is changed in "
                f"part: load again ({error})",
                self._folder,
                errno=error.errno,
            ) from error
        if self._random is not None:
            self._random.restore(self._items.device)

    def loaded(self) -> Loaded:
        """The result for the user."""
        manifest = self.step.manifest
        threads = torch.get_num_threads()
        if manifest.threads and threads != manifest.threads[0]:
            warnings.warn(
                f"{self._folder} was saved with {manifest.threads[0]} torch threads and this rank "
                f"has {threads}: results will differ in their last bits",
                stacklevel=4,
            )
        return Loaded(
            step=manifest.step,
            path=self._folder,
            values=MappingProxyType(self._values),
            missing=self._missing,
            unexpected=self._unexpected,
            differing=MappingProxyType(self._differing),
            apart=tuple(dict.fromkeys(self._plan.not_restored)),
        )


def _check_stateful(items: CheckpointItems) -> None:
    if items.values:
        name, value = next(iter(items.values.items()))
        raise ArgumentError(
            f"{name} is a {type(value).__name__}, which cannot take a state back: leave it out, "
            "and find it in the values of the result"
        )
