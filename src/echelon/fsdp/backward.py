"""The backward of a sharded model: which units it has reached, left and completed.

[Note: when gradients leave]
Hooks on the outputs of a unit tell when backward reaches it, hooks on its inputs when backward has
left it (see ``uses``), and hooks on its parameters count gradients. A unit whose gradients are all
there, and that backward has left, is *complete*: its gradients leave, and it is released.
Reductions leave in one order on all ranks, that of the first backward, so a unit that one rank has
used in part waits there until the end. The callback at the end of backward sends what is left,
waits for all, finds out which parameters no rank used, and hands the reduced parts over as
``.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from echelon.errors import StateError, UnsupportedError
from echelon.fsdp.backward_pass import Pass, Run
from echelon.fsdp.gathers import Gathers
from echelon.fsdp.gradient_reducer import GradientReducer
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.storage import await_readers, prepare
from echelon.fsdp.unit import Unit
from echelon.fsdp.uses import Use, Uses
from echelon.modules.autograd import Token, queue_end
from echelon.modules.deferred_hooks import DeferredHooks


@final
class Backward:
    """What hooks on tensors and parameters call while autograd runs.

    Args:
        units: the root first.
        gathers: makes units whole.
        departures: takes gradients.
        ranks: that share the units.

    Attributes:
        syncing: whether the next backward reduces.
        uses: forwards that have a graph, by unit.
        runs: forwards of the model that await a backward.
        under_way: units in whose forward this rank is, of itself and not of a backward.
        all_are_done: whether no rank is in a pass that another one is through with.
        hands_over: whether hooks of users run, which get reduced gradients.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gathers: Gathers,
        departures: GradientReducer,
        ranks: HybridGroups,
    ) -> None:
        self._units, self._gathers, self._departures = units, gathers, departures
        self._ranks = ranks
        self._storages = [storage for unit in units for storage in unit.storages]
        self.syncing = True
        self.uses = [Uses() for _ in units]
        self.runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self.under_way: list[int] = []
        self.all_are_done = True
        self._pass: Pass | None = None
        self._handles: list[RemovableHandle] = []
        shards = [shard.storage for unit in units for shard in unit.shards]
        flat = [one.exposed[0] for one in shards if one.is_flat]
        self._late = DeferredHooks(((m.name, m.param) for one in shards for m in one.members), flat)
        self._is_flat = bool(flat)
        self.hands_over = False
        for u, unit in enumerate(units):
            for param in unit.trainable:
                self._handles.append(self._late.register(param, self._arrival(u)))

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._late.close()

    def defer_hooks(self, arrived: nn.Parameter | None = None) -> None:
        """Let hooks of users wait that were registered since the last forward or backward."""
        self._late.defer(arrived)

    @property
    def is_running(self) -> bool:
        """Whether a backward is under way."""
        return self._pass is not None and self._pass.token() is not None

    def reach(self, u: int, use: Use, run: Run) -> None:
        """Backward has reached an output of a unit: gather it.

        Raises:
            UnsupportedError: backward makes a graph of its own, which would read parameters again.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "create_graph=True over FSDP: the backward of this backward would read parameters "
                "that were released, and reduced gradients have no graph. Take second derivatives "
                "(a gradient penalty, score matching) of a model in ec.DDP, or write the first "
                "one out as a forward"
            )
        run.is_awaited = False
        current = self._begin()
        state = current.units[u]
        is_new, is_another = not state.opened, use.reach(current)
        if is_another:
            state.inside += 1
            state.nested += use.nested
        if is_new:
            self._open(current, u)
        elif is_another and use.nested:
            state.remaining += self._expected(u)
            state.is_repeated = True
        elif is_another and self._units[u].num_recast:
            state.remaining += self._units[u].num_recast
            state.is_repeated = True
        self._gathers.in_backward(u, self._send_ready)
        if is_new:
            self._gathers.opened(u)

    def recompute(self, u: int) -> None:
        """Forward runs again, inside of backward: gather the unit."""
        self._begin()
        self._gathers.in_backward(u, self._send_ready)

    def leave(self, u: int, use: Use, by_base: bool) -> None:
        """Backward has passed an input of a unit, or the base of one that is a view."""
        current = self._pass
        if current is None or not self.is_running or not use.is_reached_by(current):
            return  # it came there by another way
        if use.leave(by_base):
            current.units[u].inside -= 1
            self._complete_if_left(current, u)

    def _begin(self, arrived: nn.Parameter | None = None) -> Pass:
        """The pass that runs, begun if none does, when the gradient of one has ``arrived``."""
        current = self._pass
        if current is None or current.token() is None:
            if self._units[0].pinned:
                raise StateError(
                    "backward inside full_parameters(): a gradient becomes that of this rank's "
                    "part, and the parameter is whole there. Call backward after the block"
                )
            self._check_hooks(arrived)
            self.discard_aborted()
            for u in self.under_way:
                self._units[u].in_forward = True
            self._gathers.begin_backward(self._ranks, self.runs, self._may_reach, self._make_ready)
            token = queue_end(self._end_backward)
            current = self._pass = Pass(token, self.syncing, len(self._units))
            for u in sorted({u for run in self.runs for u in run.opaque}):
                self._open(current, u)
                current.units[u].inside += 1  # nothing tells when backward leaves it
                self._gathers.in_backward(u, self._send_ready)
        return current

    def _may_reach(self, u: int) -> bool:
        """Whether the backward that runs may need a unit that was not gathered in it yet."""
        current = self._pass
        is_over = current is not None and current.units[u].completed and self._units[u].shards
        return not is_over and any(u in run.units for run in self.runs)

    def _make_ready(self) -> None:
        prepare(self._storages)
        self._ranks.meet("parameters are ready for a backward")

    def _open(self, current: Pass, u: int) -> None:
        if u in current.left_out:
            raise StateError(
                f"unit {self._units[u].label!r} got a gradient in a backward whose forward did not "
                "call its module: use its parameters inside of its own forward only"
            )
        current.units[u].opened = True
        current.units[u].remaining = self._expected(u)
        with torch.no_grad():
            current.had[u] = [shard.set_aside() for shard in self._units[u].shards]

    def _expected(self, u: int) -> int:
        """How many gradients will come; none of what was frozen since the model was wrapped."""
        return sum(param.requires_grad for param in self._units[u].trainable)

    def _awaits(self, current: Pass, u: int) -> bool:
        """Whether more gradients may come to a unit that has one of each parameter."""
        nested = current.units[u].nested
        if nested and nested < sum(run.unseen[u] for run in self.runs):
            return True
        return bool(nested or self._units[u].num_recast) and self.uses[u].awaits(current)

    def _arrival(self, u: int) -> Callable[[nn.Parameter], None]:
        # A parameter holds its hooks where the garbage collector does not look. If they held us,
        # who hold the parameters, a wrapper that is dropped would never be freed.
        find = weakref.ref(self)

        def hook(param: nn.Parameter) -> None:
            backward = find()
            if backward is not None:
                backward._arrived(u, param)

        return hook

    def _arrived(self, u: int, param: nn.Parameter) -> None:
        current = self._pass
        if current is None or not current.units[u].opened:
            current = self._begin(param)
            self._open_late(current, u, param)
        state = current.units[u]
        if state.completed:
            raise StateError(
                f"a parameter of unit {self._units[u].label!r} got a second gradient in one "
                "backward, after the first left. Reentrant activation checkpointing of a "
                "shared module does that: use checkpoint(..., use_reentrant=False)"
            )
        if state.is_repeated or param not in state.arrived:
            state.remaining -= 1
            state.arrived.add(param)
        if state.remaining <= 0:
            self._complete_if_left(current, u)

    def _open_late(self, current: Pass, u: int, param: nn.Parameter) -> None:
        """A gradient came to a unit whose outputs announced nothing: keep it, and open.

        Raises:
            StateError: the gradient was computed with the part of a parameter.
        """
        unit = self._units[u]
        if not unit.gathered and any(one.sharded for one in unit.storages):
            raise StateError(
                f"backward went through unit {unit.label!r} by a way that its outputs do not show, "
                "so its parameters were released and the gradient would be wrong: return what the "
                "loss needs from the unit's forward, as tensors, or make no unit of that module"
            )
        gradient, param.grad = param.grad, None
        self._open(current, u)
        current.units[u].inside += 1  # nothing tells when backward leaves it
        param.grad = gradient

    def _complete_if_left(self, current: Pass, u: int) -> None:
        """Release a unit that backward has left, with its gradients if they are all there."""
        state, unit = current.units[u], self._units[u]
        if state.inside:
            return
        if state.completed:
            unit.release()  # a forward whose parameters are frozen came after the gradients
        elif state.remaining <= 0 and not self._awaits(current, u):
            self._complete(current, u)

    def _complete(self, current: Pass, u: int) -> None:
        """All gradients of a unit are there: take them off, release it, send what may leave."""
        unit = self._units[u]
        gradients = self._departures.take(u)
        self._departures.weigh(current, gradients)
        unit.release()
        self._gathers.complete(u)
        current.units[u].completed = True
        if not unit.shards:
            return
        current.completed.append(u)
        if not current.synced:
            self._departures.keep(u, gradients, current.had.pop(u))
            return
        current.held[u] = gradients
        self._send_ready()

    def _send_ready(self) -> None:
        """Send the gradients of units whose turn it is."""
        if self._pass is not None and self._pass.synced:
            self._departures.send_ready(self._pass, self._is_left_out)

    def _is_left_out(self, u: int) -> bool:
        """Whether no gradient will come to a unit, and others do not wait for our next gather."""
        return self._gathers.left_out(u) and not any(u in run.units for run in self.runs)

    def _end_backward(self) -> None:
        """Backward is over. Gathers first: others may need them to reduce what we wait for."""
        runs = [run.units for run in self.runs]
        used = set[int]().union(*runs).intersection(*runs)
        num_awaited = sum(run.is_awaited for run in self.runs)
        self._gathers.end_backward(used, self._send_ready, num_awaited)
        self._finish()

    def _finish(self) -> None:
        """Send what is left, wait for all, hand the reduced parts over."""
        current = self._pass
        assert current is not None
        if not current.synced:
            for u, (unit, state) in enumerate(zip(self._units, current.units, strict=True)):
                is_left = state.opened and not state.completed
                gradients = self._departures.take(u) if is_left else []
                unit.release()
                if is_left:
                    self._departures.keep(u, gradients, current.had.pop(u))
            await_readers(self._storages)
            self._end()
            return
        self._departures.send_rest(current)
        for unit in self._units:
            unit.release()
        changed = self._departures.settle(current)
        self.all_are_done = not self.under_way
        self._gathers.orders.note_reductions(current.completed)
        try:
            self._departures.compare_trainable(changed)
            self._run_hooks(current)
        finally:
            self._end()

    def _check_hooks(self, arrived: nn.Parameter | None) -> None:
        """Let hooks of users wait.

        Raises:
            StateError: one would never be called, or too early.
        """
        self.defer_hooks(arrived)
        if self._is_flat and (name := self._late.find()) is not None:
            raise StateError(
                f"a hook was registered on the gradient of parameter {name!r}, which FSDP has put "
                "into a flat parameter, so it gets no gradient of its own: register the hook on "
                "what model.parameters() gives, or wrap with use_orig_params=True"
            )

    def _run_hooks(self, current: Pass) -> None:
        """Call the hooks of users. Parameters are parts, and ``.grad`` is that of each part."""
        self.hands_over = True
        try:
            self._late.run(_came(current))
        finally:
            self.hands_over = False

    def _end(self) -> None:
        self._pass = None
        for u, unit in enumerate(self._units):
            if unit.in_forward:
                unit.in_forward = False
                if u in self.under_way:  # else that forward has failed
                    unit.gather()

    def reduce_now(self, *, may_be_none: bool) -> None:
        """Reduce what ``no_sync`` kept.

        Args:
            may_be_none: whether a rank that kept nothing takes part with zeros.

        Raises:
            StateError: inside ``no_sync`` or a backward, or nothing was kept.
        """
        if not self.syncing:
            raise StateError("sync_gradients() inside no_sync(): leave the block first")
        if self.is_running:
            raise StateError("sync_gradients() inside backward: call it after loss.backward()")
        if not self._departures.kept and not may_be_none:
            raise StateError(
                "sync_gradients() found no gradients to reduce: were forward and backward called, "
                "under no_sync()? Without it, backward reduces them itself"
            )
        self._check_hooks(None)
        token = Token()
        self._pass = Pass(lambda: token, True, len(self._units))
        self._finish()

    def discard_aborted(self) -> None:
        """Leave nothing of a backward that was aborted."""
        aborted = self._pass
        self._end()
        if aborted is not None:
            self._departures.discard(aborted)
            if not self._gathers.holds:
                self._gathers.release()


def _came(current: Pass) -> Iterator[nn.Parameter]:
    """What has a new reduced gradient, in one order on all ranks."""
    for started in current.reductions:
        for reduction in started:
            exposed = reduction.shard.storage.exposed
            yield from (param for param, new in zip(exposed, reduction.came, strict=True) if new)
