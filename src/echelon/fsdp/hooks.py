"""When units are unsharded and resharded in forward: the hooks on modules, and who may write when.

[Note: life of a step]
Before the outermost forward, every rank makes its shards ready and all meet once. A unit is
unsharded before its forward and resharded after it; a hook on the outputs unshards it again when
backward reaches it. What then happens is in ``backward``. Where unshards communicate, all ranks
take part in all of them (see ``unsharder``).

[Note: what .grad holds]
Outside of backward, the reduced gradient of this rank's shard, or None. A backward that finds one
sets it aside and adds to it. Under ``no_sync`` unsharded gradients are kept aside, in the dtype of
the reduction, and join the next one; a reduced one stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.errors import StateError
from echelon.fsdp.backward import Backward
from echelon.fsdp.gradient_reducer import GradientReducer
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.pass_state import ForwardRun, UnitForward
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.storage import wait_for_unshards
from echelon.fsdp.unit import Unit
from echelon.fsdp.unsharder import Unsharder
from echelon.modules.autograd import in_backward
from echelon.modules.nested import tensors


class _Entered(NamedTuple):
    """A forward of a unit that is under way."""

    forward: UnitForward | None  # where a graph may come of it
    versions: Sequence[object]  # of its parameters before it


@final
class Hooks:
    """What the calls of modules do to units, and what a sharded model asks of them.

    Args:
        units: the root first.
        groups: the ranks that share the units.
    """

    def __init__(self, units: Sequence[Unit], groups: HybridGroups, options: FSDPOptions) -> None:
        self.units = list(units)
        self._reshards = options.traits.reshards_after_forward
        self.depth = 0  # forwards of the wrapper that are under way
        self._run = ForwardRun()
        self._has_graph = False  # of the outermost forward
        self._unsharder = Unsharder(self.units, groups, options)
        self._reducer = GradientReducer(self.units, groups, options, self._unsharder.order)
        self._backward = Backward(self.units, self._unsharder, self._reducer)
        self._storages = [storage for unit in units for storage in unit.storages]
        self._entered: list[list[_Entered]] = [[] for _ in units]  # forwards under way, by unit
        self._ids: dict[str, list[int]] = {}  # of our hooks on modules, by unit
        for u in range(1, len(units)):
            self._register(u)

    def _register(self, u: int) -> None:
        unit = self.units[u]
        # A compiled module has its hooks traced, and these are not for a graph.
        before = torch.compiler.disable(partial(self._before_forward, u))
        after = torch.compiler.disable(partial(self._after_forward, u))
        # Unshard before the hooks that the model has: weight_norm computes its weight in one.
        handles = (
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            unit.module.register_forward_hook(after, always_call=True),
        )
        self._ids[unit.name] = [handle.id for handle in handles]

    def remove_from_copy(self, copy: nn.Module) -> None:
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

    # Forward of the model --------------------------------------------------------------------

    @contextmanager
    def forward(self, inputs: Any) -> Iterator[None]:
        """The outermost forward: shards are made ready before it, whatever ends it."""
        is_nested = in_backward()
        # Where the whole model is recomputed, its backward is under way and has all it needs.
        is_outermost = not self.depth and not is_nested
        if is_outermost:
            self._begin_forward()
        self.depth += 1
        self.units[0].unshard()
        if self.depth == 1:
            self._enter(0, inputs, is_nested)
        try:
            yield
        except BaseException:
            if is_outermost:
                self._backward.under_way.clear()
                self._backward.runs.discard(self._run)  # no backward of it comes
            if not is_nested:
                for u in self._run.opaque | {0}:
                    self.units[u].reshard()
            raise
        finally:
            self.depth -= 1
        if is_outermost:
            self._unsharder.end_forward()
            if not self._unsharder.keeps_unsharded and not torch.is_grad_enabled():
                # No backward follows, whose reductions tell that the others have read the shards.
                self.wait_for_readers("an evaluation is over")

    def discard_aborted(self) -> None:
        """Leave nothing of a backward that was aborted."""
        self._backward.discard_aborted()

    def end_forward(self, output: Any) -> None:
        """The outermost forward of the model has returned ``output``."""
        self._leave(0, output)

    def _begin_forward(self) -> None:
        self._backward.defer_hooks()
        self._has_graph = torch.is_grad_enabled()
        self._run = ForwardRun()
        self._backward.runs.add(self._run)
        for unit, entered in zip(self.units, self._entered, strict=True):
            unit.reshard()
            entered.clear()  # a forward that was aborted has left some
        self._backward.under_way.clear()
        if not self._unsharder.keeps_unsharded:
            self._unsharder.begin_forward()
            self._backward.all_are_done = False

    # Forward of a unit -----------------------------------------------------------------------

    def check_root(self) -> None:
        """Before the forward of the module inside: only the wrapper unshards the root.

        Raises:
            StateError: it was called by itself.
        """
        root = self.units[0]
        if root.is_sharded:
            self._check_inside(root)

    def _check_inside(self, unit: Unit) -> None:
        if not (unit.is_unsharded or self.depth or in_backward()):
            raise StateError(
                f"unit {unit.label!r} is sharded, and was called outside of the model's forward: "
                "call the wrapped model itself, or do it inside `with model.full_parameters():`, "
                "on all ranks"
            )

    def _before_forward(self, u: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Unshard a unit, and see to it that backward tells when it has left.

        Raises:
            StateError: nobody has made sure that the shards of all ranks are valid.
        """
        self._check_inside(self.units[u])
        is_nested = in_backward()
        if is_nested:
            self._backward.recompute(u)
        elif self.depth:
            self._run.units.add(u)
            self._unsharder.unshard(u, self._unsharder.order.forward)
            self._unsharder.prefetch_in_forward()
        self._enter(u, (args, kwargs), is_nested)

    def _enter(self, u: int, inputs: Any, is_nested: bool) -> None:
        forward = None
        if torch.is_grad_enabled():
            forward = self._backward.forwards[u].add()
            forward.watch(inputs, partial(self._backward.leave, u))
        elif not is_nested:
            self._run.unseen[u] += 1
        self._entered[u].append(_Entered(forward, self.units[u].versions()))
        if not is_nested:
            self._backward.under_way.append(u)

    def _after_forward(self, u: int, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(u, output)

    def _leave(self, u: int, output: Any) -> None:
        """Reshard a unit, and see to it that backward unshards it again.

        Raises:
            StateError: forward has written into a parameter, or returned one of this unit.
        """
        unit, entered, pinned = self.units[u], self._entered[u], self.pinned
        if not entered:
            return  # it was refused before it began
        forward, versions = entered.pop()
        is_nested = in_backward()
        if not is_nested:
            self._backward.under_way.remove(u)
        if not pinned:
            unit.check_unwritten(versions)
        is_seen = is_watched = False
        for tensor in tensors(output):
            is_seen = True
            if not pinned:
                unit.check_not_inside(tensor)
            if forward is not None:
                is_watched |= self._watch_output(u, forward, tensor, is_nested)
        if pinned or is_nested or entered:
            return  # a recomputed forward's backward comes next, or a module has called itself
        if forward is not None and not is_seen:
            self._run.opaque.add(u)  # its outputs went another way
            unit.hide()
        elif is_watched and (u == 0 or u in self._unsharder.order.left_out):
            unit.hide()  # the root's backward comes next; the other's finds no unshard
        elif not self._reshards and (is_watched or self._is_unseen(forward)):
            unit.hide()  # by choice
        else:
            unit.reshard()

    def _watch_output(self, u: int, forward: UnitForward, tensor: Tensor, is_nested: bool) -> bool:
        """Have backward told when it reaches ``tensor``; whether it may."""
        nodes = forward.nodes_of(tensor)
        for node in nodes:
            # The graph holds the run, and tells so whether its backward may come. What left the
            # unit after this one looks at the same tensor, and a hook on it comes before this.
            run = self._run
            node.register_prehook(lambda grads, run=run: self._backward.reach(u, forward, run))
        if nodes and not is_nested:
            self._run.is_awaited = True
        return bool(nodes)

    def _is_unseen(self, forward: UnitForward | None) -> bool:
        """Whether a forward that makes no graph may run again in backward, with one.

        That of a reentrant checkpoint does. Ranks must find it as unsharded there as other units.
        """
        return forward is None and self._has_graph

    # Outside of passes -----------------------------------------------------------------------

    def publish_shards(self) -> None:
        """Make the shards ready, and meet: from now on an unshard gives what all ranks have now.

        Whatever a forward has left unsharded for its backward is resharded, as it may be old.
        """
        self._backward.discard_aborted()
        self._unsharder.reshard_between_passes()
        self._unsharder.publish_shards("parameters are ready")

    def unshard_all(self) -> None:
        """Begin to unshard all units; they stay so, over many passes, until ``reshard_all``."""
        self.reshard_all()
        self._unsharder.begin_forward()
        self._unsharder.unshard_all()

    def reshard_all(self) -> None:
        """Reshard all units. Does not communicate."""
        self._unsharder.reshard_all()

    def reshard_between_passes(self) -> None:
        """Reshard all units; a backward that comes unshards them again. Does not communicate.

        All ranks call it, outside of passes.
        """
        self._unsharder.reshard_between_passes()

    def wait_for_readers(self, what: str) -> None:
        """Return when nobody reads the shards any more, so that they may be written."""
        self._unsharder.wait_for_readers(what)
        self._backward.all_are_done = True

    def wait_for_forwards(self) -> None:
        """Return when no rank is in a forward that this one is through with.

        After a backward that has reduced, none is, and nothing happens. All ranks call it. If the
        backward of such a forward comes later, it unshards what was written.

        Raises:
            StateError: inside a backward, where parameters are unsharded or the others need them.
        """
        if self._backward.is_running:
            self._check_handed_over()
        if not (self._backward.all_are_done or self.busy):
            self.wait_for_readers(
                "parameters are written after a forward that no reduction has followed"
            )
            self._unsharder.reshard_between_passes()

    def _check_handed_over(self) -> None:
        """Before shards are written inside a backward."""
        if not self._backward.hands_over:
            raise StateError(
                "an optimizer step or a load inside a backward, before the gradients of all ranks "
                "are reduced: call it after backward, or step in a hook that is registered with "
                "param.register_post_accumulate_grad_hook"
            )
        if self._unsharder.keeps_unsharded or self._backward.under_way:
            raise StateError(
                "an optimizer step or a load in a hook on a gradient, while a forward is under way "
                "or parameters stay unsharded for several microbatches, which may read what it "
                "writes: call it after that"
            )

    def before_write(self) -> None:
        """Return when the shards may be written, and the next pass will take what they have.

        Does not communicate.
        """
        self.reshard_between_passes()
        wait_for_unshards(self._storages)

    @property
    def pinned(self) -> bool:
        """Whether all units show unsharded parameters, until this is set to False."""
        return self.units[0].pinned

    @pinned.setter
    def pinned(self, value: bool) -> None:
        self._unsharder.keeps_unsharded = value  # passes inside of the block unshard nothing
        for unit in self.units:
            unit.pinned = value

    @property
    def busy(self) -> bool:
        """Whether a forward, a backward or ``full_parameters`` is under way."""
        return self.pinned or bool(self.depth) or self._backward.is_running

    # Gradients -------------------------------------------------------------------------------

    def add_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add an unsharded gradient to those that ``no_sync`` keeps."""
        self._reducer.add(param, gradient)

    def reduce_now(self, *, may_be_none: bool) -> None:
        """Reduce what ``no_sync`` kept; see ``Backward.reduce_now``."""
        self._backward.reduce_now(may_be_none=may_be_none)

    @property
    def syncing(self) -> bool:
        """Whether the next backward reduces."""
        return self._backward.syncing

    @syncing.setter
    def syncing(self, value: bool) -> None:
        self._backward.syncing = value

    @property
    def num_reductions(self) -> int:
        """How often the gradients of a unit's storage were reduced."""
        return self._reducer.num_reductions

    @property
    def peak_unsharded_gradients(self) -> int:
        """Bytes of unsharded gradients, at most, of units that backward is through with."""
        return self._reducer.peak_nbytes
