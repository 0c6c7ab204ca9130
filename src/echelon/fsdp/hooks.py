"""When units are gathered, released and reduced: the hooks on modules and on autograd.

[Note: life of a step]
Before the outermost forward, every rank makes its parts ready and all meet once. A unit is gathered
before its forward and released after it; a hook on the outputs gathers it again when backward
reaches it. A hook on each parameter counts gradients; a unit whose count is zero is *complete*: its
gradients leave, and it is released. Reductions leave in one order on all ranks, that of the
first backward, so a unit that one rank has used in part waits there, without its parameters, until
the end. Where gathers communicate, all ranks take part in all of them (see ``lineup``), and a unit
that this rank has not used leaves when its gather is over.
The callback at the end of backward sends what is left, waits for all, finds out which parameters
no rank used, and hands the reduced parts over as ``.grad``.

[Note: what .grad holds]
Outside of backward, the reduced gradient of this rank's part, or None. A backward that finds one
sets it aside and adds to it. Under ``no_sync`` whole gradients are kept aside, in the dtype of the
reduction, and join the next one; a reduced one stays as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.errors import StateError
from echelon.fsdp.backward_pass import Pass, Run
from echelon.fsdp.departures import Departures
from echelon.fsdp.gathers import Gathers
from echelon.fsdp.policy import Options
from echelon.fsdp.ranks import Ranks
from echelon.fsdp.storage import await_readers
from echelon.fsdp.unit import Unit
from echelon.fsdp.uses import Use, Uses
from echelon.graph_task import Token, in_backward, queue_end
from echelon.nested import tensors

__all__ = ["Hooks"]


@final
class Hooks:
    """The only object that sees autograd.

    Args:
        units: the root first.
        ranks: that share the units.
    """

    def __init__(self, units: Sequence[Unit], ranks: Ranks, options: Options) -> None:
        self.units, self.ranks, self._options = list(units), ranks, options
        self.syncing = True
        self.depth = 0  # forwards of the wrapper that are under way
        self.pinned = False  # all units stay whole
        self._pass: Pass | None = None
        self._gathers = Gathers(self.units, options)
        self._orders = self._gathers.orders
        self._run = Run()
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()  # forwards that await a backward
        self._departures = Departures(self.units, ranks, options, self._orders)
        self._storages = [storage for unit in units for storage in unit.storages]
        self._uses = [Uses() for _ in units]
        self._ids: dict[str, list[int]] = {}  # of our hooks on modules, by unit
        for u in range(len(units)):
            self._watch(u)

    def _watch(self, u: int) -> None:
        unit = self.units[u]
        if u:
            # A compiled module has its hooks traced, and these are not for a graph.
            before = torch.compiler.disable(lambda module, args: self.before_forward(u))
            after = torch.compiler.disable(
                lambda module, args, output: self.after_forward(u, output)
            )
            # Gather before the hooks that the model has: weight_norm computes its weight in one.
            handles = (
                unit.module.register_forward_pre_hook(before, prepend=True),
                unit.module.register_forward_hook(after, always_call=True),
            )
            self._ids[unit.name] = [handle.id for handle in handles]
        for param in unit.trainable:
            param.register_post_accumulate_grad_hook(self._arrival(u))

    def leave(self, copy: nn.Module) -> None:
        """Take these hooks off a copy of the model, which has got them from the model."""
        for name, ids in self._ids.items():
            module = copy.get_submodule(name)
            kinds: list[dict[int, Any]] = [
                module._forward_pre_hooks,
                module._forward_hooks,
                module._forward_hooks_always_called,
            ]
            for hooks in kinds:
                for hook in ids:
                    hooks.pop(hook, None)

    # Forward ---------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The outermost forward: parts are made ready before it, whatever ends it."""
        # Where the whole model is recomputed, its backward is under way and has all it needs.
        is_outermost = not self.depth and not in_backward()
        if is_outermost:
            self._begin_forward()
        self.depth += 1
        self.units[0].gather()
        try:
            yield
        except BaseException:
            if not in_backward():
                self.units[0].release()
            raise
        finally:
            self.depth -= 1
        if is_outermost:
            self._gathers.end_forward()
        if is_outermost and not self._gathers.holds and not torch.is_grad_enabled():
            # No backward follows, whose reductions tell that the others have read the parameters.
            self.rest("an evaluation is over")

    def _begin_forward(self) -> None:
        self._discard_aborted()
        for unit in self.units:
            unit.release()
        if not self._gathers.holds:
            self._gathers.begin_forward(self.ranks)
            self.prepare()
        self._run = Run()
        self._runs.add(self._run)

    def before_forward(self, u: int) -> None:
        """Gather a unit.

        Raises:
            StateError: nobody has made sure that the parts of all ranks are valid.
        """
        unit = self.units[u]
        if not unit.gathered and not self.depth and not in_backward():
            raise StateError(
                f"unit {unit.label!r} is sharded, and was called outside of the model's forward: "
                "call the wrapped model itself, or do it inside `with model.full_parameters():`, "
                "on all ranks"
            )
        if in_backward():
            self._begin()
            self._gathers.in_backward(u, self._send_ready)
        elif self.depth:
            self._run.units.add(u)
            self._gathers.in_forward(u)

    def prepare(self) -> None:
        """Make the own parts ready, and meet: from now on the parts of all ranks are valid."""
        if self._gathers.holds:
            self._gathers.let_go()  # a schedule ended early, and left what is old now
        await_readers(self._storages)  # once: each storage writes what gathers read
        with torch.no_grad():
            for storage in self._storages:
                storage.prepare()
        self.ranks.meet("parameters are ready")

    def hold(self) -> None:
        """Begin to make all units whole; they stay so, over many passes, until ``let_go``."""
        self.let_go()
        self._gathers.begin_forward(self.ranks)
        self.prepare()
        self._gathers.hold()

    def let_go(self) -> None:
        """Release all units. Does not communicate."""
        self._gathers.let_go()

    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a whole gradient to those that ``no_sync`` keeps."""
        self._departures.add(param, gradient)

    def rest(self, what: str) -> None:
        """Return when nobody reads the parts any more, so that they may be written."""
        await_readers(self._storages)
        self.ranks.meet(what)

    def before_write(self) -> None:
        """Return when the own parts may be written, and the next pass will take what they have.

        Does not communicate.
        """
        if self._gathers.holds:
            self._gathers.let_go()
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
    def busy(self) -> bool:
        """Whether a forward, a backward or ``full_parameters`` is under way."""
        if self.pinned:
            return True
        return bool(self.depth) or (self._pass is not None and self._pass.token() is not None)

    def after_forward(self, u: int, output: Any) -> None:
        """Release a unit, and see to it that backward gathers it again."""
        unit = self.units[u]
        watched = False
        if torch.is_grad_enabled() and output is not None:
            use = self._uses[u].add()
            for tensor in tensors(output):
                if tensor.grad_fn is not None:
                    # The graph holds the run, and tells so whether its backward may come.
                    tensor.register_hook(lambda grad, run=self._run: self._before_backward(u, use))
                    watched = True
        if self.pinned or in_backward():
            return  # a recomputed forward's backward comes next
        if not watched:
            unit.release()
        elif u == 0 or not self._options.strategy.regathers:
            unit.hide()  # the root's backward comes next, the others' parameters stay by choice
        else:
            unit.release()

    # Backward --------------------------------------------------------------------------------

    def _before_backward(self, u: int, use: Use) -> None:
        current = self._begin()
        is_new = not current.opened[u]
        is_another = self._uses[u].reach(use, current)
        if is_new:
            self._open(current, u)
        elif is_another:
            current.remaining[u] += self.units[u].num_recast
        self._gathers.in_backward(u, self._send_ready)
        if is_new:
            self._gathers.opened(u)

    def _begin(self) -> Pass:
        """The pass that runs, begun if none does."""
        current = self._pass
        if current is None or current.token() is None:
            self._discard_aborted()
            self._gathers.begin_backward()
            token = queue_end(self._end_backward)
            current = self._pass = Pass(token, self.syncing, len(self.units))
        return current

    def _open(self, current: Pass, u: int) -> None:
        if u in current.left_out:
            raise StateError(
                f"unit {self.units[u].label!r} got a gradient in a backward whose forward did not "
                "call its module: use its parameters inside of its own forward only"
            )
        current.opened[u] = True
        current.remaining[u] = len(self.units[u].trainable)
        with torch.no_grad():
            current.had[u] = [shard.set_aside() for shard in self.units[u].shards]

    def _arrival(self, u: int) -> Callable[[nn.Parameter], None]:
        # A parameter holds its hooks where the garbage collector does not look. If they held us,
        # who hold the parameters, a wrapper that is dropped would never be freed.
        find = weakref.ref(self)

        def hook(param: nn.Parameter) -> None:
            hooks = find()
            if hooks is not None:
                hooks._arrived(u, param)

        return hook

    def _arrived(self, u: int, param: nn.Parameter) -> None:
        current = self._pass
        if current is None or not current.opened[u]:
            current = self._begin()
            self._open_late(current, u, param)
        left = current.remaining[u] - 1
        current.remaining[u] = left
        if left == 0:
            if not (self.units[u].num_recast and self._uses[u].awaits(current)):
                self._complete(current, u)
        elif left < 0:
            raise StateError(
                f"a parameter of unit {self.units[u].label!r} got a second gradient in one "
                "backward, after the first left. Reentrant activation checkpointing of a "
                "shared module does that: use checkpoint(..., use_reentrant=False)"
            )

    def _open_late(self, current: Pass, u: int, param: nn.Parameter) -> None:
        """A gradient came to a unit whose outputs announced nothing: keep it, and open."""
        gradient, param.grad = param.grad, None
        self._open(current, u)
        param.grad = gradient

    def _complete(self, current: Pass, u: int) -> None:
        """All gradients of a unit are there: take them off, release it, send what may leave."""
        unit = self.units[u]
        gradients = self._departures.take(u)
        self._departures.weigh(current, gradients)
        unit.release()
        self._gathers.complete(u)
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
        return self._gathers.left_out(u) and not any(u in run.units for run in self._runs)

    def _end_backward(self) -> None:
        """Backward is over. Gathers first: others may need them to reduce what we wait for."""
        used = {u for run in self._runs for u in run.units}
        self._gathers.end_backward(used, self._send_ready)
        self._finish()

    def _finish(self) -> None:
        """Send what is left, wait for all, hand the reduced parts over."""
        current = self._pass
        assert current is not None
        if not current.synced:
            for u, opened in enumerate(current.opened):
                is_left = opened and u not in current.completed
                gradients = self._departures.take(u) if is_left else []
                self.units[u].release()
                if is_left:
                    self._departures.keep(u, gradients, current.had.pop(u))
            await_readers(self._storages)
            self._pass = None
            return
        self._departures.send_rest(current)
        for unit in self.units:
            unit.release()
        self._departures.settle(current)
        self._orders.note_reductions(current.completed)
        self._pass = None

    # Between passes --------------------------------------------------------------------------

    def reduce_now(self) -> None:
        """Reduce what ``no_sync`` kept.

        Raises:
            StateError: inside ``no_sync`` or a backward, or nothing was kept.
        """
        if not self.syncing:
            raise StateError("sync_gradients() inside no_sync(): leave the block first")
        if self._pass is not None and self._pass.token() is not None:
            raise StateError("sync_gradients() inside backward: call it after loss.backward()")
        if not self._departures.kept:
            raise StateError(
                "sync_gradients() found no gradients to reduce: were forward and backward called, "
                "under no_sync()? Without it, backward reduces them itself"
            )
        token = Token()
        self._pass = Pass(lambda: token, True, len(self.units))
        self._finish()

    def _discard_aborted(self) -> None:
        """Leave nothing of a backward that was aborted."""
        aborted, self._pass = self._pass, None
        if aborted is not None:
            self._departures.discard(aborted)
