"""When units are gathered, released and reduced: the hooks on modules and on autograd.

[Note: life of a step]
Before the outermost forward, every rank makes its parts ready and all meet once. A unit is gathered
before its forward and released after it; a hook on the outputs gathers it again when backward
reaches it. A hook on each parameter counts gradients; a unit whose count is zero is *complete*: its
gradients leave, and it is released. Reductions leave in one order on all ranks, that of rank 0's
first backward, so a unit that one rank skipped waits there, without its parameters, until the end.
The callback at the end of backward sends what is left, waits for all, finds out which parameters
no rank used, and hands the reduced parts over as ``.grad``.

[Note: what .grad holds]
Outside of backward, the reduced gradient of this rank's part, or None. A backward that finds one
adds to it. Under ``no_sync`` whole gradients are kept aside, in the dtype of the reduction, and
join the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.errors import StateError
from echelon.fsdp.ahead import Ahead
from echelon.fsdp.backward_pass import Pass
from echelon.fsdp.gradients import Reduction
from echelon.fsdp.order import Order
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
        self.num_reductions = 0
        self.peak_whole_gradients = 0  # bytes, of units that backward is through with
        self._pass: Pass | None = None
        self._local: dict[int, list[Tensor | None]] = {}  # by unit, whole gradients of no_sync
        self._storages = [storage for unit in units for storage in unit.storages]
        self._order = Order(len(units))
        self._ahead = Ahead(self.units, options)
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
            handles = (
                unit.module.register_forward_pre_hook(before),
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
        if not self.depth:
            self._discard_aborted()
            for unit in self.units:
                unit.release()
            self._order.agree(self.ranks)
            self._ahead.begin_forward()
            self.prepare()
        self.depth += 1
        self.units[0].gather()
        try:
            yield
        except BaseException:
            self.units[0].release()
            raise
        finally:
            self.depth -= 1
        if not self.depth and not torch.is_grad_enabled():
            # No backward follows, whose reductions tell that the others have read the parameters.
            self.rest("an evaluation is over")

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
        unit.gather()
        if self.depth and not in_backward():
            self._ahead.in_forward(u)

    def prepare(self) -> None:
        """Make the own parts ready, and meet: from now on the parts of all ranks are valid."""
        await_readers(self._storages)  # once: each storage writes what gathers read
        with torch.no_grad():
            for storage in self._storages:
                storage.prepare()
        self.ranks.meet("parameters are ready")

    def rest(self, what: str) -> None:
        """Return when nobody reads the parts any more, so that they may be written."""
        await_readers(self._storages)
        self.ranks.meet(what)

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
                    tensor.register_hook(lambda grad: self._before_backward(u, use))
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
        self.units[u].gather()
        if is_new:
            self._ahead.in_backward(u)

    def _begin(self) -> Pass:
        """The pass that runs, begun if none does."""
        current = self._pass
        if current is None or current.token() is None:
            self._discard_aborted()
            token = queue_end(self._finish)
            current = self._pass = Pass(token, self.syncing, len(self.units))
        return current

    def _open(self, current: Pass, u: int) -> None:
        current.opened[u] = True
        current.remaining[u] = len(self.units[u].trainable)
        if current.synced:
            with torch.no_grad():
                current.had[u] = [shard.set_aside() for shard in self.units[u].shards]
        else:
            for param in self.units[u].trainable:
                if param.grad is not None:
                    raise StateError(
                        f"unit {self.units[u].label!r} has reduced gradients, and a backward under "
                        "no_sync() would add whole ones to them: call zero_grad() first, or leave "
                        "no_sync()"
                    )

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
        gradients = self._take(u)
        waiting = (gradients, *current.held.values(), *self._local.values())
        nbytes = sum(one.nbytes for some in waiting for one in some if one is not None)
        self.peak_whole_gradients = max(self.peak_whole_gradients, nbytes)
        unit.release()
        self._ahead.complete(u)
        current.completed.append(u)
        if not current.synced:
            self._keep(u, gradients)
            return
        current.held[u] = gradients
        self._send_ready(current)

    def _take(self, u: int) -> list[Tensor | None]:
        """The whole gradients of a unit, with those that ``no_sync`` kept; takes them off."""
        unit = self.units[u]
        gradients: list[Tensor | None] = [param.grad for param in unit.trainable]
        for param in unit.trainable:
            param.grad = None
        kept = self._local.pop(u, None)
        if kept is None:
            return gradients
        return [
            new if old is None else old if new is None else old + new.to(old.dtype)
            for old, new in zip(kept, gradients, strict=True)
        ]

    def _keep(self, u: int, gradients: Sequence[Tensor | None]) -> None:
        """Keep whole gradients of ``no_sync``, for the next ones to be added to."""
        dtypes = [one.wire_dtype for one in self.units[u].shards for _ in one.storage.params]
        self._local[u] = [
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, dtypes, strict=True)
        ]

    def _send_ready(self, current: Pass) -> None:
        order = self._order.units
        while current.sent < len(order) and order[current.sent] in current.held:
            u = order[current.sent]
            self._send(current, u, current.held.pop(u))

    def _send(self, current: Pass, u: int, gradients: list[Tensor | None]) -> None:
        """Reduce the whole gradients of a unit; empties the list, so that they are free early."""
        unit = self.units[u]
        had = current.had.get(u) or [shard.set_aside() for shard in unit.shards]
        started = []
        with torch.no_grad():
            for shard, old in zip(unit.shards, had, strict=True):
                num_params = len(shard.storage.params)
                own = gradients[:num_params]
                del gradients[:num_params]
                reduction = Reduction(shard, old, self._options, self.ranks.replicas)
                reduction.start(own)
                started.append(reduction)
                self.num_reductions += 1
        current.reductions.append(started)
        current.sent += 1

    def _finish(self) -> None:
        """Backward is over: send what is left, wait for all, hand the reduced parts over."""
        current = self._pass
        assert current is not None
        self._ahead.end_backward()
        if not current.synced:
            for u, opened in enumerate(current.opened):
                if opened and u not in current.completed:
                    self._keep(u, self._take(u))
                self.units[u].release()
            await_readers(self._storages)
            self._pass = None
            return
        for u in self._order.units[current.sent :]:
            gradients = current.held.pop(u, None)
            if gradients is None:
                gradients = self._take(u) if current.opened[u] else self._take_unopened(u)
            self.units[u].release()
            self._send(current, u, gradients)
        for unit in self.units:
            unit.release()
        self._settle(current)
        self._order.note(current.completed)
        self._pass = None

    def _take_unopened(self, u: int) -> list[Tensor | None]:
        """Of a unit that backward did not reach: what ``no_sync`` kept, or nothing."""
        kept = self._local.pop(u, None)
        return [None] * len(self.units[u].trainable) if kept is None else kept

    def _settle(self, current: Pass) -> None:
        """Wait for all reductions; agree on who has a gradient; set ``.grad``."""
        flat = [reduction for started in current.reductions for reduction in started]
        with torch.no_grad():
            for reduction in flat:
                reduction.finish()
            here = [new for reduction in flat for new in reduction.present]
            used = torch.ones(len(here), dtype=torch.uint8, device=self.ranks.shard.device)
            if not all(here):
                used.copy_(torch.tensor(here))
            if here:
                self.ranks.all_reduce(used, "max", "which parameters were used")
        # A rank that used them all knows the answer: on CUDA, reading it waits for the device.
        anywhere = here if all(here) else used.bool().tolist()
        first = 0
        for reduction in flat:
            last = first + len(reduction.present)
            reduction.hand_over(anywhere[first:last])
            first = last

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
        if not self._local:
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
            self._ahead.end_backward()
            for started in aborted.reductions:
                for reduction in started:
                    reduction.finish()
            for u, opened in enumerate(aborted.opened):
                if opened:
                    for param in self.units[u].trainable:
                        param.grad = None
