"""One unit while it runs: its parameters are this rank's shards, or unsharded; never a mixture."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from itertools import repeat
from operator import attrgetter
from typing import final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.comm.group import Group
from echelon.errors import StateError
from echelon.events import PeakBytes
from echelon.fsdp.gradients import GradientShard
from echelon.fsdp.storage import Storage

_version = attrgetter("_version")
_no_modes = torch._C.DisableTorchFunction  # simulated ranks have modes, of no use to what is below


class UnitState(Enum):
    """What ``.data`` of a unit's parameters is on this rank, and what is allocated.

    ::

        SHARDED ── prefetch() ──> UNSHARDING ── unshard() ──> UNSHARDED ── hide() ──> HIDDEN
           └────────────────── unshard() ────────────────────────^ ^──── unshard() ─────┘
           ^──── reshard(), from each of the others
    """

    SHARDED = "shards are shown, and nothing else is allocated"
    UNSHARDING = "shards are shown; unsharded parameters are on their way"
    UNSHARDED = "unsharded parameters are shown; the module may compute"
    HIDDEN = "shards are shown; unsharded parameters are kept for the next unshard"

    __hash__ = object.__hash__  # that of Enum is Python, and runs six times a unit and step


SHARDED, UNSHARDING, UNSHARDED, HIDDEN = UnitState

_NEXT = {
    SHARDED: (UNSHARDING,),
    UNSHARDING: (UNSHARDED, SHARDED),
    UNSHARDED: (HIDDEN, SHARDED),
    HIDDEN: (UNSHARDED, SHARDED),
}


@final
class Unit:
    """The storages of one module, and whether its parameters are unsharded now.

    Attributes:
        name: of its module in the model; empty for the root.
        module: what is called.
        storages: its memory, one for each combination of dtypes and ``requires_grad``.
        gradient_shards: the gradients of those that need one.
        trainable: its parameters that need a gradient, in the order of ``gradient_shards``.
        communicates: whether an unshard communicates.
        state: what ``.data`` is now.
        num_unshards: how often it was unsharded.
        unsharded_bytes: of all units together.
        stays_unsharded: whether ``reshard`` only hides the unsharded parameters.
        in_forward: the same, while a backward inside of its forward runs.
        pinned: whether unsharded parameters are shown until this is set to False.
        num_recast: trainable parameters whose shards have another dtype or device.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        storages: Sequence[Storage],
        gradient_shards: Sequence[GradientShard],
        group: Group,
        unsharded_bytes: PeakBytes,
    ) -> None:
        self.name, self.module = name, module
        self.storages, self.gradient_shards = tuple(storages), tuple(gradient_shards)
        trainable = [shard.storage for shard in gradient_shards]
        self.trainable: list[nn.Parameter] = [p for storage in trainable for p in storage.params]
        self.communicates = any(storage.communicates for storage in storages)
        self.state = SHARDED
        self.num_unshards = 0
        self.stays_unsharded = self.pinned = self.in_forward = False
        self.unsharded_bytes = unsharded_bytes
        self._nbytes = 0  # of these
        self._world_rank = group.ranks[group.rank]
        self._params: list[nn.Parameter] = [p for storage in storages for p in storage.params]
        self._unsharded: list[Tensor] = [t for storage in storages for t in storage.unsharded]
        self._shards: list[Tensor] = [t for storage in storages for t in storage.shards]
        self.num_recast = sum(
            (tensor.dtype, tensor.device) != (shard.dtype, shard.device)
            for storage in trainable
            for tensor, shard in zip(storage.unsharded, storage.shards, strict=True)
        )

    def __repr__(self) -> str:
        return f"Unit({self.label!r}, {len(self._params)} parameters, {self.state.name})"

    @property
    def label(self) -> str:
        """What errors and events call it."""
        return self.name or "root"

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different shards of it."""
        return any(storage.sharded for storage in self.storages)

    @property
    def is_unsharded(self) -> bool:
        """Whether unsharded parameters are shown."""
        return self.state is UNSHARDED

    @property
    def has_unsharded(self) -> bool:
        """Whether unsharded parameters are there, shown or not."""
        return self.state is UNSHARDED or self.state is HIDDEN

    # Unshard and reshard ---------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin an unshard that the next ``unshard`` ends. All ranks call it."""
        if self.state is SHARDED:
            for storage in self.storages:
                storage.unshard(ahead=True)
            self._enter(UNSHARDING)
            self._launched("fsdp.prefetch")

    def unshard(self) -> None:
        """Show unsharded parameters. All ranks call it where that communicates."""
        if self.state is UNSHARDED:
            return
        if self.state is SHARDED:
            for storage in self.storages:
                storage.unshard()
            self._enter(UNSHARDING)
            self._launched("fsdp.gather")
        if self.state is UNSHARDING:
            self.wait_for_unshard()
        self._show(self._unsharded)
        self._enter(UNSHARDED)

    def wait_for_unshard(self) -> None:
        """Return when unsharded parameters are valid; the current stream waits for them."""
        for storage in self.storages:
            storage.wait_for_unshard()

    def unshard_for_others(self) -> None:
        """Take part in an unshard that other ranks need. All ranks call it.

        Where unsharded parameters are there already, they come again with the same values.
        """
        if self.state is UNSHARDING:
            self.wait_for_unshard()
        for storage in self.storages:
            storage.unshard()
        self._launched("fsdp.gather")
        if self.state is SHARDED:
            self._enter(UNSHARDING)
        if self.state is UNSHARDING:
            self.reshard()
        else:
            self.wait_for_unshard()

    def unshard_privately(self) -> None:
        """Show unsharded parameters that no other rank sees, until the next reshard."""
        self.unshard()
        self._show([copy for storage in self.storages for copy in storage.private_copies()])

    def hide(self) -> None:
        """Show this rank's shards, but keep the unsharded parameters for the next unshard."""
        if self.state is UNSHARDED and not self.pinned:
            self._show(self._shards)
            self._enter(HIDDEN)

    def reshard(self) -> None:
        """Show this rank's shards, and give the memory of unsharded parameters back."""
        if self.stays_unsharded or self.pinned or self.in_forward:
            self.hide()
            return
        if self.state is SHARDED:
            return
        if self.state is UNSHARDING:
            self.wait_for_unshard()
        self._show(self._shards)
        for storage in self.storages:
            storage.reshard()
        self._enter(SHARDED)
        self._report("fsdp.release")

    def _show(self, values: Sequence[Tensor]) -> None:
        # Runs four times a step: a loop that stays in C.
        with _no_modes():
            deque(map(setattr, self._params, repeat("data"), values), maxlen=0)

    def _enter(self, new: UnitState) -> None:
        if new not in _NEXT[self.state]:
            allowed = ", ".join(state.name for state in _NEXT[self.state])
            raise StateError(
                f"unit {self.label!r} is {self.state.name} ({self.state.value}) "
                f"and cannot become {new.name}; allowed next: {allowed}"
            )
        self.state = new

    def _launched(self, event: str) -> None:
        self.num_unshards += 1
        self._report(event)

    def _report(self, event: str) -> None:
        """Note the bytes of unsharded parameters, and tell who listens."""
        before, self._nbytes = self._nbytes, 0
        for storage in self.storages:
            self._nbytes += storage.unsharded_nbytes
        self.unsharded_bytes.add(self._nbytes - before)
        if events.listening():
            nbytes = sum(one.layout.numel * one.compute_dtype.itemsize for one in self.storages)
            events.emit(event, rank=self._world_rank, unit=self.label, nbytes=nbytes)

    # Checks around a forward -----------------------------------------------------------------

    def versions(self) -> Sequence[object]:
        """What changes when somebody writes into a shown parameter, or gives it other memory."""
        with _no_modes():
            return [*map(_version, self._params), *map(Tensor.data_ptr, self._params)]

    def _written_since(self, before: Sequence[object]) -> str | None:
        """The name of a parameter that somebody wrote into since ``versions()`` was ``before``."""
        now = self.versions()
        if now == before:
            return None
        changed = next(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
        members = [member for storage in self.storages for member in storage.members]
        return members[changed % len(members)].name

    def check_unwritten(self, before: Sequence[object], *, in_forward: bool = True) -> None:
        """Compare ``versions()`` with those before a forward, or before ``full_parameters()``.

        Raises:
            StateError: they differ; names the parameter.
        """
        name = self._written_since(before)
        if name is not None and not in_forward:
            raise StateError(
                f"parameter {name!r} was written inside full_parameters(), where that is lost "
                "or seen by some ranks only: use full_parameters(writeback=True)"
            )
        if name is not None:
            raise StateError(
                f"the forward of unit {self.label!r} wrote into parameter {name!r}, or gave it "
                "other memory. All ranks share it, so what a rank writes would be lost or half "
                "read by others (as with nn.Embedding(max_norm=...)): compute a new tensor from "
                "the parameter, keep what changes in a buffer, write between steps inside `with "
                "model.full_parameters(writeback=True):`, or name its module in ignored="
            )

    def check_not_inside(self, tensor: Tensor) -> None:
        """Check that ``tensor``, which outlives a forward, lies in no unsharded parameters.

        Raises:
            StateError: it does; its memory may be given back at any time.
        """
        if not tensor.numel():
            return
        at = tensor.data_ptr()
        for storage in self.storages:
            if storage.sharded and storage.contains(at):
                raise StateError(
                    f"unit {self.label!r} returned a view of its own parameters, "
                    f"{list(tensor.shape)}, whose memory is given back after its forward: return "
                    "a clone(), or make no unit of that module, so that the one around it owns it"
                )
