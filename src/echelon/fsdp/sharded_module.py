"""A module of which each rank keeps a shard: its parameters, its state, its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.comm.compiler_bypass import bypass_compiler
from echelon.comm.group import Group
from echelon.errors import StateError
from echelon.fsdp import unit_info
from echelon.fsdp.build import broadcast_copies, copy_units, restore_parameters
from echelon.fsdp.gradients import Slots
from echelon.fsdp.guards import Detached, allow_copies, guard, unguard
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.shard_layout import ShardInfo
from echelon.fsdp.shard_update import shard_update
from echelon.fsdp.state_dict import (
    copy_parameters,
    holdings_of_shards,
    parameter_shards_of,
    shards_by_id,
    show_parts,
)
from echelon.fsdp.storage import Storage, wait_for_unshards
from echelon.fsdp.unit import Unit
from echelon.modules.compiled import keep_plain_names, plain_name, plain_state
from echelon.modules.parameters import ParameterGuard, claim, disclaim
from echelon.modules.sharded_tensor import is_part, local_shard
from echelon.modules.wrapper import Wrapper, no_assign, prefix_loader
from echelon.state.model_state import check_state, copy_of, load_model_state, state_of_copies
from echelon.state.optimizer_state import HasOptimizerState
from echelon.state.sharded_state import ParameterShards, ShardedState
from echelon.state.state_copy import as_copy


@bypass_compiler
class ShardedModule(Wrapper, HasOptimizerState):
    """What a sharded model is when it does not train; ``FSDP`` makes it and trains it."""

    def _attach(
        self,
        module: nn.Module,
        groups: HybridGroups,
        options: FSDPOptions,
        built: tuple[list[Unit], list[Slots]],
    ) -> None:
        self.module = module
        self.training = module.training
        self._groups = groups
        self._group = groups.shard
        self._options = options
        self._units, self._slots = built
        self._hooks = Hooks(self._units, groups, options)
        keep_plain_names(module)
        self._parameter_guard = ParameterGuard(module, "FSDP", keeps_names=True)
        for storage in self._storages():
            claim([*storage.params, *storage.optimizer_params], self, outlives_owner=True)
        guard(module, list(self._named_storages()), self._hooks)
        hook = prefix_loader("FSDP shards", plain_name)  # shards take their parts of whole values
        self.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        self._wear_forward()

    def _take_replaced(self) -> None:
        """Keep values that users set by ``param.data = value``."""
        for unit in self._units:
            if not unit.is_unsharded:
                unit.take_replaced()

    def _check_idle(self, call: str, advice: str) -> None:
        if self._hooks.busy:
            raise StateError(f"{call} inside a forward, a backward or full_parameters(): {advice}")

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` with each module while parameters are unsharded, such as to initialise them.

        All ranks call it. Each keeps its shards of what ``fn`` wrote. Ranks that keep the same
        parameter or shard get the values of the first of them.

        Raises:
            StateError: inside a forward or a backward.
        """
        if self._hooks.always_shown:
            return super().apply(fn)
        with self.full_parameters(writeback=True):
            super().apply(fn)
        broadcast_copies(self._storages(), self._groups)
        self._hooks.unsharder.wait_for_readers("parameters were initialised")
        return self

    # Parameters ------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer sees: the parameters under their plain names, or the flat ones.

        Flat parameters come first, in the order of ``units``, then parameters that are in no unit.
        """
        if self._options.use_orig_params or not recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        dot = f"{prefix}." if prefix else ""
        for name, storage in self._named_storages():
            yield dot + name, storage.optimizer_params[0]
        inside = {id(param) for storage in self._storages() for param in storage.params}
        for name, param in self.module.named_parameters(prefix, recurse, remove_duplicate):
            if id(param) not in inside:
                yield prefix + plain_name(name.removeprefix(prefix)), param

    def _named_storages(self) -> Iterator[tuple[str, Storage]]:
        """All storages, each with the name of its flat parameter, if it has one."""
        for unit in self._units:
            for i, storage in enumerate(unit.storages):
                yield f"{unit.name}.flat_{i}".lstrip("."), storage

    @contextmanager
    def full_parameters(self, *names: str, writeback: bool = False) -> Iterator[None]:
        """Unshard all parameters inside the block, or those of some units. All ranks enter it.

        Args:
            names: of units, modules or parameters, the same on all ranks: their units are
                unsharded, and the others stay sharded. Without names all are.
            writeback: keep what the block wrote; each rank keeps its shard. Where ranks share
                memory, each of them has unsharded parameters of its own meanwhile.

        Raises:
            StateError: inside a forward or a backward; or the block wrote and ``writeback`` is
                False.
            ArgumentError: a name is that of nothing with parameters.
        """
        units = unit_info.units_of(self._units, names)
        if self._hooks.busy:
            raise StateError(
                "full_parameters() inside a forward, a backward or another full_parameters(): "
                "call it outside"
            )
        self._take_replaced()
        self._hooks.publish_shards()
        for unit in units:
            if writeback:
                unit.unshard_privately()
            else:
                unit.unshard()
        versions = [unit.versions() for unit in units]
        self._hooks.always_shown = True
        try:
            yield
            if writeback:
                # Every rank has its copies: from now on the shards of others may be written.
                self._hooks.unsharder.wait_for_readers("what was written is kept")
                with torch.no_grad():
                    for unit in units:
                        for storage in unit.storages:
                            storage.write_back()
            else:
                for unit, before in zip(units, versions, strict=True):
                    if (name := unit.written_since(before)) is not None:
                        raise StateError(
                            f"parameter {name!r} was written inside full_parameters(), where that "
                            "is lost or seen by some ranks only: use "
                            "full_parameters(writeback=True)"
                        )
        finally:
            self._hooks.always_shown = False
            for unit in self._units:
                unit.reshard()
            self._hooks.unsharder.wait_for_readers("parameters are resharded")

    def update_shards(self, flat: Tensor) -> None:
        """Write this rank's shards from one tensor, in the order of ``parameters()``; all call it.

        Raises:
            ArgumentError: ``flat`` has another number of elements than the shards, or complex
                numbers or integers that they cannot hold.
            StateError: inside a forward, a backward or ``full_parameters()``.
        """
        checks.instance("flat", flat, Tensor)
        self._check_idle("update_shards()", "call it outside")
        self._take_replaced()
        write = shard_update(flat, [local_shard(param) for param in self.parameters()])
        self._hooks.wait_for_forwards()
        self._hooks.before_write()
        write()

    # State -----------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The full state, with the plain module's keys and shapes, as copies. All ranks call it.

        One unit is unsharded at a time. A write into a copy would be lost, and is a StateError.

        Raises:
            StateError: inside a forward or a backward.
        """
        self._meet("state_dict()")
        self._take_replaced()
        return state_of_copies(self.module, copy_parameters(self._hooks), args, kwargs)

    def whole_state_dict(self, rank0_only: bool = False, cpu: bool = True) -> dict[str, Any]:
        """What ``state_dict`` returns, for rank 0 alone, or not on the device. All ranks call it.

        Args:
            rank0_only: other ranks get an empty dict, and hold one unsharded unit at a time.
            cpu: every copy goes to the memory of the host when it is made.

        Raises:
            ArgumentError: an argument is no bool.
            StateError: inside a forward or a backward.
        """
        checks.flag("rank0_only", rank0_only)
        checks.flag("cpu", cpu)
        self._meet("whole_state_dict()")
        self._take_replaced()
        keep = self._group.rank == 0 or not rank0_only
        device = torch.device("cpu") if cpu else None
        copies = copy_parameters(self._hooks, keep=keep, device=device)
        return state_of_copies(self.module, copies, device=device) if keep else {}

    def _meet(self, call: str) -> None:
        """Wait for all ranks, so that the error of a rank that calls alone names this call."""
        if not self._hooks.busy:
            self._group.barrier(label=f"{call}, which all ranks call")

    def sharded_state_dict(self) -> dict[str, Any]:
        """Copies of this rank's shards, by the plain module's keys. Nothing is communicated.

        Buffers, and parameters that are not sharded, are full.
        """
        self._take_replaced()
        shards = shards_by_id(self._storages())
        state = state_of_copies(self.module, {key: copy_of(own) for key, own in shards.items()})
        for key, value in state.items():
            state[key] = as_copy(local_shard(value)) if is_part(value) else value
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a full state; every rank takes its shards, in place. Nothing is communicated.

        Modules load it by their own code, as those of the plain model do.

        Raises:
            ArgumentError: keys (if ``strict``), shapes, dtypes or ``assign`` do not fit; no tensor
                has changed.
        """
        if assign:
            raise no_assign("FSDP shards")
        self._take_replaced()
        return self._load(state_dict, strict)

    def _load(self, state: Mapping[str, Any], strict: bool) -> Any:
        self._hooks.wait_for_forwards()
        storages = self._storages()
        wait_for_unshards(storages)
        return load_model_state(self.module, shards_by_id(storages), state, strict=strict)

    def load_sharded_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what ``sharded_state_dict`` returned on this rank. Nothing is communicated.

        Raises:
            ArgumentError: keys (if ``strict``), sizes of shards or dtypes do not fit; no tensor has
                changed.
        """
        check_state(state)
        self._take_replaced()
        shown = plain_state(self.module, state)
        # Of parameters that say that they are parts, modules make a state whose parts say so.
        show_parts(shown, state_of_copies(self.module, shards_by_id(self._storages())))
        return self._load(shown, strict)

    def holdings(self) -> ShardedState:
        """This rank's ranges of the plain model. Nothing is communicated.

        Ranks that hold the same range keep it equal, except ignored parameters and buffers.

        Raises:
            StateError: inside a forward, a backward or ``full_parameters()``.
            ArgumentError: what is in no unit cannot be saved.
        """
        self._check_idle("holdings()", "ask outside")
        self._take_replaced()
        storages, before_write = self._storages(), self._hooks.before_write
        return holdings_of_shards(self.module, storages, self._groups, before_write)

    def parameter_shards(self) -> tuple[ParameterShards, ...]:
        """This rank's ranges of the parameters. Nothing is communicated."""
        return (parameter_shards_of(self.module, self._storages(), self._groups),)

    def shared_over(self) -> tuple[Group, ...]:
        """The group, and that of the replicas where there are several."""
        return self._groups.groups

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._check_idle("a copy", "copy the model outside")
        self._hooks.unsharder.reshard_between_passes()
        self._take_replaced()
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        nn.Module.__init__(clone)
        allow_copies(self.module, memo)
        module = copy.deepcopy(self.module, memo)
        self._hooks.remove_from_copy(module)
        built = copy_units(self._units, module, self._groups, self._options)
        clone._attach(module, self._groups, self._options, built)
        for original, copied in ((self.module, module), (self, clone)):
            for param, its_copy in zip(original.parameters(), copied.parameters(), strict=True):
                its_copy.requires_grad_(param.requires_grad)  # it may have changed since wrapping
        return clone

    @torch.inference_mode(mode=False)  # parameters outlive the caller's mode
    def unwrap(self) -> nn.Module:
        """Take the wrapper off a module, whose parameters are unsharded then. All ranks call it.

        Each rank then holds the full model, in memory of its own, in the same parameter objects. An
        optimizer still has the states of shards: call ``optimizer_state_dict`` before.
        The wrapper cannot be used afterwards; the module can be wrapped again.

        Raises:
            StateError: inside a forward, a backward or ``full_parameters()``.
        """
        module, hooks, storages = self.module, self._hooks, self._storages()
        self._take_replaced()
        self._check_idle("unwrap()", "call it outside")
        restore_parameters(hooks, storages, copy_parameters(hooks))
        hooks.remove_from_copy(module)
        hooks.backward.remove_hooks()
        unguard(module, storages)
        for storage in storages:
            disclaim([*storage.params, *storage.optimizer_params])
        detached: Any = Detached()
        self._hooks = self._units = self._slots = self._groups = self._parameter_guard = detached
        return module

    # What is where ---------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The ranks that share the model."""
        return self._group

    @property
    def units(self) -> tuple[unit_info.UnitInfo, ...]:
        """The units, the root first."""
        return unit_info.unit_facts(self._units)

    def shard_info(self, name: str) -> list[ShardInfo]:
        """Which shard of a parameter every rank has, in rank order.

        Raises:
            ArgumentError: no unit has a parameter of that name.
        """
        return unit_info.shards_of(self._storages(), name)

    def num_parameters(self) -> int:
        """Elements of all parameters of the model, the same on every rank."""
        return unit_info.count_parameters(self.module, self._storages())

    def local_sharding_ratio(self) -> float:
        """The fraction of the model's parameters that this rank keeps."""
        kept = sum(local_shard(param).numel() for param in self.module.parameters())
        total = self.num_parameters()
        return kept / total if total else 1.0

    def memory_stats(self, optimizer: torch.optim.Optimizer | None = None) -> unit_info.MemoryStats:
        """Bytes by category, live and at most, and counts.

        Args:
            optimizer: to weigh its state too.
        """
        return unit_info.memory_of(self._units, self._slots, self._hooks.reducer, optimizer)

    def buffer_bytes(self) -> dict[str, tuple[int, int]]:
        """What is held beside the shards, by category: bytes now, and the most so far."""
        stats = self.memory_stats()
        peak = stats.slots + stats.peak_gradients - stats.gradients
        return {
            "whole parameters": (stats.gathered, stats.peak_gathered),
            "gradients under way": (stats.slots, peak),
        }

    def _storages(self) -> list[Storage]:
        return [storage for unit in self._units for storage in unit.storages]
