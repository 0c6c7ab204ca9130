"""Which gradients of a backward are ready: one hook for each parameter, and counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
from torch import nn

from echelon.ddp.buckets import BucketPlan
from echelon.modules.deferred_hooks import DeferredHooks

_Hook = Callable[[nn.Parameter], None]


class ReadyListener(Protocol):
    """The object that a ``GradReadyCounter`` calls when gradients are ready."""

    def bucket_ready(self, b: int) -> None:
        """The last gradient of a bucket is ready."""

    def unexpected_gradient(self, i: int, b: int) -> None:
        """A gradient came while none was expected, or came again."""


@final
class GradReadyCounter:
    """Counts the gradients of one backward, bucket by bucket.

    Between ``expect`` and ``expect_none`` each gradient is expected once. At other times all count
    as ready, so one test in a hook detects every gradient that was not expected.

    Attributes:
        pending: for each bucket, the number of gradients that are not ready.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], listener: ReadyListener, user_hooks: DeferredHooks
    ) -> None:
        self._order: list[int] = []
        self._ready = bytearray(b"\1" * len(params))
        self.pending: list[int] = []
        self._params, self._user_hooks = params, user_hooks
        self._listener = weakref.ref(listener)  # see the note in ``deferred_hooks``
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def register_hooks(self, plans: Sequence[BucketPlan], record: bool) -> None:
        """Hook all parameters of the buckets; ``record`` the order in which they are ready."""
        self.remove_hooks()
        for b, plan in enumerate(plans):
            for i in plan.indices:
                self._register(i, self._hook(i, b, self._order.append if record else None))

    def remove_hooks(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def expect(self, counts: Sequence[int]) -> None:
        """Expect one gradient of every parameter, ``counts`` of them in each bucket."""
        self._order.clear()
        self.pending[:] = counts
        self._ready[:] = bytes(len(self._ready))

    def expect_none(self) -> None:
        """Expect no gradient."""
        self._ready[:] = b"\1" * len(self._ready)

    def ready_order(self, plans: Sequence[BucketPlan]) -> list[int]:
        """All parameters in the order in which they were ready; the unused ones come last."""
        planned = (i for plan in plans for i in plan.indices)
        return list(dict.fromkeys((*self._order, *planned)))

    def count(self, i: int, b: int) -> None:
        """Count a gradient that its hook could not count."""
        self._order.append(i)
        self._ready[i] = 1
        listener = self._listener()
        assert listener is not None
        self.pending[b] -= 1
        if not self.pending[b]:
            listener.bucket_ready(b)

    def _register(self, i: int, hook: _Hook) -> None:
        param = self._params[i]
        is_frozen = not param.requires_grad
        # torch accepts a hook only if the parameter requires a gradient, and keeps it afterwards.
        param.requires_grad_(True)
        self._handles.append(self._user_hooks.register(param, hook))
        param.requires_grad_(not is_frozen)

    def _hook(self, i: int, b: int, record: Callable[[int], None] | None) -> _Hook:
        # Runs once for each parameter and backward, so it is as short as it can be.
        ready, pending, find = self._ready, self.pending, self._listener

        def hook(param: nn.Parameter) -> None:
            if param.grad is None:
                return  # an ``autograd.Function`` has returned None: the parameter has no gradient
            if ready[i]:
                if (listener := find()) is not None:
                    listener.unexpected_gradient(i, b)
                return
            ready[i] = 1
            if record is not None:
                record(i)
            left = pending[b] - 1
            pending[b] = left
            if not left and (listener := find()) is not None:
                listener.bucket_ready(b)

        return hook
