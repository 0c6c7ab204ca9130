"""When gradients are reduced: hooks, counts of what is ready, launches in order, and the end of backward.

[Note: life of a backward]
A hook on the outputs of forward sees backward begin, before any gradient is made, and queues a
callback for its end in the same graph task; with reentrant checkpointing that is the outer one. A hook
on each parameter counts; a bucket whose count is zero is moved into its buffer and leaves, in the
order of the buckets. The callback sends what is left, waits for all, and finishes the gradients.

Everything that one backward knows is in a ``_Pass``. The queued callback owns its token, and the
engine drops the callback when backward raises. So a pass whose token is dead was aborted, and the
next backward starts anew without a call from the user.

[Note: what .grad holds]
After a backward that reduces, ``.grad`` is a view and holds the reduced gradient. A further
one sets it aside, reduces the new gradient alone and adds: old + reduced new, for every reduction.
A backward under ``no_sync`` accumulates what is local. On top of a reduced gradient it first brings
that to local units (a sum over ranks is divided by their number), so that the next reduction,
which takes whatever ``.grad`` holds, gives it back unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.ddp.buckets import Gradient, plan_buckets
from echelon.ddp.join import Rounds, Step
from echelon.ddp.memory import Bucket
from echelon.ddp.options import Options
from echelon.errors import StateError
from echelon.world.group import Group
from echelon.world.work import Work

__all__ = ["Reducer", "is_watched"]

# A gradient of 1 MiB or more is moved in its own hook: it is still in the cache, and its memory is
# free for the next one. Smaller ones are moved together, which costs less Python.
_LARGE_NBYTES = 1 << 20

# Hooks of ours carry this name, so that a second wrapper sees that the parameter is taken.
_MARK = "_echelon_ddp"

_Hook = Callable[[nn.Parameter], None]


class _Token:
    """Lives as long as the callback of one backward."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Pass:
    """One backward, or one call of ``sync_gradients``.

    Attributes:
        token: dead when the backward is over or was aborted.
        synced: whether it reduces.
        contributors: ranks that have a batch of their own in it.
        launched: number of buckets that are on their way.
        works: their communication.
        missing: for each launched bucket, the slots without a gradient here.
        olds: for each bucket, what was set aside.
    """

    token: Callable[[], _Token | None]
    synced: bool
    contributors: Sequence[int] = ()
    launched: int = 0
    works: list[Work | None] = field(default_factory=list)
    missing: list[list[int]] = field(default_factory=list)
    olds: list[tuple[list[int], list[Tensor]]] = field(default_factory=list)


def is_watched(param: nn.Parameter) -> bool:
    """Whether a reducer has its hook on ``param``."""
    hooks: dict[int, Any] = param._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
    return any(_MARK in getattr(hook, "__dict__", {}) for hook in hooks.values())


@final
class Reducer:
    """Reduces the gradients of ``named`` parameters over ``group``.

    Attributes:
        buckets: in the order in which they leave; empty before the first use of a copy.
        unused: indices of parameters without a gradient in the last reduction: here, and on all ranks.
        noticed: whether a rank answered ``notice`` with True since this was last set to False.
        rounds: how ranks agree on each step while some have no batches left; None outside ``join``.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        options: Options,
        notice: Callable[[], bool] | None = None,
    ) -> None:
        self.group = group
        self.buckets: tuple[Bucket, ...] = ()
        self.unused: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.noticed = False
        self.rounds: Rounds | None = None
        self._named = list(named)
        self._options = options
        self._notice = notice
        self._overlap = options.sync == "overlap"
        self._syncing = True
        self._pass: _Pass | None = None
        self._reduced = False  # whether the views hold reduced gradients
        self._world_rank = group.ranks[group.rank]
        # Order of arrival: recorded by the hooks until one whole backward was seen.
        self._arrivals: list[int] = []
        self._order: list[int] | None = None
        self._ordered = not self._overlap
        # What the hooks work on. All seen: no backward that reduces is under way.
        self._seen = bytearray(b"\1" * len(self._named))
        self._remaining: list[int] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        if not self._overlap:
            self._watch(0, lambda param: None)

    # Start and end of the reducer ------------------------------------------------------------

    def allocate(self, order: Sequence[int] | None = None) -> None:
        """Make the buckets and hook the parameters. All ranks of the group call it."""
        options = self._options
        self._close_buckets()
        gradients = []
        for _, param in self._named:
            wire = options.wire_dtype(param.dtype)
            gradients.append(Gradient(param.numel(), param.numel() * wire.itemsize, param.dtype))
        plans = plan_buckets(gradients, options.bucket_bytes, options.first_bucket_bytes, order)
        made = []
        for b, plan in enumerate(plans):
            dtype = options.wire_dtype(self._named[plan.members[0]][1].dtype)
            made.append(Bucket(b, plan, self._named, self.group, dtype))
        self.buckets = tuple(made)
        self._remaining[:] = [len(bucket.members) for bucket in made]
        if self._overlap:
            self._hook_parameters()

    def close(self) -> None:
        """Leave the parameters alone, and give the memory back."""
        self._discard_aborted()
        self._unhook_parameters()
        self._close_buckets()

    def _close_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.close()
        self.buckets = ()

    def _prepare(self) -> None:
        """Before a reduction: make the buckets of a copy, or make them anew in the order of arrival."""
        if not self.buckets:
            self.allocate()
        elif self._order is not None and not self._ordered:
            self._ordered = True
            source = self.rounds.first_active if self.rounds is not None else 0
            order = torch.tensor(self._order, device=self.group.device)
            if self.group.size > 1:
                self.group.broadcast(order, source, label="order of gradients")
            self.allocate(order.tolist())

    # Hooks -----------------------------------------------------------------------------------

    def _watch(self, i: int, hook: _Hook) -> None:
        setattr(hook, _MARK, True)
        self._handles.append(self._named[i][1].register_post_accumulate_grad_hook(hook))

    def _unhook_parameters(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_parameters(self) -> None:
        self._unhook_parameters()
        for b, bucket in enumerate(self.buckets):
            for slot, i in enumerate(bucket.members):
                large = bucket.params[slot].nbytes >= _LARGE_NBYTES
                if large or not self._ordered:
                    self._watch(i, self._full_hook(i, b, slot, large))
                else:
                    self._watch(i, self._lean_hook(i, b))

    def _lean_hook(self, i: int, b: int) -> _Hook:
        # Runs once a parameter and backward, so it is as short as it can be.
        seen, remaining, ready, special = self._seen, self._remaining, self._ready, self._special

        def hook(_: nn.Parameter) -> None:
            if seen[i]:
                special(i, b, None)
                return
            seen[i] = 1
            left = remaining[b] - 1
            remaining[b] = left
            if not left:
                ready(b)

        return hook

    def _full_hook(self, i: int, b: int, slot: int, large: bool) -> _Hook:
        """The hook of a large gradient, and of all while the order of arrival is not known."""
        seen, special, arrive = self._seen, self._special, self._arrive
        move = slot if large else None

        def hook(_: nn.Parameter) -> None:
            if seen[i]:
                special(i, b, move)
            else:
                arrive(i, b, move)

        return hook

    def _arrive(self, i: int, b: int, move: int | None) -> None:
        self._seen[i] = 1
        if not self._ordered:
            self._arrivals.append(i)
        if move is not None:
            with torch.no_grad():
                self.buckets[b].take_one(move)
        self._remaining[b] -= 1
        if not self._remaining[b]:
            self._ready(b)

    def _special(self, i: int, b: int, move: int | None) -> None:
        """A gradient that came in no backward, in one that does not reduce, or a second time in one."""
        current = self._current()
        if current is None:
            # No output of forward led here: the loss hides in an object, or did not come from forward.
            self.begin(first=i)
            if self._syncing:
                # The buckets may be new, so the numbers that this hook knows may be old.
                b = next(b for b, bucket in enumerate(self.buckets) if i in bucket.members)
                slot = self.buckets[b].members.index(i)
                self._arrive(i, b, None if move is None else slot)
        elif current.synced and b < current.launched:
            raise StateError(
                f"parameter {self._named[i][0]!r} got a second gradient in one backward, after the first "
                f"left with the {self.buckets[b].label}. Reentrant activation checkpointing of a shared "
                "module does that: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
                "run backward under no_sync() and call sync_gradients() after it"
            )

    # A backward ------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While the body runs, a backward accumulates local gradients and does not communicate."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def begin(self, first: int | None = None) -> None:
        """A backward begins, if none is under way. Called inside the engine.

        Args:
            first: the parameter whose gradient is there already, when nothing announced the backward.
        """
        if self._current() is not None:
            return
        token = _queue_end(self._finish if self._syncing else None)
        if not self._syncing:
            self._pass = _Pass(token, synced=False)
            if self._reduced:
                self._to_local_units(first)
            return
        self._start(_Pass(token, synced=True), first)
        self._seen[:] = bytes(len(self._seen))

    def reduce_now(self) -> None:
        """Reduce what ``.grad`` of every parameter holds now.

        Raises:
            StateError: inside ``no_sync`` or a backward, or the gradients are reduced already.
        """
        if not self._syncing:
            raise StateError("sync_gradients() inside no_sync(): leave the block first")
        if self._current() is not None:
            raise StateError("sync_gradients() inside backward: call it after loss.backward()")
        if self._overlap and self._reduced:
            if not self._has_local_gradients():
                raise StateError(
                    "the gradients were reduced by the last backward already: with sync='overlap', "
                    "call sync_gradients() only after backward under no_sync()"
                )
            self._to_local_units(None)
        token = _Token()
        self._start(_Pass(lambda: token, synced=True), None, keep=True)
        self._seen[:] = bytes(len(self._seen))
        self._finish()

    def shadow(self) -> None:
        """Take part in a reduction of the other ranks, with nothing of our own."""
        assert self.rounds is not None
        self._discard_aborted()
        self._prepare()
        self._pass = _Pass(lambda: None, synced=True, contributors=self.rounds.active)
        for bucket in self.buckets:
            bucket.drop()
            bucket.wire.zero_()
        for b in range(len(self.buckets)):
            self._launch(b, None)
        self._wait(self._pass)
        self._order = list(range(len(self._named)))  # replaced by that of a rank with batches
        self._reduced = False
        self._pass = None

    def _start(self, new: _Pass, first: int | None, keep: bool = False) -> None:
        """Begin a pass that reduces.

        Args:
            first: a parameter whose reduced gradient is mixed with a new one already.
            keep: ``.grad`` is what shall be reduced, so nothing is set aside.
        """
        self._discard_aborted()
        new.contributors = range(self.group.size)
        if self.rounds is not None:
            new.contributors = self.rounds.announce(Step.BACKWARD)
        with torch.no_grad():
            if self._reduced and not keep:
                if first is not None:
                    self._refuse_mixed(first)
                new.olds = [bucket.set_aside(first) for bucket in self.buckets]
            self._prepare()
        self._reduced = False
        self._arrivals.clear()
        self._remaining[:] = [len(bucket.members) for bucket in self.buckets]
        self._pass = new
        if events.listening():
            events.emit("ddp.backward", rank=self._world_rank, phase="begin")

    def _ready(self, b: int) -> None:
        """All gradients of a bucket are there: move them, and send what may leave in order."""
        current = self._pass
        assert current is not None
        with torch.no_grad():
            self.buckets[b].take()
            while current.launched < len(self.buckets) and not self._remaining[current.launched]:
                self._launch(current.launched, ())

    def _launch(self, b: int, missing: Sequence[int] | None) -> None:
        """Send a bucket. ``missing`` are slots without a gradient here; None: it is all zeros."""
        current = self._pass
        assert current is not None
        bucket = self.buckets[b]
        if missing is not None:
            bucket.flag(missing)
        if b == len(self.buckets) - 1:
            bucket.notice.fill_(self._notice is not None and self._notice())
        if events.listening():
            events.emit("ddp.bucket", rank=self._world_rank, bucket=b, nbytes=bucket.nbytes)
        work = None
        if self.group.size > 1:
            work = self.group.all_reduce(bucket.wire, self._op, async_op=True, label=bucket.label)
        current.works.append(work)
        current.missing.append(list(missing or ()))
        current.launched += 1

    @property
    def _op(self) -> str:
        # Inside join the mean is over the ranks that have a batch, which the group does not know.
        return "mean" if self._options.reduction == "mean" and self.rounds is None else "sum"

    def _launch_rest(self, current: _Pass) -> None:
        """Send the buckets that wait for gradients which did not come."""
        for b in range(current.launched, len(self.buckets)):
            bucket = self.buckets[b]
            missing = []
            if self._remaining[b]:
                for slot, (i, param) in enumerate(zip(bucket.members, bucket.params, strict=True)):
                    # A gradient of an earlier backward under no_sync counts, too.
                    if param.grad is not None:
                        bucket.take_one(slot)
                    elif not self._seen[i]:
                        bucket.zero(slot)
                        missing.append(slot)
            self._launch(b, missing)

    def _finish(self) -> None:
        """Backward is over: send what is left, wait for all, finish the gradients."""
        current = self._pass
        assert current is not None
        with torch.no_grad():
            self._launch_rest(current)
            self._seen[:] = b"\1" * len(self._seen)
            unused = self._wait(current)
            for bucket, (slots, olds) in zip(self.buckets, current.olds, strict=False):
                if slots:
                    bucket.put_back(slots, olds)
        self.unused = (tuple(unused[0]), tuple(unused[1]))
        self._reduced = True
        self._pass = None
        if self._order is None and self._arrivals:
            came = set(self._arrivals)
            self._order = self._arrivals + [
                i for bucket in self.buckets for i in bucket.members if i not in came
            ]
        if events.listening():
            events.emit("ddp.backward", rank=self._world_rank, phase="end")

    def _wait(self, current: _Pass) -> tuple[list[int], list[int]]:
        """Wait for every bucket and finish its gradients; who was unused here, and everywhere."""
        here: list[int] = []
        everywhere: list[int] = []
        divisor = 1.0 if self._op == "mean" else self._options.divisor(len(current.contributors))
        for bucket, work, missing in zip(self.buckets, current.works, current.missing, strict=True):
            if work is not None:
                work.wait()
            nowhere = bucket.settle(divisor, missing)
            here += [bucket.members[slot] for slot in missing]
            everywhere += [bucket.members[slot] for slot in nowhere]
        if self._notice is not None and bool(self.buckets[-1].notice != 0):
            self.noticed = True
        return sorted(here), sorted(everywhere)

    # State -----------------------------------------------------------------------------------

    def _current(self) -> _Pass | None:
        """The pass under way, or None when there is none or it was aborted."""
        if self._pass is not None and self._pass.token() is None:
            return None
        return self._pass

    def _discard_aborted(self) -> None:
        """Let the communication of an aborted backward end before its buffers are used again."""
        aborted, self._pass = self._pass, None
        if aborted is not None:
            for work in aborted.works:
                if work is not None:
                    work.wait()

    def _has_local_gradients(self) -> bool:
        return any(
            param.grad is not None and param.grad is not view
            for bucket in self.buckets
            for param, view in zip(bucket.params, bucket.views, strict=True)
        )

    def _factor(self) -> float:
        """What turns a reduced gradient into the share of each rank."""
        size = self.group.size
        return self._options.divisor(size) / size

    def _to_local_units(self, first: int | None) -> None:
        if first is not None:
            self._refuse_mixed(first)
        self._reduced = False
        if self._factor() != 1:
            with torch.no_grad():
                for bucket in self.buckets:
                    bucket.scale(self._factor())

    def _refuse_mixed(self, first: int) -> None:
        """Raise where a new gradient was added to a reduced one before we could tell them apart."""
        name, param = self._named[first]
        mixed = any(param.grad is view for bucket in self.buckets for view in bucket.views)
        if mixed and self._factor() != 1:
            raise StateError(
                f"parameter {name!r} got a new gradient on top of a reduced one in a backward that no output "
                "of forward announced: return tensors from forward, in tuples, lists, dicts or "
                "dataclasses, or call zero_grad(set_to_none=True) before backward"
            )


def _queue_end(end: Callable[[], None] | None) -> Callable[[], _Token | None]:
    """Have the engine call ``end`` when this backward is complete; a reference that dies with it.

    In a function of its own, so that the callback is the only owner of the token.
    """
    token = _Token()

    def callback(token: _Token = token) -> None:
        if end is not None:
            end()

    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    return weakref.ref(token)
