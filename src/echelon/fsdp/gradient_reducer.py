"""Detaches the gradients of units and launches their reductions, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, final

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from echelon.fsdp.execution_order import ExecutionOrder
from echelon.fsdp.gradients import GradientShard, Reduction
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.pass_state import REACHED, SKIPPED, UNREACHED, BackwardPass
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit
from echelon.modules.autograd import add_gradient
from echelon.modules.parameters import TrainableParameters
from echelon.modules.replica_check import ReplicaCheck

_T = TypeVar("_T")


@final
class GradientReducer:
    """Detaches gradients from parameters, keeps or reduces them, and sets the reduced ``.grad``.

    Attributes:
        num_reductions: the number of reductions that were launched.
        peak_nbytes: the most bytes of unsharded gradients of complete units at one time.
        replica_check: compares what several ranks keep equal.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: HybridGroups,
        options: FSDPOptions,
        order: ExecutionOrder,
    ) -> None:
        self._units, self._groups, self._options, self._order = units, groups, options, order
        # By unit whose gradients are set aside, what ``no_sync`` has kept of them, if anything.
        self._kept: dict[int, list[Tensor | None] | None] = {}
        self._places = {
            param: (u, shard, i)
            for u, unit in enumerate(units)
            for shard in unit.gradient_shards
            for i, param in enumerate(shard.storage.params)
        }
        self._indices = {param: i for unit in units for i, param in enumerate(unit.trainable)}
        storages = [shard.storage for unit in units for shard in unit.gradient_shards]
        named = [(member.name, member.param) for storage in storages for member in storage.members]
        self._trainable = TrainableParameters(named, groups)
        self.replica_check = _replica_check(units, groups, options.check_replicas)
        self._slots = {shard.slots for unit in units for shard in unit.gradient_shards}
        self._kept_nbytes = 0
        self.num_reductions = self.peak_nbytes = 0

    @property
    def has_kept(self) -> bool:
        """Whether ``no_sync`` has kept gradients that nobody has dropped."""
        return self._count_kept() > 0

    def begin(self) -> None:
        """A backward begins: the user may have dropped what was kept."""
        if self._kept_nbytes:
            self._kept_nbytes = self._count_kept()

    def _count_kept(self) -> int:
        return sum(shard.kept_nbytes for unit in self._units for shard in unit.gradient_shards)

    def set_aside(self, u: int) -> list[list[bool] | None]:
        """Take what a unit has off its parameters, kept gradients and reduced ones."""
        shards = self._units[u].gradient_shards
        with DisableTorchFunctionSubclass():
            asides = [shard.set_aside() for shard in shards]
        self._kept[u] = None
        if any(aside.kept for aside in asides):
            kept: list[Tensor | None] = []
            for shard, aside in zip(shards, asides, strict=True):
                kept += aside.kept or [None] * len(shard.storage.params)
            self._kept_nbytes -= _nbytes(kept)
            self._kept[u] = kept
        return [aside.reduced for aside in asides]

    def _nothing_of(self, u: int) -> list[Tensor | None]:
        """No gradient of any parameter of a unit."""
        return [None] * len(self._units[u].trainable)

    def collect(self, current: BackwardPass, u: int) -> list[Tensor | None]:
        """Detach the gradients of a complete unit, and note how many bytes wait."""
        gradients = self.detach_gradients(current, u)
        waiting = sum(map(_nbytes, (gradients, *current.waiting.values())))
        self.peak_nbytes = max(self.peak_nbytes, waiting + self._kept_nbytes)
        return gradients

    def detach_gradients(self, current: BackwardPass, u: int) -> list[Tensor | None]:
        """Take the unsharded gradients of a unit off its parameters, and add the kept ones."""
        unit = self._units[u]
        gradients: list[Tensor | None] = [param.grad for param in unit.trainable]
        for param in unit.trainable:
            param.grad = None
        kept = self._take_kept(current, u)
        if kept is None:
            return gradients
        return [
            new if old is None else old if new is None else old + new.to(old.dtype)
            for old, new in zip(kept, gradients, strict=True)
        ]

    def _take_kept(self, current: BackwardPass, u: int) -> list[Tensor | None] | None:
        """What was kept of a unit, which this backward reduces or keeps from now on."""
        kept = self._kept.pop(u)
        if kept is not None:
            current.joined[u] = [gradient is not None for gradient in kept]
        return kept

    def keep(
        self,
        u: int,
        gradients: Sequence[Tensor | None],
        reduced_before: Sequence[list[bool] | None],
    ) -> None:
        """Keep unsharded gradients under ``no_sync``, for the next ones to be added to.

        The unit is sharded again, so its earlier reduced gradients can be put back.
        """
        for shard, before in zip(self._units[u].gradient_shards, reduced_before, strict=True):
            shard.put_back(before)
        self._show_kept(u, gradients)

    def _show_kept(self, u: int, gradients: Sequence[Tensor | None]) -> None:
        """Let ``.grad`` have unsharded gradients of a unit, which is sharded again."""
        for shard, of_shard in self._by_shard(u, gradients):
            kept = [
                None if gradient is None else gradient.to(shard.wire_dtype) for gradient in of_shard
            ]
            shard.show_kept(kept)
            self._kept_nbytes += _nbytes(kept)

    def _by_shard(self, u: int, values: Sequence[_T]) -> Iterator[tuple[GradientShard, list[_T]]]:
        """The shards of a unit, each with the values of its parameters."""
        rest = iter(values)
        for shard in self._units[u].gradient_shards:
            yield shard, list(islice(rest, len(shard.storage.params)))

    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add an unsharded gradient of one parameter to those that ``no_sync`` keeps."""
        if param not in self._places:  # an ignored parameter, which is not sharded
            add_gradient(param, gradient)
            return
        u, shard, i = self._places[param]
        if u in self._kept:  # a backward goes through the unit, and adds all at its end
            kept, index = self._kept[u] or self._nothing_of(u), self._indices[param]
            kept[index] = shard.added(kept[index], gradient)
            self._kept[u] = kept
            return
        self._kept_nbytes += shard.add_kept(i, gradient)

    def _unreached_gradients(self, current: BackwardPass, u: int) -> list[Tensor | None]:
        """The gradients of a unit that backward did not reach: those that ``no_sync`` kept."""
        with torch.no_grad():
            current.reduced_before[u] = self.set_aside(u)
        return self._take_kept(current, u) or self._nothing_of(u)

    def launch_ready(self, current: BackwardPass, gets_none: Callable[[int], bool]) -> None:
        """Launch the reductions that come next in the order of all ranks and may go.

        ``gets_none`` tells whether a unit gets no gradient in this backward.
        """
        order = self._order.reductions
        while current.num_reduced < len(order):
            u = order[current.num_reduced]
            state = current.units[u]
            if u in current.waiting:
                self._launch(current, u, current.waiting.pop(u))
            elif state.state is UNREACHED and gets_none(u):
                state.state = SKIPPED
                self._launch(current, u, self._unreached_gradients(current, u))
            else:
                return

    def launch_rest(self, current: BackwardPass) -> None:
        """At the end of backward, launch the reductions that waited or got no gradient."""
        for u in self._order.reductions[current.num_reduced :]:
            gradients = current.waiting.pop(u, None)
            if gradients is None:
                is_reached = current.units[u].state is REACHED
                gradients = (
                    self.detach_gradients(current, u)
                    if is_reached
                    else self._unreached_gradients(current, u)
                )
            self._units[u].reshard()
            self._launch(current, u, gradients)

    def _launch(self, current: BackwardPass, u: int, gradients: list[Tensor | None]) -> None:
        """Launch the reductions of a unit; empties ``gradients``, so that they are freed early."""
        unit = self._units[u]
        started = []
        with torch.no_grad():
            for shard, before in zip(unit.gradient_shards, current.reduced_before[u], strict=True):
                num_params = len(shard.storage.params)
                of_storage = gradients[:num_params]
                del gradients[:num_params]
                reduction = Reduction(
                    shard,
                    before,
                    self._options,
                    self._groups.replicas,
                    unshards_follow=not self._order.all_unsharded,
                )
                reduction.start(of_storage)
                started.append(reduction)
                self.num_reductions += 1
        current.reductions.append(started)
        current.num_reduced += 1

    def finish(self, current: BackwardPass) -> Tensor:
        """Wait for all reductions, agree on which parameters were used, and set ``.grad``.

        Returns whether a rank has frozen or unfrozen a parameter, 1D with one element.
        """
        reductions = [reduction for started in current.reductions for reduction in started]
        with torch.no_grad():
            for reduction in reductions:
                reduction.finish()
            self._give_slots_back()
            used_here = [used for reduction in reductions for used in reduction.used_here]
            flags = torch.ones(
                len(used_here) + 1, dtype=torch.uint8, device=self._groups.shard.device
            )
            if not all(used_here):
                flags[:-1].copy_(torch.tensor(used_here, device="cpu"))
            with DisableTorchFunctionSubclass():
                flags[-1] = self._trainable.changed()
            if used_here:
                self._groups.all_reduce(flags, "max", "which parameters were used")
        # A rank that used them all knows the answer: on CUDA, reading it waits for the device.
        used_anywhere = used_here if all(used_here) else flags[:-1].bool().tolist()
        first = 0
        for reduction in reductions:
            last = first + len(reduction.used_here)
            reduction.set_grads(used_anywhere[first:last])
            first = last
        return flags[-1:]

    def compare_trainable(self, changed: Tensor) -> None:
        """Compare which parameters the ranks have frozen, if a rank has ``changed`` that.

        On CUDA, where reading the answer waits for the device, the next backward compares. Raises
        ModelMismatch on every rank, which names the parameter and the ranks that have frozen it.
        """
        self._trainable.compare(at_once=True)
        self._trainable.answer.take(changed)
        self._trainable.compare(at_once=False)

    def drop_unused(self) -> None:
        """Free the memory of reduced gradients that ``zero_grad()`` has taken off parameters."""
        for unit in self._units:
            for shard in unit.gradient_shards:
                shard.drop_unused()

    def _give_slots_back(self) -> None:
        for slots in self._slots:
            slots.give_back()

    def set_back(self, aborted: BackwardPass) -> None:
        """Let ``.grad`` be what it was before a backward that was aborted. Sends nothing.

        Parameters are sharded again. Under ``no_sync`` a complete unit has its new gradients, as
        autograd adds them in one process. What was kept and is in a reduction may only be dropped.
        """
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for u, reduced_before in aborted.reduced_before.items():
                unit = self._units[u]
                for param in unit.trainable:
                    param.grad = None
                for shard, before in zip(unit.gradient_shards, reduced_before, strict=True):
                    shard.put_back(before)
                if (kept := self._kept.pop(u, None)) is not None:
                    self._show_kept(u, kept)
                else:
                    for shard, was_kept in self._by_shard(u, aborted.joined.get(u, ())):
                        shard.show_lost(was_kept)
        aborted.reduced_before.clear()

    def discard(self, aborted: BackwardPass) -> None:
        """Wait for the reductions of a backward that was aborted, and drop them."""
        for started in aborted.reductions:
            for reduction in started:
                reduction.finish(keep=False)
        self._give_slots_back()


def _replica_check(units: Sequence[Unit], groups: HybridGroups, every: int) -> ReplicaCheck:
    storages = [storage for unit in units for storage in unit.storages]
    sharded, whole = ([s for s in storages if s.sharded is kind] for kind in (True, False))
    return ReplicaCheck(
        lambda: _named_shards(whole),
        lambda: _named_shards(sharded),
        groups.shard,
        groups.replicas,
        every=every,
        remedy="model.apply(lambda module: None)",
    )


def _named_shards(storages: Sequence[Storage]) -> list[tuple[str, Tensor]]:
    return [
        (member.name, shard)
        for storage in storages
        for member, shard in zip(storage.members, storage.shards, strict=True)
    ]


def _nbytes(gradients: Sequence[Tensor | None]) -> int:
    return sum(gradient.nbytes for gradient in gradients if gradient is not None)
