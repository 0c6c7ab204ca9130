"""When units are gathered and released in forward: the hooks on modules, and what they hand on.

[Note: life of a step]
Before the outermost forward, every rank makes its parts ready and all meet once. A unit is gathered
before its forward and released after it; a hook on the outputs gathers it again when backward
reaches it. What then happens is in ``backward``. Where gathers communicate, all ranks take part in
all of them (see ``lineup``), and a unit that this rank has not used leaves when its gather is over.

[Note: what .grad holds]
Outside of backward, the reduced gradient of this rank's part, or None. A backward that finds one
sets it aside and adds to it. Under ``no_sync`` whole gradients are kept aside, in the dtype of the
reduction, and join the next one; a reduced one stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.errors import StateError
from echelon.fsdp.backward import Backward
from echelon.fsdp.backward_pass import Run
from echelon.fsdp.gathers import Gathers
from echelon.fsdp.gradient_reducer import GradientReducer
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.storage import await_readers, prepare
from echelon.fsdp.unit import Unit
from echelon.fsdp.uses import Use
from echelon.modules.autograd import in_backward
from echelon.modules.nested import tensors


class _HookEntry(NamedTuple):
    """A forward of a unit that is under way."""

    use: Use | None  # where a graph may come of it
    versions: Sequence[object]  # of its parameters before it


@final
class Hooks:
    """What the calls of modules do to units, and what a sharded model asks of them.

    Args:
        units: the root first.
        ranks: that share the units.
    """

    def __init__(self, units: Sequence[Unit], ranks: HybridGroups, options: FSDPOptions) -> None:
        self.units, self.ranks, self._options = list(units), ranks, options
        self.depth = 0  # forwards of the wrapper that are under way
        self._run = Run()
        self._has_graph = False  # of the outermost forward
        self._gathers = Gathers(self.units, options)
        self._departures = GradientReducer(self.units, ranks, options, self._gathers.orders)
        self._backward = Backward(self.units, self._gathers, self._departures, ranks)
        self._storages = [storage for unit in units for storage in unit.storages]
        self._entered: list[list[_HookEntry]] = [[] for _ in units]  # forwards under way, by unit
        self._ids: dict[str, list[int]] = {}  # of our hooks on modules, by unit
        for u in range(1, len(units)):
            self._watch(u)

    def _watch(self, u: int) -> None:
        unit = self.units[u]
        # A compiled module has its hooks traced, and these are not for a graph.
        before = torch.compiler.disable(
            lambda module, args, kwargs: self.before_forward(u, (args, kwargs))
        )
        after = torch.compiler.disable(lambda module, args, output: self.after_forward(u, output))
        # Gather before the hooks that the model has: weight_norm computes its weight in one.
        handles = (
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            unit.module.register_forward_hook(after, always_call=True),
        )
        self._ids[unit.name] = [handle.id for handle in handles]

    def leave(self, copy: nn.Module) -> None:
        """Take these hooks off a copy of the model, which has got them from the model."""
        for name, ids in self._ids.items():
            module = copy.get_submodule(name)
            kinds: list[dict[int, Any]] = [
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks,
                module._forward_hooks_always_called,
            ]
            for hooks in kinds:
                for hook in ids:
                    hooks.pop(hook, None)

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        self._backward.detach()

    # Forward ---------------------------------------------------------------------------------

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """The outermost forward: parts are made ready before it, whatever ends it."""
        # Where the whole model is recomputed, its backward is under way and has all it needs.
        is_outermost = not self.depth and not in_backward()
        if is_outermost:
            self._begin_forward()
        self.depth += 1
        self.units[0].gather()
        if self.depth == 1:
            self._enter(0, inputs)
        try:
            yield
        except BaseException:
            if is_outermost:
                self._backward.under_way.clear()
                self._backward.runs.discard(self._run)  # no backward of it comes
            if not in_backward():
                for u in self._run.opaque | {0}:
                    self.units[u].release()
            raise
        finally:
            self.depth -= 1
        if is_outermost:
            self._gathers.end_forward()
        if is_outermost and not self._gathers.holds and not torch.is_grad_enabled():
            # No backward follows, whose reductions tell that the others have read the parameters.
            self.rest("an evaluation is over")

    def discard_aborted(self) -> None:
        """Leave nothing of a backward that was aborted."""
        self._backward.discard_aborted()

    def _begin_forward(self) -> None:
        self._backward.defer_hooks()
        self._has_graph = torch.is_grad_enabled()
        self._run = Run()
        self._backward.runs.add(self._run)
        for unit, entered in zip(self.units, self._entered, strict=True):
            unit.release()
            entered.clear()  # a forward that was aborted has left some
        self._backward.under_way.clear()
        if not self._gathers.holds:
            self._gathers.begin_forward(self.ranks)
            self._make_ready()
            self._backward.all_are_done = False

    def _is_unseen(self, use: Use | None) -> bool:
        """Whether a forward that makes no graph may run again in backward, with one.

        That of a reentrant checkpoint does. Ranks must find it as whole there as other units.
        """
        return use is None and self._has_graph

    def check_root(self) -> None:
        """Before the forward of the module inside: only the wrapper gathers the root.

        Raises:
            StateError: it was called by itself.
        """
        root = self.units[0]
        if any(storage.sharded for storage in root.storages):
            self._check_inside(root)

    def _check_inside(self, unit: Unit) -> None:
        if not unit.gathered and not self.depth and not in_backward():
            raise StateError(
                f"unit {unit.label!r} is sharded, and was called outside of the model's forward: "
                "call the wrapped model itself, or do it inside `with model.full_parameters():`, "
                "on all ranks"
            )

    def before_forward(self, u: int, inputs: Any) -> None:
        """Gather a unit, and see to it that backward tells when it has left.

        Raises:
            StateError: nobody has made sure that the parts of all ranks are valid.
        """
        self._check_inside(self.units[u])
        if in_backward():
            self._backward.recompute(u)
        elif self.depth:
            self._run.units.add(u)
            self._gathers.in_forward(u)
        self._enter(u, inputs)

    def _enter(self, u: int, inputs: Any) -> None:
        use = None
        if not torch.is_grad_enabled() and not in_backward():
            self._run.unseen[u] += 1
        if torch.is_grad_enabled():
            use = self._backward.uses[u].add()
            use.watch(inputs, lambda use, by_base: self._backward.leave(u, use, by_base))
        self._entered[u].append(_HookEntry(use, self.units[u].versions()))
        if not in_backward():
            self._backward.under_way.append(u)

    def _watch_output(self, u: int, use: Use, tensor: Tensor) -> bool:
        """Have backward told when it reaches ``tensor``; whether it may."""
        nodes = use.made(tensor)
        for node in nodes:
            # The graph holds the run, and tells so whether its backward may come. What left the
            # unit after this one looks at the same tensor, and a hook on it comes before this.
            node.register_prehook(lambda grads, run=self._run: self._backward.reach(u, use, run))
        if nodes and not in_backward():
            self._run.is_awaited = True
        return bool(nodes)

    def prepare(self) -> None:
        """Make the own parts ready, and meet: from now on a gather gives what all ranks have now.

        Whatever a forward has left whole for its backward is released, as it may be old.
        """
        self._backward.discard_aborted()
        self._gathers.release()
        self._make_ready()

    def _make_ready(self) -> None:
        prepare(self._storages)
        self.ranks.meet("parameters are ready")

    def hold(self) -> None:
        """Begin to make all units whole; they stay so, over many passes, until ``let_go``."""
        self.let_go()
        self._gathers.begin_forward(self.ranks)
        self._make_ready()
        self._gathers.hold()

    def let_go(self) -> None:
        """Release all units. Does not communicate."""
        self._gathers.let_go()

    def release(self) -> None:
        """Release all units; a backward that comes gathers them again. Does not communicate.

        All ranks call it, outside of passes.
        """
        self._gathers.release()

    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a whole gradient to those that ``no_sync`` keeps."""
        self._departures.add(param, gradient)

    def rest(self, what: str) -> None:
        """Return when nobody reads the parts any more, so that they may be written."""
        await_readers(self._storages)
        self.ranks.meet(what)
        self._backward.all_are_done = True

    def await_forwards(self) -> None:
        """Return when no rank is in a forward that this one is through with.

        After a backward that has reduced, none is, and nothing happens. All ranks call it. If the
        backward of such a forward comes later, it gathers what was written.

        Raises:
            StateError: inside a backward, where parameters are whole or the others need them.
        """
        if self._backward.is_running:
            self._check_handed_over()
        if not (self._backward.all_are_done or self.busy):
            self.rest("parameters are written after a forward that no reduction has followed")
            self._gathers.release()

    def _check_handed_over(self) -> None:
        """Before parts are written inside a backward."""
        if not self._backward.hands_over:
            raise StateError(
                "an optimizer step or a load inside a backward, before the gradients of all ranks "
                "are reduced: call it after backward, or step in a hook that is registered with "
                "param.register_post_accumulate_grad_hook"
            )
        if self._gathers.holds or self._backward.under_way:
            raise StateError(
                "an optimizer step or a load in a hook on a gradient, while a forward is under way "
                "or parameters stay whole for several microbatches, which may read what it writes: "
                "call it after that"
            )

    def before_write(self) -> None:
        """Return when the own parts may be written, and the next pass will take what they have.

        Does not communicate.
        """
        self.release()
        await_readers(self._storages)

    @property
    def num_reductions(self) -> int:
        """How often the gradients of a unit's storage were reduced."""
        return self._departures.num_reductions

    @property
    def peak_whole_gradients(self) -> int:
        """Bytes of whole gradients, at most, of units that backward is through with."""
        return self._departures.peak_nbytes

    @property
    def syncing(self) -> bool:
        """Whether the next backward reduces."""
        return self._backward.syncing

    @syncing.setter
    def syncing(self, value: bool) -> None:
        self._backward.syncing = value

    def reduce_now(self, *, may_be_none: bool) -> None:
        """Reduce what ``no_sync`` kept; see ``Backward.reduce_now``."""
        self._backward.reduce_now(may_be_none=may_be_none)

    @property
    def pinned(self) -> bool:
        """Whether all units show whole parameters, until this is set to False."""
        return self.units[0].pinned

    @pinned.setter
    def pinned(self, value: bool) -> None:
        self._gathers.holds = value  # passes inside of the block gather nothing
        for unit in self.units:
            unit.pinned = value

    @property
    def busy(self) -> bool:
        """Whether a forward, a backward or ``full_parameters`` is under way."""
        if self.pinned:
            return True
        return bool(self.depth) or self._backward.is_running

    def after_forward(self, u: int, output: Any) -> None:
        """Release a unit, and see to it that backward gathers it again.

        Raises:
            StateError: forward has written into a parameter, or returned one of this unit.
        """
        unit, entered = self.units[u], self._entered[u]
        if not entered:
            return  # it was refused before it began
        use, versions = entered.pop()
        if not in_backward():
            self._backward.under_way.remove(u)
        if not self.pinned:
            unit.check_unwritten(versions)
        is_seen = is_watched = False
        for tensor in tensors(output):
            is_seen = True
            if not self.pinned:
                unit.check_not_inside(tensor)
            is_watched |= use is not None and self._watch_output(u, use, tensor)
        if self.pinned or in_backward() or entered:
            return  # a recomputed forward's backward comes next, or a module has called itself
        if use is not None and not is_seen:
            self._run.opaque.add(u)  # its outputs went another way
            unit.hide()
        elif is_watched and (u == 0 or u in self._gathers.orders.left_out):
            unit.hide()  # the root's backward comes next; the other's finds no gather
        elif not self._options.strategy.regathers and (is_watched or self._is_unseen(use)):
            unit.hide()  # by choice
        else:
            unit.release()
