"""One unit while it runs: its parameters are this rank's parts, or whole; never a mixture."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.comm.group import Group
from echelon.errors import StateError
from echelon.fsdp.gradients import GradientShard
from echelon.fsdp.level import Level
from echelon.fsdp.storage import Storage

_version = attrgetter("_version")
_no_modes = torch._C.DisableTorchFunction  # simulated ranks have modes, of no use to what is below


@final
class Unit:
    """The storages of one module, and whether its parameters are whole now.

    ::

        released ── gather() ──> gathered ── release() ──> released
        .data: own part          .data: whole parameter    .data: own part
                                 gathered ── hide() ─────> released, and the next gather is free
        released ── prefetch() ─────────────────────────> released, and the next gather is short

    Attributes:
        name: of its module in the model; empty for the root.
        module: what is called.
        storages: its memory, one for each combination of dtypes and ``requires_grad``.
        shards: the gradients of those that need one.
        trainable: its parameters that need a gradient, in the order of ``shards``.
        num_gathers: how often it was made whole.
        level: the bytes of whole parameters of all units together.
        stays: whether ``release`` keeps the whole parameters, for the next ``gather``.
        in_forward: the same, while a backward inside of its forward runs.
        pinned: whether whole parameters are shown all the time.
        num_recast: trainable parameters whose parts have another dtype or device than the whole.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        storages: Sequence[Storage],
        shards: Sequence[GradientShard],
        group: Group,
        level: Level,
    ) -> None:
        self.name, self.module = name, module
        self.storages, self.shards = tuple(storages), tuple(shards)
        self.trainable: list[nn.Parameter] = [p for shard in shards for p in shard.storage.params]
        self.num_gathers = 0
        self.stays = self.pinned = self.in_forward = False
        self.level = level
        self._whole_nbytes = 0
        self._gathered = False
        self._kept = False  # whole parameters are there, though they are not shown
        self._coming = False  # a gather is under way
        self._moves = any(one.moves for one in storages)
        self._world_rank = group.ranks[group.rank]
        self._params: list[nn.Parameter] = [p for one in storages for p in one.params]
        self._wholes: list[Tensor] = [whole for one in storages for whole in one.wholes]
        self._locals: list[Tensor] = [part for one in storages for part in one.locals]
        self.num_recast = sum(
            (whole.dtype, whole.device) != (part.dtype, part.device)
            for shard in shards
            for whole, part in zip(shard.storage.wholes, shard.storage.locals, strict=True)
        )

    def __repr__(self) -> str:
        state = "gathered" if self._gathered else "released"
        return f"Unit({self.label!r}, {len(self._params)} parameters, {state})"

    @property
    def label(self) -> str:
        """What errors and events call it."""
        return self.name or "root"

    @property
    def gathered(self) -> bool:
        """Whether parameters are whole."""
        return self._gathered

    @property
    def held(self) -> bool:
        """Whether whole parameters are there, shown or not."""
        return self._gathered or self._kept

    @property
    def moves(self) -> bool:
        """Whether a gather communicates."""
        return self._moves

    @property
    def coming(self) -> bool:
        """Whether a gather is under way that nobody has waited for."""
        return self._coming

    def prefetch(self) -> None:
        """Begin a gather that the next ``gather`` ends. All ranks call it."""
        if not (self.held or self._coming):
            self._begin(ahead=True)

    def join(self) -> None:
        """Take part in a gather that other ranks need, and give it back. All ranks call it."""
        if self._coming:
            self._arrive()
        self._begin(ahead=False)
        if self.held:
            self._arrive()  # with the values that are there
        else:
            self.release()

    def gather(self) -> None:
        """Make the parameters whole. All ranks call it where parts are not shared memory."""
        if self._gathered:
            return
        if not self._kept:
            if not self._coming:
                self._begin(ahead=False)
            self._arrive()
        self._become(self._wholes)
        self._gathered, self._kept = True, False

    def isolate(self) -> None:
        """Show whole parameters that no other rank sees, until the next release."""
        self.gather()
        self._become([whole for storage in self.storages for whole in storage.isolated()])

    def _begin(self, *, ahead: bool) -> None:
        for storage in self.storages:
            storage.gather(ahead)
        self._weigh()
        self._coming = True
        self.num_gathers += 1
        self._emit("fsdp.prefetch" if ahead else "fsdp.gather")

    def _arrive(self) -> None:
        for storage in self.storages:
            storage.arrive()
        self._coming = False

    def hide(self) -> None:
        """Show this rank's parts, but keep the whole parameters for the next ``gather``."""
        if self._gathered and not self.pinned:
            self._become(self._locals)
            self._gathered, self._kept = False, True

    def release(self) -> None:
        """Make the parameters this rank's parts again, and give the memory back."""
        if self.stays or self.pinned or self.in_forward:
            self.hide()
            return
        if self._coming:
            self._arrive()
        elif not self.held:
            return
        self._become(self._locals)
        for storage in self.storages:
            storage.release()
        self._weigh()
        self._gathered = self._kept = False
        self._emit("fsdp.release")

    def versions(self) -> Sequence[object]:
        """What changes when somebody writes into a whole parameter, or gives it other memory."""
        with _no_modes():
            return [*map(_version, self._params), *map(Tensor.data_ptr, self._params)]

    def written(self, before: Sequence[object]) -> str | None:
        """The name of a parameter that somebody wrote into since ``versions()`` was ``before``."""
        now = self.versions()
        if now == before:
            return None
        changed = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
        members = [member for one in self.storages for member in one.members]
        return members[changed % len(members)].name

    def check_unwritten(self, before: Sequence[object]) -> None:
        """Compare ``versions()`` with what they were before a forward.

        Raises:
            StateError: they differ; names the parameter.
        """
        name = self.written(before)
        if name is not None:
            raise StateError(
                f"the forward of unit {self.label!r} wrote into parameter {name!r}, or gave it "
                "other memory. All ranks share it, so what a rank writes would be lost or half "
                "read by others (as with nn.Embedding(max_norm=...)): compute a new tensor from "
                "the parameter, keep what changes in a buffer, write between steps inside `with "
                "model.full_parameters(writeback=True):`, or name its module in ignored="
            )

    def check_not_inside(self, tensor: Tensor) -> None:
        """Check that ``tensor``, which outlives a forward, does not lie in whole parameters.

        Raises:
            StateError: it does; its memory may be given back at any time.
        """
        if not tensor.numel():
            return
        at = tensor.data_ptr()
        for one in self.storages:
            if one.sharded and one.holds(at):
                raise StateError(
                    f"unit {self.label!r} returned a view of its own parameters, "
                    f"{list(tensor.shape)}, whose memory is given back after its forward: return "
                    "a clone(), or make no unit of that module, so that the one around it owns it"
                )

    def _weigh(self) -> None:
        before, self._whole_nbytes = self._whole_nbytes, 0
        for storage in self.storages:
            self._whole_nbytes += storage.whole_nbytes
        self.level.grow(self._whole_nbytes - before)

    def _become(self, values: Sequence[Tensor]) -> None:
        # Runs four times a step: a loop that stays in C.
        with _no_modes():
            deque(map(setattr, self._params, repeat("data"), values), maxlen=0)

    def _emit(self, name: str) -> None:
        if events.listening():
            nbytes = sum(one.cut.numel * one.compute_dtype.itemsize for one in self.storages)
            events.emit(name, rank=self._world_rank, unit=self.label, nbytes=nbytes)
