"""The memory of one bucket: its buffer on the wire, and the views that are ``.grad``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.comm.group import Group
from echelon.ddp.buckets import BucketPlan
from echelon.errors import StateError, UnsupportedError

NUM_NOTICES = 2

_grad = attrgetter("grad")


@final
class Bucket:
    """Gradients that travel together, in one buffer.

    ::

        window  | gradient 0 | pad | gradient 1 | … | 1 1 … 1 | n n |
                  [1] views                           [2]       [3]

    [1] ``.grad`` of the parameters; where gradients travel in another dtype, the views of a second
    buffer in the parameters' dtype. [2] one flag a gradient: 1 where this rank has it. After the
    reduction, 0 means that no rank has it. [3] the notices, two more numbers for the reducer's use.

    Attributes:
        members: indices of the parameters.
        params: the parameters, in the order of the buffer.
        names: their names.
        wire: what is reduced. 1D
        views: what ``.grad`` is, in the shape of each parameter.
        casts: whether gradients travel in another dtype than their own.
        label: what errors and events call it; the same on all ranks.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        wire_dtype: torch.dtype,
    ) -> None:
        self.members = plan.members
        self.names = tuple(named[i][0] for i in plan.members)
        self.params = [named[i][1] for i in plan.members]
        self.dtype = self.params[0].dtype
        self.label = f"gradients of {_span(self.names)} (bucket {index})"
        self._world_rank = group.ranks[group.rank]
        num, numel = len(self.members), plan.placement.numel
        self._window = group.window(numel + num + NUM_NOTICES, wire_dtype)
        self.wire = self._window.local
        self._flags = self.wire[numel : numel + num]
        self.notices = self.wire[numel + num :]
        self._body = self.wire[:numel]
        self.casts = wire_dtype != self.dtype
        self._gradients = self._body
        if self.casts:
            self._gradients = torch.zeros(numel, dtype=self.dtype, device=group.device)
        starts = plan.placement.starts
        self._wire_views = _views(self._body, starts, self.params)
        self.views = (
            _views(self._gradients, starts, self.params) if self.casts else self._wire_views
        )
        self._version = 0
        self._emit_memory(1)

    @property
    def nbytes(self) -> int:
        """Bytes that one reduction of this bucket is about, flags and padding included."""
        return self.wire.numel() * self.wire.element_size()

    def take(self) -> None:
        """Move the gradients of all members into the buffer; ``.grad`` become the views."""
        # Runs over all parameters in each backward: one fused copy, and loops that stay in C.
        grads = list(map(_grad, self.params))
        if self.casts or not any(map(is_, grads, self.views)):
            self._copy(self._wire_views, grads)
            deque(map(setattr, self.params, repeat("grad"), self.views), maxlen=0)
        else:
            for slot in range(len(self.members)):
                self.take_one(slot)

    def take_one(self, slot: int) -> None:
        """Move one gradient into the buffer; its ``.grad`` becomes the view."""
        param, view = self.params[slot], self.views[slot]
        grad = param.grad
        if grad is not view or self.casts:
            self._copy([self._wire_views[slot]], [grad])
            param.grad = view

    def zero(self, slot: int) -> None:
        """Contribute nothing for one gradient; its ``.grad`` stays as it is."""
        self._wire_views[slot].zero_()

    def flag(self, missing: Sequence[int]) -> None:
        """Write the flags: 1 for all slots but those that are missing."""
        self._flags.fill_(1)
        for slot in missing:
            self._flags[slot] = 0

    def settle(self, divisor: float, missing: Sequence[int]) -> list[int]:
        """Finish the gradients after the reduction.

        Args:
            divisor: what the sums still have to be divided by.
            missing: slots for which this rank had no gradient.

        Returns:
            Those of the missing slots that no rank had a gradient for.
        """
        if self.casts:
            self._gradients.copy_(self._body)
        if divisor != 1:
            self._gradients.div_(divisor)
        if not missing:
            return []
        present = (self._flags != 0).tolist()
        for slot in missing:
            if present[slot]:
                self.params[slot].grad = self.views[slot]
        return [slot for slot in missing if not present[slot]]

    def set_aside(self, first: nn.Parameter | None) -> dict[int, Tensor]:
        """Take reduced gradients off their parameters, as copies, so that backward writes new ones.

        Args:
            first: left out, because its gradient is no longer the reduced one.

        Returns:
            The copies, by index of the parameter.
        """
        olds: dict[int, Tensor] = {}
        if not any(map(is_, map(_grad, self.params), self.views)):
            return olds  # the usual case, after zero_grad(): one loop that stays in C
        for i, param, view in zip(self.members, self.params, self.views, strict=True):
            if param.grad is view and param is not first:
                olds[i] = view.clone()
                param.grad = None
        return olds

    def put_back(self, olds: Mapping[int, Tensor]) -> None:
        """Add what ``set_aside`` took to the gradients of now."""
        slots = [slot for slot, i in enumerate(self.members) if i in olds]
        if slots:
            views = [self.views[slot] for slot in slots]
            torch._foreach_add_(views, [olds[self.members[slot]] for slot in slots])
        for slot in slots:
            self.params[slot].grad = self.views[slot]

    def remember(self) -> None:
        """Take what the gradients are now as what the ranks have reduced."""
        self._version = self._gradients._version

    def is_written(self) -> bool:
        """Whether somebody wrote other values than zero into the views since ``remember``."""
        return self._gradients._version != self._version and any(
            param.grad is view and bool(view.any())
            for param, view in zip(self.params, self.views, strict=True)
        )

    def scale(self, factor: float) -> None:
        """Multiply the gradients that are views of this bucket."""
        views = [
            view for param, view in zip(self.params, self.views, strict=True) if param.grad is view
        ]
        if views:
            torch._foreach_mul_(views, factor)

    def drop(self) -> None:
        """Set ``.grad`` to None where it is a view of this bucket."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = None

    def close(self) -> None:
        """Give the memory back; gradients that live here move to memory of their own."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()
        self._emit_memory(-1)
        self._window.close()

    def _copy(self, targets: list[Tensor], grads: list[Tensor | None]) -> None:
        try:
            torch._foreach_copy_(targets, grads)  # type: ignore[arg-type]
        except (RuntimeError, TypeError) as error:
            named = list(zip(self.names, map(_grad, self.params), strict=True))
            for name, grad in named:
                if grad is not None and grad.layout is not torch.strided:
                    raise UnsupportedError(
                        f"parameter {name!r} got a gradient of layout {grad.layout}: DDP reduces "
                        "dense gradients only; build the module that makes it with sparse=False"
                    ) from error
            for name, grad in named:
                if grad is None:
                    raise StateError(
                        f"the gradient of parameter {name!r} was set to None during backward, "
                        "before it was reduced: do so after backward"
                    ) from error
            raise

    def _emit_memory(self, sign: int) -> None:
        if not events.listening():
            return
        owned = self._gradients.numel() * self._gradients.element_size()
        facts = [("gradients", owned if self.casts else self.nbytes)]
        if self.casts:
            facts.append(("communication", self.nbytes))
        for category, nbytes in facts:
            events.emit("memory", rank=self._world_rank, category=category, nbytes=sign * nbytes)


def _views(flat: Tensor, starts: Sequence[int], params: Sequence[nn.Parameter]) -> list[Tensor]:
    """A view of ``flat`` for each parameter, with its shape and, where it is dense, its strides.

    Equal strides keep copies and optimizers on their fast paths (channels-last weights).
    """
    views = []
    for start, param in zip(starts, params, strict=True):
        dims = sorted(range(param.dim()), key=param.stride, reverse=True)
        if param.is_contiguous() or not param.detach().permute(dims).is_contiguous():
            views.append(flat[start : start + param.numel()].view(param.shape))
        else:
            offset = flat.storage_offset() + start
            views.append(flat.as_strided(param.shape, param.stride(), offset))
    return views


def _span(names: Sequence[str]) -> str:
    """``a`` or ``a … b (7 parameters)``."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} … {names[-1]} ({len(names)} parameters)"
