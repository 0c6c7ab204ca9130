"""Detaches the gradients of units and launches their reductions, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from echelon.fsdp.execution_order import ExecutionOrder
from echelon.fsdp.gradients import Reduction
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.pass_state import COMPLETE, REACHED, SKIPPED, UNREACHED, BackwardPass
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit
from echelon.modules.autograd import add_gradient
from echelon.modules.parameters import TrainableParameters
from echelon.modules.replica_check import ReplicaCheck


@final
class GradientReducer:
    """Detaches gradients from parameters, keeps or reduces them, and sets the reduced ``.grad``.

    Attributes:
        kept: by unit, the unsharded gradients that ``no_sync`` keeps.
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
        self.kept: dict[int, list[Tensor | None]] = {}
        self._indices = {
            param: (u, i) for u, unit in enumerate(units) for i, param in enumerate(unit.trainable)
        }
        storages = [shard.storage for unit in units for shard in unit.gradient_shards]
        named = [(member.name, member.param) for storage in storages for member in storage.members]
        self._trainable = TrainableParameters(named, groups)
        self.replica_check = _replica_check(units, groups, options.check_replicas)
        self._slots = {shard.slots for unit in units for shard in unit.gradient_shards}
        self._kept_nbytes = 0
        self.num_reductions = self.peak_nbytes = 0

    def collect(self, current: BackwardPass, u: int) -> list[Tensor | None]:
        """Detach the gradients of a complete unit, and note how many bytes wait."""
        gradients = self.detach_gradients(u)
        waiting = sum(map(_nbytes, (gradients, *current.waiting.values())))
        self.peak_nbytes = max(self.peak_nbytes, waiting + self._kept_nbytes)
        return gradients

    def detach_gradients(self, u: int) -> list[Tensor | None]:
        """Take the unsharded gradients of a unit off its parameters, and add the kept ones."""
        unit = self._units[u]
        gradients: list[Tensor | None] = [param.grad for param in unit.trainable]
        for param in unit.trainable:
            param.grad = None
        kept = self._pop_kept(u)
        if kept is None:
            return gradients
        return [
            new if old is None else old if new is None else old + new.to(old.dtype)
            for old, new in zip(kept, gradients, strict=True)
        ]

    def keep(
        self,
        u: int,
        gradients: Sequence[Tensor | None],
        reduced_before: Sequence[list[bool] | None],
    ) -> None:
        """Keep unsharded gradients under ``no_sync``, for the next ones to be added to.

        The unit is sharded again, so its earlier reduced gradients can be put back.
        """
        if any(gradient is not None for gradient in gradients):
            self.kept[u] = [
                None if gradient is None else gradient.to(dtype)
                for gradient, dtype in zip(gradients, self._wire_dtypes(u), strict=True)
            ]
            self._kept_nbytes += _nbytes(self.kept[u])
        for shard, before in zip(self._units[u].gradient_shards, reduced_before, strict=True):
            shard.put_back(before)

    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add an unsharded gradient of one parameter to those that ``no_sync`` keeps."""
        if param not in self._indices:  # an ignored parameter, which is not sharded
            add_gradient(param, gradient)
            return
        u, i = self._indices[param]
        kept = self.kept.setdefault(u, [None] * len(self._units[u].trainable))
        new, old = gradient.to(self._wire_dtypes(u)[i]), kept[i]
        if old is None:
            kept[i] = new
            self._kept_nbytes += new.nbytes
        else:
            kept[i] = old + new

    def _wire_dtypes(self, u: int) -> list[torch.dtype]:
        shards = self._units[u].gradient_shards
        return [shard.wire_dtype for shard in shards for _ in shard.storage.params]

    def _pop_kept(self, u: int) -> list[Tensor | None] | None:
        kept = self.kept.pop(u, None)
        if kept is not None:
            self._kept_nbytes -= _nbytes(kept)
        return kept

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
                self._launch(current, u, self._unreached_gradients(u))
            else:
                return

    def launch_rest(self, current: BackwardPass) -> None:
        """At the end of backward, launch the reductions that waited or got no gradient."""
        for u in self._order.reductions[current.num_reduced :]:
            gradients = current.waiting.pop(u, None)
            if gradients is None:
                is_reached = current.units[u].state is REACHED
                gradients = self.detach_gradients(u) if is_reached else self._unreached_gradients(u)
            self._units[u].reshard()
            self._launch(current, u, gradients)

    def _launch(self, current: BackwardPass, u: int, gradients: list[Tensor | None]) -> None:
        """Launch the reductions of a unit; empties ``gradients``, so that they are freed early."""
        unit = self._units[u]
        reduced_before = current.reduced_before.get(u) or [
            shard.set_aside() for shard in unit.gradient_shards
        ]
        started = []
        with torch.no_grad():
            for shard, before in zip(unit.gradient_shards, reduced_before, strict=True):
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

    def _unreached_gradients(self, u: int) -> list[Tensor | None]:
        """The gradients of a unit that backward did not reach: those that ``no_sync`` kept."""
        kept = self._pop_kept(u)
        return [None] * len(self._units[u].trainable) if kept is None else kept

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
                flags[:-1].copy_(torch.tensor(used_here))
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
        self._trainable.take_answer(changed)
        self._trainable.compare(at_once=False)

    def drop_unused(self) -> None:
        """Free the memory of reduced gradients that ``zero_grad()`` has taken off parameters."""
        for unit in self._units:
            for shard in unit.gradient_shards:
                shard.drop_unused()

    def _give_slots_back(self) -> None:
        for slots in self._slots:
            slots.give_back()

    def discard(self, aborted: BackwardPass) -> None:
        """Finish the reductions of a backward that was aborted, and drop its gradients."""
        for started in aborted.reductions:
            for reduction in started:
                reduction.finish()
        self._give_slots_back()
        for unit, state in zip(self._units, aborted.units, strict=True):
            if state.state in (REACHED, COMPLETE):
                for param in unit.trainable:
                    param.grad = None


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
