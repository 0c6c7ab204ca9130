"""Which gradients of a backward are there: one hook a parameter, and counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
from torch import nn

from echelon.ddp.buckets import BucketPlan
from echelon.modules.deferred_hooks import DeferredHooks

# A gradient of 1 MiB or more is moved in its own hook: it is still in the cache, and its memory is
# free for the next one. Smaller ones are moved together, which costs less Python.
_LARGE_NBYTES = 1 << 20

_Hook = Callable[[nn.Parameter], None]


class Receiver(Protocol):
    """Who is told about arrivals."""

    def large(self, b: int, slot: int) -> None:
        """A large gradient is there; its bucket may not be complete."""

    def ready(self, b: int) -> None:
        """The last gradient of a bucket is there."""

    def unexpected(self, i: int, b: int) -> None:
        """A gradient came while none was expected, or came again."""


@final
class GradReadyCounter:
    """Counts the gradients of one backward, bucket by bucket.

    Between ``open`` and ``close`` each gradient is expected once. Outside, all count as seen, so a
    hook needs one test to find that something is unusual.

    Attributes:
        seen: for each parameter, 1 when its gradient is there.
        remaining: for each bucket, the number of gradients that are not there.
        order: the parameters in the order of arrival; recorded if asked for.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], receiver: Receiver, late: DeferredHooks
    ) -> None:
        self.order: list[int] = []
        self.seen = bytearray(b"\1" * len(params))
        self.remaining: list[int] = []
        self._params, self._late = params, late
        # A parameter holds its hooks where the garbage collector does not look. If hooks held the
        # receiver, which holds the parameters, a wrapper that is dropped would never be freed.
        self._receiver = weakref.ref(receiver)
        self._counts: list[int] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, plans: Sequence[BucketPlan], record: bool) -> None:
        """Hook all parameters, according to the buckets they are in.

        Args:
            record: whether to note the order of arrival.
        """
        self.unwatch()
        self._counts = [len(plan.members) for plan in plans]
        for b, plan in enumerate(plans):
            for slot, i in enumerate(plan.members):
                large = self._params[i].nbytes >= _LARGE_NBYTES
                hook = self._full(i, b, slot, large) if large or record else self._lean(i, b)
                self._watch(i, hook)

    def unwatch(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def open(self, counts: Sequence[int]) -> None:
        """Expect one gradient of every parameter.

        Args:
            counts: number of gradients of each bucket.
        """
        self.order.clear()
        self.remaining[:] = counts
        self.seen[:] = bytes(len(self.seen))

    def close(self) -> None:
        """Expect no gradient."""
        self.seen[:] = b"\1" * len(self.seen)

    def arrive(self, i: int, b: int, slot: int) -> None:
        """Count a gradient that its hook could not count."""
        self.order.append(i)
        self.seen[i] = 1
        receiver = self._receiver()
        assert receiver is not None
        if self._params[i].nbytes >= _LARGE_NBYTES:
            receiver.large(b, slot)
        self.remaining[b] -= 1
        if not self.remaining[b]:
            receiver.ready(b)

    def _watch(self, i: int, hook: _Hook) -> None:
        param = self._params[i]
        is_frozen = not param.requires_grad
        # torch takes hooks of what requires a gradient only, and keeps them when that ends.
        param.requires_grad_(True)
        self._handles.append(self._late.register(param, hook))
        param.requires_grad_(not is_frozen)

    def _lean(self, i: int, b: int) -> _Hook:
        # Runs once a parameter and backward, so it is as short as it can be.
        seen, remaining, find = self.seen, self.remaining, self._receiver

        def hook(param: nn.Parameter) -> None:
            if param.grad is None:
                return  # an ``autograd.Function`` has returned None: the parameter has no gradient
            if seen[i]:
                if (receiver := find()) is not None:
                    receiver.unexpected(i, b)
                return
            seen[i] = 1
            left = remaining[b] - 1
            remaining[b] = left
            if not left and (receiver := find()) is not None:
                receiver.ready(b)

        return hook

    def _full(self, i: int, b: int, slot: int, large: bool) -> _Hook:
        """The hook of a large gradient, and of all while the order of arrival is recorded."""
        seen, remaining, record = self.seen, self.remaining, self.order.append
        find = self._receiver

        def hook(param: nn.Parameter) -> None:
            receiver = find()
            if receiver is None:  # the wrapper was dropped: the module is a plain one again
                return
            if param.grad is None:
                return  # an ``autograd.Function`` has returned None: the parameter has no gradient
            if seen[i]:
                receiver.unexpected(i, b)
                return
            seen[i] = 1
            record(i)
            if large:
                receiver.large(b, slot)
            remaining[b] -= 1
            if not remaining[b]:
                receiver.ready(b)

        return hook
