"""Gradients of units leave for their owners, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.comm import streams
from echelon.fsdp.backward_pass import Pass
from echelon.fsdp.gradients import Reduction
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.order import Orders
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.unit import Unit
from echelon.modules.autograd import add_gradient
from echelon.modules.parameters import TrainableParameters


@final
class GradientReducer:
    """Takes gradients off parameters, keeps or sends them, and hands the reduced ones over.

    Attributes:
        kept: by unit, whole gradients of ``no_sync``.
        num_reductions: how many were sent.
        peak_nbytes: of whole gradients, at most, of units that backward is through with.
    """

    def __init__(
        self, units: Sequence[Unit], ranks: HybridGroups, options: FSDPOptions, orders: Orders
    ) -> None:
        self._units, self._ranks, self._options, self._orders = units, ranks, options, orders
        self.kept: dict[int, list[Tensor | None]] = {}
        self._places = {
            param: (u, i) for u, unit in enumerate(units) for i, param in enumerate(unit.trainable)
        }
        members = [m for unit in units for shard in unit.shards for m in shard.storage.members]
        named = [(m.name, m.param) for m in members]
        self._trainable = TrainableParameters(named, ranks)
        self._kept_nbytes = 0
        self.num_reductions = self.peak_nbytes = 0

    def take(self, u: int) -> list[Tensor | None]:
        """The whole gradients of a unit, with those that ``no_sync`` kept; takes them off."""
        unit = self._units[u]
        gradients: list[Tensor | None] = [param.grad for param in unit.trainable]
        for param in unit.trainable:
            param.grad = None
        kept = self._take_kept(u)
        if kept is None:
            return gradients
        return [
            new if old is None else old if new is None else old + new.to(old.dtype)
            for old, new in zip(kept, gradients, strict=True)
        ]

    def weigh(self, current: Pass, gradients: Sequence[Tensor | None]) -> None:
        """Note how many bytes of whole gradients there are, with those of a unit."""
        waiting = sum(map(_nbytes, (gradients, *current.held.values())))
        self.peak_nbytes = max(self.peak_nbytes, waiting + self._kept_nbytes)

    def keep(
        self, u: int, gradients: Sequence[Tensor | None], had: Sequence[list[bool] | None]
    ) -> None:
        """Keep whole gradients of ``no_sync``, for the next ones to be added to.

        Args:
            u: a unit whose parameters are parts.
            gradients: of it.
            had: what was set aside for them, by shard.
        """
        self.kept[u] = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, self._wire_dtypes(u), strict=True)
        ]
        self._kept_nbytes += _nbytes(self.kept[u])
        for shard, old in zip(self._units[u].shards, had, strict=True):
            shard.put_back(old)

    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a whole gradient of one parameter to those that ``no_sync`` keeps."""
        if param not in self._places:  # ignored: it is whole, and so is its gradient
            add_gradient(param, gradient)
            return
        u, i = self._places[param]
        kept = self.kept.setdefault(u, [None] * len(self._units[u].trainable))
        new, old = gradient.to(self._wire_dtypes(u)[i]), kept[i]
        if old is None:
            kept[i] = new
            self._kept_nbytes += new.nbytes
        else:
            kept[i] = old + new

    def _wire_dtypes(self, u: int) -> list[torch.dtype]:
        return [one.wire_dtype for one in self._units[u].shards for _ in one.storage.params]

    def _take_kept(self, u: int) -> list[Tensor | None] | None:
        kept = self.kept.pop(u, None)
        if kept is not None:
            self._kept_nbytes -= _nbytes(kept)
        return kept

    def send_ready(self, current: Pass, is_left_out: Callable[[int], bool]) -> None:
        """Send the gradients of units whose turn it is.

        Args:
            is_left_out: whether no gradient will come to a unit.
        """
        order = self._orders.reductions
        while current.sent < len(order):
            u = order[current.sent]
            if u in current.held:
                self._send(current, u, current.held.pop(u))
            elif not current.units[u].opened and is_left_out(u):
                current.left_out.add(u)
                self._send(current, u, self._take_unopened(u))
            else:
                return

    def send_rest(self, current: Pass) -> None:
        """Backward is over: send what waits for other units or for gradients that did not come."""
        for u in self._orders.reductions[current.sent :]:
            gradients = current.held.pop(u, None)
            if gradients is None:
                is_open = current.units[u].opened
                gradients = self.take(u) if is_open else self._take_unopened(u)
            self._units[u].release()
            self._send(current, u, gradients)

    def _send(self, current: Pass, u: int, gradients: list[Tensor | None]) -> None:
        """Reduce the whole gradients of a unit; empties the list, so that they are free early."""
        unit = self._units[u]
        had = current.had.get(u) or [shard.set_aside() for shard in unit.shards]
        started = []
        with torch.no_grad():
            for shard, old in zip(unit.shards, had, strict=True):
                num_params = len(shard.storage.params)
                own = gradients[:num_params]
                del gradients[:num_params]
                reduction = Reduction(
                    shard,
                    old,
                    self._options,
                    self._ranks.replicas,
                    gathers_come=not self._orders.all_whole,
                )
                reduction.start(own)
                started.append(reduction)
                self.num_reductions += 1
        current.reductions.append(started)
        current.sent += 1

    def _take_unopened(self, u: int) -> list[Tensor | None]:
        """Of a unit that backward did not reach: what ``no_sync`` kept, or nothing."""
        kept = self._take_kept(u)
        return [None] * len(self._units[u].trainable) if kept is None else kept

    def settle(self, current: Pass) -> Tensor:
        """Wait for all reductions; agree on who has a gradient; set ``.grad``.

        Returns:
            For ``compare_trainable``: whether a rank has frozen or thawed a parameter. 1D, one
            element
        """
        flat = [reduction for started in current.reductions for reduction in started]
        with torch.no_grad():
            for reduction in flat:
                reduction.finish()
            here = [new for reduction in flat for new in reduction.present]
            used = torch.ones(len(here) + 1, dtype=torch.uint8, device=self._ranks.shard.device)
            if not all(here):
                used[:-1].copy_(torch.tensor(here))
            used[-1] = self._trainable.changed()
            if here:
                self._ranks.all_reduce(used, "max", "which parameters were used")
        # A rank that used them all knows the answer: on CUDA, reading it waits for the device.
        anywhere = here if all(here) else used[:-1].bool().tolist()
        first = 0
        for reduction in flat:
            last = first + len(reduction.present)
            reduction.hand_over(anywhere[first:last])
            first = last
        return used[-1:]

    def compare_trainable(self, changed: Tensor) -> None:
        """Compare whether all ranks have frozen the same parameters, if one ``changed`` something.

        On CUDA, where reading an answer waits for the device, this is about the backward before.

        Raises:
            ModelMismatch: on every rank; names the parameter and who has frozen it.
        """
        self._trainable.compare(at_once=True)
        self._trainable.take_answer(changed)
        if not streams.reading_waits(changed.device):
            self._trainable.compare(at_once=True)

    def discard(self, aborted: Pass) -> None:
        """Leave nothing of a backward that was aborted."""
        for started in aborted.reductions:
            for reduction in started:
                reduction.finish()
        for unit, state in zip(self._units, aborted.units, strict=True):
            if state.opened:
                for param in unit.trainable:
                    param.grad = None


def _nbytes(gradients: Sequence[Tensor | None]) -> int:
    return sum(one.nbytes for one in gradients if one is not None)
