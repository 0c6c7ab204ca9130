"""The hooks on modules, which unshard and reshard units in forward, and when shards are written.

[Note: life of a step]
Before the outermost forward, every rank makes its shards ready and all ranks meet once. A unit is
unsharded before its forward and resharded after it. A hook on the outputs unshards it again when
backward reaches it; ``backward`` says what happens then. Where unshards communicate, all ranks take
part in all of them (see ``unsharder``).

[Note: what .grad holds]
Outside of backward it is the reduced gradient of this rank's shard, or None. A backward sets the
gradient that it finds aside and adds to it. Under ``no_sync`` the unsharded gradients are kept, in
the dtype of the reduction, and join the next ones: ``.grad`` is then a ``KeptGradient``, which has
no values. Whoever drops it drops what is kept; a reduced gradient comes back in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.comm.compiler_bypass import bypass_compiler
from echelon.errors import StateError
from echelon.fsdp.backward import Backward
from echelon.fsdp.forward_writes import ForwardWatch
from echelon.fsdp.gradient_reducer import GradientReducer
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.pass_state import ForwardRun, UnitForward
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.storage import wait_for_unshards
from echelon.fsdp.unit import HIDDEN, SHARDED, ParameterVersions, Unit, UnitState
from echelon.fsdp.unsharder import Unsharder
from echelon.modules.autograd import in_backward
from echelon.modules.data_watch import DataWatch
from echelon.modules.nested import tensors


class _RunningForward(NamedTuple):
    """A forward of a unit that is under way."""

    record: UnitForward | None  # None where the forward makes no graph
    versions: ParameterVersions  # before the forward
    sums: Tensor | None  # of a forward that is watched, before it


@final
@bypass_compiler
class Hooks:
    """The hooks on the modules of all units, and the objects that they call.

    Attributes:
        units: the units of the model, the root first.
        unsharder: unshards them.
        reducer: keeps and reduces their gradients.
        backward: follows autograd.
        depth: the number of forwards of the wrapper that are under way.
    """

    def __init__(self, units: Sequence[Unit], groups: HybridGroups, options: FSDPOptions) -> None:
        self.units = list(units)
        self.unsharder = Unsharder(self.units, groups, options)
        self.reducer = GradientReducer(self.units, groups, options, self.unsharder.order)
        self.backward = Backward(self.units, self.unsharder, self.reducer)
        self.depth = 0
        self._data_watch = DataWatch(groups.shard)
        self._watch = ForwardWatch(self.units)
        self._reshards = options.traits.reshards_after_forward
        self._run = ForwardRun(has_graph=False)
        self._storages = [storage for unit in units for storage in unit.storages]
        self._running: list[list[_RunningForward]] = [[] for _ in units]  # by unit
        self._ids: dict[str, list[int]] = {}  # of our hooks on modules, by name of the unit
        for u in range(1, len(units)):
            self._register(u)

    def _register(self, u: int) -> None:
        unit = self.units[u]

        def post_forward(module: nn.Module, args: Any, output: Any) -> None:
            self._post_forward(u, output)

        # A compiled module has its hooks traced, and these must stay out of the graph.
        before = torch.compiler.disable(partial(self._pre_forward, u))
        after = torch.compiler.disable(post_forward)
        # Unshard before the hooks that the model has: weight_norm computes its weight in one.
        handles = (
            unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            unit.module.register_forward_hook(after, always_call=True),
        )
        self._ids[unit.name] = [handle.id for handle in handles]

    def remove_from_copy(self, copy: nn.Module) -> None:
        """Take these hooks off a copy of the model, which has inherited them."""
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

    # Forward of the model --------------------------------------------------------------------

    def forward(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call the module through ``call``; the outermost forward makes all shards ready first."""
        is_nested = in_backward()
        # Where a checkpoint recomputes the whole model, the backward under way has made it ready.
        is_outermost = not self.depth and not is_nested
        if is_outermost:
            self._begin_forward(args, kwargs)
        self.depth += 1
        try:
            self.units[0].unshard()
            if self.depth == 1:
                self._watch_forward(0, (args, kwargs), is_nested)
            refuses = is_outermost and not self.always_shown
            with self._watch.refuse_writes() if refuses else nullcontext():
                output = call(*args, **kwargs)
        except BaseException:
            if is_outermost:
                self.backward.abandon_forward(self._run)
            if not is_nested:
                for u in self._run.opaque | {0}:
                    self.units[u].forget_memory()
                    self.units[u].reshard()
            raise
        finally:
            self.depth -= 1
        if not self.depth:
            self._post_forward(0, output)  # it reads parameters, which others may write after this
        if is_outermost:
            self._end_forward()
        if is_outermost and not self.units[0].module.training:
            self._reshard_after_evaluation()
        return output

    def _reshard_after_evaluation(self) -> None:
        """Under ``eval()`` no backward is likely to come; one that comes unshards again."""
        if self._run.has_graph and not self.unsharder.keeps_unsharded and not self.depth:
            self.unsharder.reshard_between_passes()

    def _begin_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._run = ForwardRun(has_graph=torch.is_grad_enabled())
        if self._run.has_graph and not torch.compiler.is_compiling():
            self._data_watch.begin_forward(args, kwargs)
        self._watch.begin_forward(training=self.units[0].module.training)
        self.backward.begin_forward(self._run)
        self.reducer.drop_unused()
        for unit, running in zip(self.units, self._running, strict=True):
            unit.reshard()
            running.clear()  # an aborted forward leaves entries
        if not self.unsharder.keeps_unsharded:
            self.unsharder.begin_forward()

    def _end_forward(self) -> None:
        self.unsharder.end_forward()
        if not self.unsharder.keeps_unsharded and not torch.is_grad_enabled():
            # No backward follows, whose reductions would show that the others have read the shards.
            self.unsharder.wait_for_readers("an evaluation is over")

    # Forward of a unit -----------------------------------------------------------------------

    def check_root(self) -> None:
        """Refuse a forward of the wrapped module itself: only the wrapper unshards the root."""
        self._check_inside(self.units[0])

    def _check_inside(self, unit: Unit) -> None:
        if not (unit.is_unsharded or self.depth or in_backward()) and unit.is_sharded:
            raise StateError(
                f"unit {unit.label!r} is sharded, and was called outside of the model's forward: "
                "call the wrapped model itself, or do it inside `with model.full_parameters():`, "
                "on all ranks"
            )

    def _pre_forward(self, u: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Unshard a unit, and have backward told when it has left the unit."""
        self._check_inside(self.units[u])
        is_nested = in_backward()
        if is_nested:
            self.backward.recompute(u)
        elif self.depth:
            self._run.units.add(u)
            self.unsharder.unshard(u, self.unsharder.order.forward)
            self.unsharder.prefetch_in_forward()
        self._watch_forward(u, (args, kwargs), is_nested)

    def _watch_forward(self, u: int, inputs: Any, is_nested: bool) -> None:
        """Watch the inputs of a forward that begins, and remember its parameters' versions."""
        record = None
        if torch.is_grad_enabled():
            record = self.backward.forwards[u].add()
            record.watch(inputs, partial(self.backward.pass_input, u))
        elif not is_nested:
            self._run.num_without_graph[u] += 1
        unit = self.units[u]
        unit.keep_memory()
        sums = unit.bit_sums() if self._watch.is_on and not is_nested else None
        self._running[u].append(_RunningForward(record, unit.versions(), sums))
        if not is_nested:
            self.backward.enter_forward(u)

    def _post_forward(self, u: int, output: Any) -> None:
        """Reshard a unit, and have backward told when it reaches the outputs.

        Raises StateError if the forward wrote into a parameter, or returned one of this unit.
        """
        unit, running, always_shown = self.units[u], self._running[u], self.always_shown
        if not running:
            return  # the forward was refused before it began
        record, versions, sums = running.pop()
        if not running:
            unit.forget_memory()
        is_nested = in_backward()
        if not is_nested:
            self.backward.leave_forward(u)
        if not always_shown:
            unit.check_unwritten(versions)
            unit.check_bit_sums(sums)
        has_tensors = is_watched = False
        for tensor in tensors(output):
            has_tensors = True
            if not always_shown:
                unit.check_output(tensor)
            if record is not None:
                is_watched |= self._watch_output(u, record, tensor, is_nested)
        if always_shown or is_nested or running:
            return  # the backward of a recomputed forward comes next, or the module called itself
        if record is not None and not has_tensors:
            self._run.opaque.add(u)
        if self._state_after_forward(u, record, has_tensors, is_watched) is HIDDEN:
            unit.hide()
        else:
            unit.reshard()

    def _state_after_forward(
        self, u: int, record: UnitForward | None, has_tensors: bool, is_watched: bool
    ) -> UnitState:
        """HIDDEN if the unsharded parameters of a unit are kept for its backward, else SHARDED."""
        if record is not None and not has_tensors:
            return HIDDEN  # the outputs show no tensor, so no hook tells when backward comes
        if is_watched and u == 0:
            return HIDDEN  # the backward of the root comes next
        if is_watched and u in self.unsharder.order.unsharded_only_in_forward:
            return HIDDEN  # no rank expects to unshard it in backward
        if is_watched and not self._reshards:
            return HIDDEN  # the strategy keeps it for backward
        if record is None and self._run.has_graph and not self._reshards:
            # A reentrant checkpoint may run this forward again in backward, with a graph. All ranks
            # must find it as unsharded there as the units that backward reaches.
            return HIDDEN
        return SHARDED

    def _watch_output(self, u: int, record: UnitForward, tensor: Tensor, is_nested: bool) -> bool:
        """Have backward told when it reaches ``tensor``; returns whether it may reach it."""
        nodes = record.nodes_of(tensor)
        for node in nodes:
            # The graph holds the run, so the run is alive as long as a backward of it may come.
            # The next unit has a hook on the same tensor, its input. That one runs before a hook on
            # the node, so backward leaves the next unit before it reaches this one.
            run = self._run
            node.register_prehook(lambda grads, run=run: self.backward.reach(u, record, run))
        if nodes and not is_nested:
            self._run.awaits_backward = True
        return bool(nodes)

    # Outside of passes -----------------------------------------------------------------------

    def publish_shards(self) -> None:
        """Make the shards ready and meet, so that an unshard gives what all ranks have now.

        Units that a forward has left unsharded for its backward are resharded: they may be old.
        """
        self.backward.discard_aborted()
        self.unsharder.reshard_between_passes()
        self.unsharder.publish_shards("parameters are ready")

    def wait_for_forwards(self) -> None:
        """Return when no rank is in a forward that this one has left. All ranks call it.

        After a backward that has reduced, none is, and nothing happens. If the backward of such a
        forward comes later, it unshards what was written. Raises StateError inside a backward,
        where parameters are unsharded or other ranks need them.
        """
        if self.backward.is_running:
            self._check_handed_over()
        if self.unsharder.has_readers and not self.busy:
            self.unsharder.wait_for_readers(
                "parameters are written after a forward that no reduction has followed"
            )
            self.unsharder.reshard_between_passes()

    def _check_handed_over(self) -> None:
        """Refuse a write of shards inside a backward, except in a hook on a reduced gradient."""
        if not self.backward.hands_over:
            raise StateError(
                "an optimizer step or a load inside a backward, before the gradients of all ranks "
                "are reduced: call it after backward, or step in a hook that is registered with "
                "param.register_post_accumulate_grad_hook"
            )
        if self.unsharder.keeps_unsharded or self.backward.in_forward:
            raise StateError(
                "an optimizer step or a load in a hook on a gradient, while a forward is under way "
                "or parameters stay unsharded for several microbatches, which may read what it "
                "writes: call it after that"
            )

    def before_write(self) -> None:
        """Return when this rank's shards may be written, for the next pass. Sends nothing."""
        self.unsharder.reshard_between_passes()
        wait_for_unshards(self._storages)

    @property
    def always_shown(self) -> bool:
        """Whether all units show unsharded parameters until this is set to False."""
        return self.units[0].always_shown

    @always_shown.setter
    def always_shown(self, value: bool) -> None:
        self.unsharder.keeps_unsharded = value  # passes inside of the block unshard nothing
        for unit in self.units:
            unit.always_shown = value

    @property
    def busy(self) -> bool:
        """Whether a forward, a backward or ``full_parameters`` is under way."""
        return self.always_shown or bool(self.depth) or self.backward.is_running
