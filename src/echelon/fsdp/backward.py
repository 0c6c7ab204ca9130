"""The backward of a sharded model: which units it has reached, left and completed.

[Note: when gradients are reduced]
Hooks on the outputs of a unit tell when backward reaches it, hooks on its inputs when backward has
left it (see ``pass_state``), and hooks on its parameters count gradients. A unit is *complete* when
backward has left it and all its gradients are there: it is resharded, and its gradients are
reduced. Reductions have one order on all ranks, that of the first backward, so a unit of which a
rank has used some parameters only waits there until the end. The callback at the end of backward
reduces what is left, waits for all reductions, finds out which parameters no rank used, and makes
the reduced shards ``.grad``.

[Note: aborted backwards]
A backward that raises may be caught on all ranks, which then go on. When its token dies, shards are
shown and ``.grad`` becomes again what it was, so that an optimizer may step at once. Its reductions
may still be under way, and other ranks may have failed before, so nothing waits for them there: the
next thing that a user asks for does, and drops them. What ``no_sync`` had kept is not held for
that: where it has joined a reduction, ``.grad`` says that it is lost, until it is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TypeVar, final

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils.hooks import RemovableHandle, unserializable_hook

from echelon.comm.compiler_bypass import bypass_compiler
from echelon.errors import StateError, UnsupportedError
from echelon.fsdp.gradient_reducer import GradientReducer
from echelon.fsdp.pass_state import (
    COMPLETE,
    REACHED,
    SKIPPED,
    UNREACHED,
    BackwardPass,
    ForwardRun,
    UnitForward,
    UnitForwards,
)
from echelon.fsdp.storage import wait_for_unshards
from echelon.fsdp.unit import Unit
from echelon.fsdp.unsharder import Unsharder
from echelon.modules.autograd import Token, is_of_inputs_only, queue_end, token_of_body
from echelon.modules.deferred_hooks import DeferredHooks
from echelon.modules.wrapper import check_may_sync

_Hooked = TypeVar("_Hooked", bound=Tensor)
_requires_grad = attrgetter("requires_grad")


@final
@bypass_compiler
class Backward:
    """What hooks on tensors and parameters call while autograd runs.

    Attributes:
        requires_gradient_sync: whether the next backward reduces gradients.
        forwards: by unit, its forwards that have a graph.
        hands_over: whether the hooks of users run, which get reduced gradients.
    """

    def __init__(
        self, units: Sequence[Unit], unsharder: Unsharder, reducer: GradientReducer
    ) -> None:
        self._units, self._unsharder, self._reducer = units, unsharder, reducer
        self._storages = [storage for unit in units for storage in unit.storages]
        self._trainable = [param for unit in units for param in unit.trainable]
        self.requires_gradient_sync = True
        self.forwards = [UnitForwards() for _ in units]
        self.hands_over = False
        self._had_graph = False  # whether a forward has had one since the last reduction
        self._runs: weakref.WeakSet[ForwardRun] = weakref.WeakSet()  # a backward of them may come
        self._in_forward: list[int] = []  # units in whose forward this rank is, outside of backward
        self._pass: BackwardPass | None = None
        self._handles: list[RemovableHandle] = []
        trainable = [shard.storage for unit in units for shard in unit.gradient_shards]
        flat = [storage.optimizer_params[0] for storage in trainable if storage.is_flat]
        named = ((member.name, member.param) for storage in trainable for member in storage.members)
        self._user_hooks = DeferredHooks(named, flat)
        self._flat = flat
        for u, unit in enumerate(units):
            for param in unit.trainable:
                arrived = self._hook(u, Backward._gradient_arrived)
                self._handles.append(self._user_hooks.register(param, arrived))
                if not unit.is_sharded:  # what it keeps may be used outside its forward
                    comes = unserializable_hook(self._hook(u, Backward._gradient_comes))
                    self._handles.append(param.register_hook(comes))

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._user_hooks.close()

    # Forwards --------------------------------------------------------------------------------

    def begin_forward(self, run: ForwardRun) -> None:
        """An outermost forward begins, whose backward may come."""
        self._user_hooks.defer()
        self._had_graph |= run.has_graph
        self._runs.add(run)
        self._in_forward.clear()

    def abandon_forward(self, run: ForwardRun) -> None:
        """An outermost forward has failed, so no backward of it comes."""
        self._in_forward.clear()
        self._runs.discard(run)

    def enter_forward(self, u: int) -> None:
        """A forward of a unit begins outside of backward."""
        self._in_forward.append(u)

    def leave_forward(self, u: int) -> None:
        """A forward of a unit is over that began outside of backward."""
        self._in_forward.remove(u)

    @property
    def in_forward(self) -> bool:
        """Whether this rank is in the forward of a unit, outside of backward."""
        return bool(self._in_forward)

    @property
    def is_running(self) -> bool:
        """Whether a backward is under way."""
        return self._pass is not None and self._pass.token() is not None

    # Begin -----------------------------------------------------------------------------------

    def _begin(self, arrived: nn.Parameter | None = None) -> BackwardPass:
        """Return the pass that runs; begin one if none does.

        ``arrived`` is the parameter whose gradient showed that a backward runs, if one did.
        """
        current = self._pass
        if current is None or current.token() is None:
            if self._units[0].always_shown:
                raise StateError(
                    "backward inside full_parameters(): a gradient becomes that of this rank's "
                    "shard, and the parameter is unsharded there. Call backward after the block"
                )
            self._check_hooks(arrived)
            self.discard_aborted()
            for u in self._in_forward:
                self._units[u].in_outer_forward = True
            self._reducer.begin()
            self._unsharder.begin_backward(self._runs, self._may_reach, self._launch_ready)
            token = queue_end(self._end_backward, self._token_died)
            current = BackwardPass(token, self._will_reduce(arrived), len(self._units))
            self._pass = current
            self._open_opaque(current)
        return current

    def _will_reduce(self, arrived: nn.Parameter | None) -> bool:
        """Whether the backward that begins reduces gradients.

        Other ranks may have no backward of inputs only, so that takes no part in a reduction.
        """
        if arrived is not None or not self.requires_gradient_sync:
            return self.requires_gradient_sync
        with DisableTorchFunctionSubclass():  # they may be parts
            return not is_of_inputs_only(self._trainable)

    def _open_opaque(self, current: BackwardPass) -> None:
        """Open the units whose outputs show no tensor, which backward may reach at any time."""
        for u in sorted({u for run in self._runs for u in run.opaque}):
            self._open_until_end(current, u)
            self._unsharder.unshard(u, self._unsharder.order.backward)

    def _may_reach(self, u: int) -> bool:
        """Whether the backward that runs may still need a unit that it has not unsharded."""
        unit, current = self._units[u], self._pass
        if current is not None and current.units[u].state is COMPLETE and unit.gradient_shards:
            return False
        return any(u in run.units for run in self._runs)

    def _check_hooks(self, arrived: nn.Parameter | None) -> None:
        """Let hooks of users wait; refuse one that would never be called, or too early."""
        self._user_hooks.defer(arrived)
        if any(param._backward_hooks for param in self._flat):
            raise StateError(
                "a hook was registered by register_hook on a flat parameter of FSDP, through which "
                "no gradient flows: use register_post_accumulate_grad_hook, which gets the reduced "
                "gradient, or wrap with use_orig_params=True"
            )
        if self._flat and (name := self._user_hooks.find()) is not None:
            raise StateError(
                f"a hook was registered on the gradient of parameter {name!r}, which FSDP has put "
                "into a flat parameter, so it gets no gradient of its own: register the hook on "
                "what model.parameters() gives, or wrap with use_orig_params=True"
            )

    # Reach a unit ----------------------------------------------------------------------------

    def reach(self, u: int, forward: UnitForward, run: ForwardRun) -> None:
        """Backward has reached an output of a unit: unshard it."""
        if torch.is_grad_enabled():
            resharded = "parameters that the next backward would read are resharded, and "
            raise UnsupportedError(
                f"create_graph=True over FSDP: {resharded if self._units[u].is_sharded else ''}"
                "reduced gradients have no graph. Take second derivatives (a gradient penalty, "
                "score matching) of a model in ec.DDP, or write the first one out as a forward"
            )
        run.awaits_backward = False
        current = self._begin()
        state = current.units[u]
        reopens = state.state is COMPLETE and not current.requires_gradient_sync
        opens = state.state in (UNREACHED, SKIPPED) or reopens  # what is kept may be added to
        if is_first_output := forward.reach(current):
            state.inside += 1
            state.nested += forward.nested
        if opens:
            self._open(current, u)
        elif is_first_output:
            unit = self._units[u]
            if repeated := unit.trainable if forward.nested else unit.recast:
                state.remaining += _num_expected(repeated)
                state.is_repeated = True
        self._unsharder.unshard(u, self._unsharder.order.backward)
        if opens:
            self._unsharder.prefetch_before_gradients()

    def recompute(self, u: int) -> None:
        """Forward runs again, inside of backward: unshard the unit."""
        self._begin()
        self._unsharder.unshard(u, self._unsharder.order.backward)

    def _open(self, current: BackwardPass, u: int) -> None:
        """Set aside the gradients that a unit has, and expect new ones."""
        if current.units[u].state is SKIPPED:
            raise StateError(
                f"unit {self._units[u].label!r} got a gradient in a backward whose forward did not "
                "call its module: use its parameters inside of its own forward only"
            )
        current.units[u].state = REACHED
        current.units[u].remaining = _num_expected(self._units[u].trainable)
        with torch.no_grad():
            current.reduced_before[u] = self._reducer.set_aside(u)

    def _open_until_end(self, current: BackwardPass, u: int) -> None:
        """Open a unit of which no hook tells when backward leaves it."""
        self._open(current, u)
        current.units[u].inside += 1

    def _hook(
        self, u: int, call: Callable[[Backward, int, _Hooked], None]
    ) -> Callable[[_Hooked], None]:
        reference = weakref.ref(self)  # see the note in ``deferred_hooks``

        def hook(hooked: _Hooked) -> None:
            backward = reference()
            if backward is not None:
                call(backward, u, hooked)

        return hook

    def _gradient_comes(self, u: int, gradient: Tensor) -> None:
        """Autograd is about to add a gradient to ``.grad``, which may be a reduced one."""
        current = self._pass
        if current is None or current.units[u].state in (UNREACHED, SKIPPED):
            current = self._begin()
            self._open_until_end(current, u)

    def _gradient_arrived(self, u: int, param: nn.Parameter) -> None:
        current = self._pass
        if current is None or current.units[u].state in (UNREACHED, SKIPPED):
            current = self._begin(param)
            self._open_late(current, u, param)
        state = current.units[u]
        if state.state is COMPLETE:
            raise StateError(
                f"a parameter of unit {self._units[u].label!r} got a second gradient in one "
                "backward, after the first was reduced. Reentrant activation checkpointing of a "
                "shared module does that: use checkpoint(..., use_reentrant=False)"
            )
        if state.is_repeated or id(param) not in state.arrived:
            state.remaining -= 1
            state.arrived.add(id(param))
        if state.remaining <= 0:
            self._complete_if_left(current, u)

    def _open_late(self, current: BackwardPass, u: int, param: nn.Parameter) -> None:
        """Open a unit when its first gradient arrives, as no hook on an output announced it.

        Raises StateError if the gradient was computed with this rank's shard of a parameter.
        """
        unit = self._units[u]
        if not unit.is_unsharded and unit.is_sharded:
            raise StateError(
                f"backward went through unit {unit.label!r} by a way that its outputs do not show, "
                "so its parameters were sharded and the gradient would be wrong: return what the "
                "loss needs from the unit's forward, as tensors, or make no unit of that module"
            )
        gradient, param.grad = param.grad, None
        self._open_until_end(current, u)
        param.grad = gradient

    # Leave a unit ----------------------------------------------------------------------------

    def pass_input(self, u: int, forward: UnitForward, by_base: bool) -> None:
        """Backward has passed an input of a unit, or the base of one that is a view."""
        current = self._pass
        if current is None or not self.is_running or not forward.is_reached_by(current):
            return  # backward reached that input by a path outside of this forward
        if forward.leave(by_base):
            current.units[u].inside -= 1
            self._complete_if_left(current, u)

    def _complete_if_left(self, current: BackwardPass, u: int) -> None:
        """Reshard a unit that backward has left, and reduce its gradients if all are there."""
        state, unit = current.units[u], self._units[u]
        if state.inside:
            return
        if state.state is COMPLETE:
            if not state.nested or not unit.gradient_shards:
                unit.reshard()  # its frozen parameters were needed until now
            # else another gradient may come, which is refused if its parameter is whole
            return
        if state.remaining > 0 or self._awaits(current, u):
            return
        gradients = self._reducer.collect(current, u)
        unit.reshard()
        self._unsharder.prefetch_after_gradients()
        state.state = COMPLETE
        if not unit.gradient_shards:
            return
        current.completed.append(u)
        if current.requires_gradient_sync:
            current.waiting[u] = gradients
            self._reducer.launch_ready(current, self._gets_no_gradient)
        else:
            self._reducer.keep(u, gradients, current.reduced_before.pop(u))

    def _awaits(self, current: BackwardPass, u: int) -> bool:
        """Whether more gradients may come to a unit that has one of each parameter.

        The notes in ``pass_state`` on nested backwards and on several accumulators say why.
        """
        nested = current.units[u].nested
        if nested and nested < sum(run.num_without_graph[u] for run in self._runs):
            return True
        return bool(nested or self._units[u].recast) and self.forwards[u].awaits(current)

    def _launch_ready(self) -> None:
        """Launch the reductions that come next in the order of all ranks and may go."""
        if self._pass is not None and self._pass.requires_gradient_sync:
            self._reducer.launch_ready(self._pass, self._gets_no_gradient)

    def _gets_no_gradient(self, u: int) -> bool:
        """Whether this rank gets no gradient of a unit, and no rank waits for its unshard of it."""
        return self._unsharder.is_done(u) and not any(u in run.units for run in self._runs)

    # End -------------------------------------------------------------------------------------

    def _end_backward(self) -> None:
        """Take part in the unshards that are left, then finish the gradients.

        Other ranks may need these unshards before they can reduce what this rank waits for.
        """
        by_run = [run.units for run in self._runs]
        used = set[int]().union(*by_run).intersection(*by_run)
        self._unsharder.end_backward(used, sum(run.awaits_backward for run in self._runs))
        self._finish_gradients()

    def _finish_gradients(self) -> None:
        """Reduce what is left, wait for all reductions, and make the reduced shards ``.grad``."""
        current = self._pass
        assert current is not None
        if not current.requires_gradient_sync:
            self._keep_gradients(current)
            return
        self._had_graph = False
        self._reducer.launch_rest(current)
        for unit in self._units:
            unit.reshard()
        changed = self._reducer.finish(current)
        self._unsharder.note_reduced(in_forward=self.in_forward)
        self._unsharder.order.note_reductions(current.completed)
        try:
            self._reducer.compare_trainable(changed)
            self._reducer.replica_check.count_reduction()
            self._run_hooks(current)
        finally:
            self._close_pass()

    def _keep_gradients(self, current: BackwardPass) -> None:
        """Under ``no_sync``: keep the gradients of units that are not complete."""
        for u, (unit, state) in enumerate(zip(self._units, current.units, strict=True)):
            is_left = state.state is REACHED
            gradients = self._reducer.detach_gradients(current, u) if is_left else []
            unit.reshard()
            if is_left:
                self._reducer.keep(u, gradients, current.reduced_before.pop(u))
        wait_for_unshards(self._storages)
        self._close_pass()

    def _run_hooks(self, current: BackwardPass) -> None:
        """Call the hooks of users; ``.grad`` is the reduced gradient of each shard by now."""
        self.hands_over = True
        try:
            self._user_hooks.run(_with_new_gradients(current))
        finally:
            self.hands_over = False

    def _close_pass(self) -> None:
        """No backward runs any more; forwards around it go on with unsharded parameters."""
        self._pass = None
        for u, unit in enumerate(self._units):
            if unit.in_outer_forward:
                unit.in_outer_forward = False
                if u in self._in_forward:  # otherwise that forward has failed
                    unit.unshard()

    @torch.inference_mode(mode=False)  # gradients outlive the caller's mode
    def reduce_now(self, *, may_be_none: bool) -> None:
        """Reduce what ``no_sync`` kept; with ``may_be_none`` a rank may take part with zeros.

        So may a rank whose forwards have used no parameter that trains.
        """
        check_may_sync(in_no_sync=not self.requires_gradient_sync, in_backward=self.is_running)
        self.discard_aborted()
        if not may_be_none and not self._had_graph and not self._reducer.has_kept:
            raise StateError(
                "sync_gradients() found no gradients to reduce: were forward and backward called, "
                "under no_sync()? Without it, backward reduces them itself"
            )
        self._check_hooks(None)
        with token_of_body(self._token_died) as token:
            self._pass = BackwardPass(token, True, len(self._units))
            self._finish_gradients()

    def _token_died(self, token: weakref.ref[Token]) -> None:
        """Undo an aborted backward at once, but for what communicates.

        Other ranks may have failed before, so the next thing that a user asks for waits for that.
        """
        aborted = self._pass
        if aborted is not None and aborted.token is token:
            self._restore(aborted)

    def _restore(self, aborted: BackwardPass) -> None:
        """Show shards and the gradients from before an aborted backward."""
        for unit in self._units:
            unit.hide()
        self._reducer.set_back(aborted)
        for u in self._in_forward:  # the backward was inside of it
            if self._units[u].has_unsharded:
                self._units[u].unshard()

    def discard_aborted(self) -> None:
        """Undo all of an aborted backward, and wait for the reductions that it has launched."""
        aborted = self._pass
        if aborted is not None:
            self._restore(aborted)
        self._close_pass()
        if aborted is not None:
            self._reducer.discard(aborted)
            if not self._unsharder.keeps_unsharded:
                self._unsharder.reshard_between_passes()


def _num_expected(params: Sequence[nn.Parameter]) -> int:
    """The number of gradients that will come; parameters may be frozen after wrapping."""
    with DisableTorchFunctionSubclass():  # they may be parts, whose facts take a look-up
        return sum(map(_requires_grad, params))


def _with_new_gradients(current: BackwardPass) -> Iterator[nn.Parameter]:
    """The parameters that have a new reduced gradient, in one order on all ranks."""
    for reductions in current.reductions:
        for reduction in reductions:
            params = reduction.shard.storage.optimizer_params
            is_new = reduction.has_new_gradient
            yield from (param for param, new in zip(params, is_new, strict=True) if new)
