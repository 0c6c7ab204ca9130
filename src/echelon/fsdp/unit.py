"""A unit while it runs: all its parameters are this rank's shards, or all are unsharded."""

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
from echelon.modules.memory_writes import KeepsMemory
from echelon.modules.replica_check import sum_of_bits
from echelon.modules.sharded_tensor import ShardedParameter

# The version counters of parameters and their addresses, of which one changes when somebody writes
# into a parameter or gives it other memory.
ParameterVersions = tuple[Sequence[int], Sequence[int]]

_version = attrgetter("_version")
_run_all = deque[object](maxlen=0).extend  # calls all that an iterator gives, by a loop in C
_no_modes = torch._C.DisableTorchFunction  # modes and subclasses would only cost time here


class UnitState(Enum):
    """What ``.data`` of a unit's parameters is on this rank, and what is allocated.

    ::

        SHARDED ── prefetch() ──> UNSHARDING ── unshard() ──> UNSHARDED ── hide() ──> HIDDEN
           └────────────────── unshard() ────────────────────────^ ^──── unshard() ─────┘
           ^──── reshard(), from each of the others
    """

    SHARDED = "shards are shown, and nothing else is allocated"
    UNSHARDING = "shards are shown, and the unshard has begun"
    UNSHARDED = "unsharded parameters are shown, so the module may compute"
    HIDDEN = "shards are shown, and unsharded parameters are kept for the next unshard"

    __hash__ = object.__hash__  # the hash of Enum is Python code, for every change of state


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
        name: the name of its module in the model; empty for the root.
        module: the module whose forward needs the parameters.
        storages: its memory, one for each combination of dtypes and ``requires_grad``.
        gradient_shards: the gradients of the storages that need one.
        trainable: its parameters that need a gradient, in the order of ``gradient_shards``.
        communicates: whether an unshard communicates.
        state: what ``.data`` of the parameters is now.
        num_unshards: the number of its unshards so far.
        memory: counts the bytes of unsharded parameters, of all units together.
        kept_between_passes: whether ``reshard`` only hides the unsharded parameters and keeps their
            memory, because a backward needs them next.
        in_outer_forward: whether a backward runs inside of its forward; then ``reshard`` only hides
            them, too.
        always_shown: whether unsharded parameters are shown, whatever is called.
        recast: those of ``trainable`` whose shards have another dtype or device.
        losing_writes: the storages of which a forward may not write unsharded parameters.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        storages: Sequence[Storage],
        gradient_shards: Sequence[GradientShard],
        group: Group,
        memory: PeakBytes,
    ) -> None:
        self.name, self.module = name, module
        self.storages, self.gradient_shards = tuple(storages), tuple(gradient_shards)
        trainable = [shard.storage for shard in gradient_shards]
        self.trainable: list[nn.Parameter] = [p for storage in trainable for p in storage.params]
        self.communicates = any(storage.communicates for storage in storages)
        self.state = SHARDED
        self.num_unshards = 0
        self.kept_between_passes = self.in_outer_forward = self.always_shown = False
        self.memory = memory
        self._unsharded_nbytes = 0  # as last reported
        self._world_rank = group.ranks[group.rank]
        self._params: list[nn.Parameter] = [p for storage in storages for p in storage.params]
        self.losing_writes = [storage for storage in storages if storage.loses_writes]
        self._set_ = [KeepsMemory(param) for param in self._params]
        self._find_memory()
        showing = [storage for storage in storages if storage.shows_parts]
        self._parts = [param for storage in showing for param in storage.params]
        self._classes = [cls for storage in showing for cls in storage.classes]
        _run_all(map(setattr, self._parts, repeat("__class__"), repeat(ShardedParameter)))
        self.recast = [p for storage in trainable if storage.is_recast for p in storage.params]

    def __repr__(self) -> str:
        return f"Unit({self.label!r}, {len(self._params)} parameters, {self.state.name})"

    @property
    def label(self) -> str:
        """The name in errors and events."""
        return self.name or "root"

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks have different shards of it."""
        return any(storage.sharded for storage in self.storages)

    @property
    def is_unsharded(self) -> bool:
        """Whether unsharded parameters are shown."""
        return self.state is UNSHARDED

    @property
    def has_unsharded(self) -> bool:
        """Whether unsharded parameters are allocated and valid, shown or not."""
        return self.state is UNSHARDED or self.state is HIDDEN

    # Unshard and reshard ---------------------------------------------------------------------

    def prefetch(self) -> None:
        """Begin an unshard that the next ``unshard`` completes. All ranks call it."""
        if self.state is SHARDED:
            self._launch("fsdp.prefetch", async_op=True)
            self._enter(UNSHARDING)

    def unshard(self) -> None:
        """Show unsharded parameters. All ranks call it where that communicates."""
        if self.state is UNSHARDED:
            return
        if self.state is SHARDED:
            self._launch("fsdp.gather")
            self._enter(UNSHARDING)
        if self.state is UNSHARDING:
            self.wait_for_unshard()
        self._show_whole(self._unsharded)
        self._enter(UNSHARDED)

    def _launch(self, event: str, *, async_op: bool = False) -> None:
        """Begin the unshards of all storages; if one raises, none has more memory than before."""
        try:
            for storage in self.storages:
                storage.unshard(async_op=async_op)
        except BaseException:
            if self.state is SHARDED:
                for begun in self.storages[: self.storages.index(storage)]:
                    begun.wait_for_unshard()
                    begun.reshard()
            raise
        self.num_unshards += 1
        self._report(event)

    def wait_for_unshard(self) -> None:
        """Make the current stream, or on the CPU the caller, wait for the unshard."""
        for storage in self.storages:
            storage.wait_for_unshard()

    def unshard_for_others(self) -> None:
        """Take part in an unshard that other ranks need. All ranks call it.

        Unsharded parameters that this rank has already are written again, with the same values.
        """
        if self.state is UNSHARDING:
            self.wait_for_unshard()
        self._launch("fsdp.gather")
        if self.state is SHARDED:
            self._enter(UNSHARDING)
        if self.state is UNSHARDING:
            self.reshard()
        else:
            self.wait_for_unshard()

    def unshard_privately(self) -> None:
        """Show unsharded parameters that no other rank sees, until the next reshard."""
        self.unshard()
        copies = [tensor for storage in self.storages for tensor in storage.private_copies()]
        self._show_whole(copies)

    def hide(self) -> None:
        """Show this rank's shards, but keep the unsharded parameters for the next unshard."""
        if self.state is UNSHARDED and not self.always_shown:
            self._show_shards()
            self._enter(HIDDEN)

    def reshard(self) -> None:
        """Show this rank's shards, and free the memory of unsharded parameters."""
        if self.kept_between_passes or self.in_outer_forward or self.always_shown:
            self.hide()
            return
        if self.state is SHARDED:
            return
        if self.state is UNSHARDING:
            self.wait_for_unshard()
        self._show_shards()
        for storage in self.storages:
            storage.reshard()
        self._enter(SHARDED)
        self._report("fsdp.release")

    def _find_memory(self) -> None:
        self._unsharded = [tensor for storage in self.storages for tensor in storage.unsharded]
        self._shards = [tensor for storage in self.storages for tensor in storage.shards]

    def keep_memory(self) -> None:
        """Let ``set_`` of a parameter to its own memory count as no write."""
        with _no_modes():
            _run_all(map(setattr, self._params, repeat("set_"), self._set_))

    def forget_memory(self) -> None:
        """Give the parameters torch's ``set_`` again."""
        attributes = map(vars, self._params)
        _run_all(map(dict.pop, attributes, repeat("set_"), repeat(None)))

    def take_replaced(self) -> None:
        """Keep values that users set by ``param.data = value`` while shards are shown."""
        have_changed = [storage.take_replaced() for storage in self.storages]
        if any(have_changed):
            self._find_memory()

    # These run several times a step for each unit, so the loops over the parameters stay in C.

    def _show_whole(self, values: Sequence[Tensor]) -> None:
        with _no_modes():
            _run_all(map(setattr, self._parts, repeat("__class__"), self._classes))
            _run_all(map(setattr, self._params, repeat("data"), values))

    def _show_shards(self) -> None:
        with _no_modes():
            _run_all(map(setattr, self._params, repeat("data"), self._shards))
            _run_all(map(setattr, self._parts, repeat("__class__"), repeat(ShardedParameter)))

    def _enter(self, new: UnitState) -> None:
        if new not in _NEXT[self.state]:
            allowed = ", ".join(state.name for state in _NEXT[self.state])
            raise StateError(
                f"unit {self.label!r} is {self.state.name} ({self.state.value}) "
                f"and cannot become {new.name}; allowed next: {allowed}"
            )
        self.state = new

    def _report(self, event: str) -> None:
        """Count the bytes of unsharded parameters, and emit an event."""
        before, self._unsharded_nbytes = self._unsharded_nbytes, 0
        for storage in self.storages:
            self._unsharded_nbytes += storage.unsharded_nbytes
        self.memory.add(self._unsharded_nbytes - before)
        if events.listening():
            nbytes = sum(
                storage.layout.numel * storage.compute_dtype.itemsize for storage in self.storages
            )
            events.emit(event, rank=self._world_rank, unit=self.label, nbytes=nbytes)

    # Checks around a forward -----------------------------------------------------------------

    def versions(self) -> ParameterVersions:
        """The versions of the parameters as they are shown now."""
        with _no_modes():
            return [*map(_version, self._params)], [*map(Tensor.data_ptr, self._params)]

    def written_since(self, before: ParameterVersions) -> str | None:
        """The name of a parameter that was written since ``versions()`` returned ``before``."""
        now = self.versions()
        if now == before:
            return None
        names = [member.name for storage in self.storages for member in storage.members]
        pairs = zip(zip(*before, strict=True), zip(*now, strict=True), strict=True)
        return next(name for name, (old, new) in zip(names, pairs, strict=True) if old != new)

    def check_unwritten(self, before: ParameterVersions) -> None:
        """Refuse a forward that wrote into a parameter; ``before`` has the versions before it."""
        name = self.written_since(before)
        if name is not None:
            raise self.refusal(name)

    def refusal(self, name: str) -> StateError:
        """The error for a forward that writes into parameter ``name``."""
        return StateError(
            f"the forward of unit {self.label!r} wrote into parameter {name!r}, or gave it "
            "other memory. All ranks share it, so what a rank writes would be lost or half "
            "read by others (as with nn.Embedding(max_norm=...)): compute a new tensor from "
            "the parameter, keep what changes in a buffer, write between steps inside `with "
            "model.full_parameters(writeback=True):`, or name its module in ignored="
        )

    def bit_sums(self) -> Tensor | None:
        """A sum of the bits of each unsharded parameter that a forward may not write; 1D."""
        values = [tensor for storage in self.losing_writes for tensor in storage.unsharded]
        return torch.stack([sum_of_bits(tensor) for tensor in values]) if values else None

    def check_bit_sums(self, before: Tensor | None) -> None:
        """Raise if a parameter's bits differ from ``before``, which ``bit_sums`` has returned."""
        if before is None or (now := self.bit_sums()) is None or torch.equal(now, before):
            return
        members = [member for storage in self.losing_writes for member in storage.members]
        raise self.refusal(members[int((now != before).nonzero()[0])].name)

    def check_output(self, tensor: Tensor) -> None:
        """Refuse an output of a forward that is a view of unsharded parameters, which are freed."""
        if not tensor.numel():
            return
        address = tensor.data_ptr()
        for storage in self.storages:
            if storage.sharded and storage.contains(address):
                of = next(
                    member.name
                    for member, param in zip(storage.members, storage.unsharded, strict=True)
                    if 0 <= address - param.data_ptr() < param.nbytes
                )
                raise StateError(
                    f"unit {self.label!r} returned a view of its own parameter {of!r}, whose "
                    "memory is given back after its forward: return a clone(), or make no unit of "
                    "that module, so that the one around it owns it"
                )
