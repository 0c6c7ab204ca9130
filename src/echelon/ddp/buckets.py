"""Buckets: which gradients travel together, and the memory in which they do.

``plan_buckets`` is pure arithmetic: no ranks, no memory, no autograd. A ``Bucket`` is the buffer
of one plan and the views of it that are ``.grad``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.ranges import Placement, pack

# Gradients start at multiples of 16 elements: 64 bytes of float32, a cache line.
ALIGN_NUMEL = 16

# Numbers behind the flags of a bucket: of the last one, whether a rank's buffers changed, and
# whether a rank has frozen or thawed a parameter.
NUM_NOTICES = 2

_grad = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class BucketInfo:
    """Gradients that are reduced together, as a user can ask a ``DDP`` for them.

    Attributes:
        names: their parameters, in the order of the buffer.
        dtype: in which they travel.
        nbytes: size of the buffer, with padding and one flag a gradient.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unused:
    """Parameters that got no gradient in the last reduction, as a user can ask a ``DDP`` for them.

    Attributes:
        here: on this rank.
        everywhere: on no rank; their ``.grad`` was left as it was.
    """

    here: tuple[str, ...]
    everywhere: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a plan needs to know of one gradient.

    Attributes:
        numel: length in elements.
        nbytes: size on the wire, which counts against the cap of a bucket.
        kind: gradients of different kinds (dtypes) never share a bucket.
    """

    numel: int
    nbytes: int
    kind: Hashable = None


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: its gradients, in the order in which they lie in its buffer.

    Attributes:
        indices: of the gradients; the position of one in this tuple is its *slot*.
        placement: where each begins, in elements.
    """

    indices: tuple[int, ...]
    placement: Placement


def compute_buckets(
    nbytes: Sequence[int],
    bucket_bytes: int,
    first_bucket_bytes: int | None = None,
    *,
    kinds: Sequence[Hashable] | None = None,
    order: Iterable[int] | None = None,
) -> list[list[int]]:
    """Cut gradients into buckets, in the order in which backward is expected to make them.

    A bucket is closed before it would exceed its cap, so only a gradient that is larger than the
    cap makes a larger bucket, and then alone. Gradients of different ``kinds`` are not mixed. The
    expected ``order`` is the reverse of the given one if it is None. Buckets are listed by their
    last gradient, because that one decides when a bucket is ready. Law: every index is in exactly
    one bucket, and none is empty.

    Raises:
        ArgumentError: a size or a cap is negative, or ``order`` is not a permutation.

    Example:
        >>> compute_buckets([40, 40, 40], 80)
        [[2, 1], [0]]
        >>> compute_buckets([40, 400, 40], 100)
        [[2], [1], [0]]
        >>> compute_buckets([40, 40, 40], 80, first_bucket_bytes=40)
        [[2], [1, 0]]
    """
    num = len(nbytes)
    first_cap = bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
    if min((bucket_bytes, first_cap, *nbytes)) < 0:
        raise ArgumentError(f"sizes and caps are bytes >= 0, got {bucket_bytes}, {first_cap}")
    ready_order = list(reversed(range(num)) if order is None else order)
    if sorted(ready_order) != list(range(num)):
        raise ArgumentError(f"order {ready_order} is not a permutation of range({num})")
    buckets: list[list[int]] = []
    filled: list[int] = []
    open_buckets: dict[Hashable, int] = {}
    for i in ready_order:
        kind = None if kinds is None else kinds[i]
        b = open_buckets.get(kind)
        if b is None or filled[b] + nbytes[i] > (bucket_bytes if b else first_cap):
            b = open_buckets[kind] = len(buckets)
            buckets.append([])
            filled.append(0)
        buckets[b].append(i)
        filled[b] += nbytes[i]
    position = {i: k for k, i in enumerate(ready_order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def plan_buckets(
    gradients: Sequence[Gradient],
    bucket_bytes: int,
    first_bucket_bytes: int,
    order: Iterable[int] | None = None,
) -> tuple[BucketPlan, ...]:
    """Cut gradients into buckets and lay each bucket out.

    Example:
        >>> plan_buckets([Gradient(3, 12), Gradient(5, 20)], 100, 100)[0].indices
        (1, 0)
    """
    buckets = compute_buckets(
        [gradient.nbytes for gradient in gradients],
        bucket_bytes,
        first_bucket_bytes,
        kinds=[gradient.kind for gradient in gradients],
        order=order,
    )
    return tuple(
        BucketPlan(tuple(bucket), pack([gradients[i].numel for i in bucket], align=ALIGN_NUMEL))
        for bucket in buckets
    )


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
        indices: of the parameters; methods name a gradient by its slot, its position in here.
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
        self.indices = plan.indices
        self.names = tuple(named[i][0] for i in plan.indices)
        self.params = [named[i][1] for i in plan.indices]
        self.dtype = self.params[0].dtype
        self.label = f"gradients of {_span(self.names)} (bucket {index})"
        self._world_rank = group.ranks[group.rank]
        num, numel = len(self.indices), plan.placement.numel
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

    # Before the reduction --------------------------------------------------------------------

    def copy_in(self) -> None:
        """Move all gradients into the buffer; ``.grad`` become the views."""
        # Runs over all parameters in each backward: one fused copy, and loops that stay in C.
        grads = list(map(_grad, self.params))
        if self.casts or not any(map(is_, grads, self.views)):
            self._copy(self._wire_views, grads)
            deque(map(setattr, self.params, repeat("grad"), self.views), maxlen=0)
        else:
            for slot in range(len(self.indices)):
                self.copy_gradient_in(slot)

    def copy_gradient_in(self, slot: int) -> None:
        """Move one gradient into the buffer; its ``.grad`` becomes the view."""
        param, view = self.params[slot], self.views[slot]
        grad = param.grad
        if grad is not view or self.casts:
            self._copy([self._wire_views[slot]], [grad])
            param.grad = view

    def zero(self, slot: int) -> None:
        """Contribute nothing for one gradient; its ``.grad`` stays as it is."""
        self._wire_views[slot].zero_()

    def set_flags(self, missing: Sequence[int]) -> None:
        """Write the flags: 1 for all slots but those that are missing."""
        self._flags.fill_(1)
        for slot in missing:
            self._flags[slot] = 0

    # After the reduction ---------------------------------------------------------------------

    def finalize(self, divisor: float, missing: Sequence[int]) -> list[int]:
        """Divide the sums by ``divisor``, and give ``missing`` slots the gradient of other ranks.

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

    def detach_reduced(self, first: nn.Parameter | None) -> dict[int, Tensor]:
        """Take reduced gradients off their parameters, as copies, so that backward writes new ones.

        That of ``first`` is left, because it is no longer the reduced one. Returns the copies by
        the index of the parameter.
        """
        copies: dict[int, Tensor] = {}
        if not any(map(is_, map(_grad, self.params), self.views)):
            return copies  # the usual case, after zero_grad(): one loop that stays in C
        for i, param, view in zip(self.indices, self.params, self.views, strict=True):
            if param.grad is view and param is not first:
                copies[i] = view.clone()
                param.grad = None
        return copies

    def add_reduced(self, copies: Mapping[int, Tensor]) -> None:
        """Add what ``detach_reduced`` took to the gradients of now."""
        slots = [slot for slot, i in enumerate(self.indices) if i in copies]
        if slots:
            views = [self.views[slot] for slot in slots]
            torch._foreach_add_(views, [copies[self.indices[slot]] for slot in slots])
        for slot in slots:
            self.params[slot].grad = self.views[slot]

    def remember_version(self) -> None:
        """Take what the gradients are now as what the ranks have reduced."""
        self._version = self._gradients._version

    def is_written(self) -> bool:
        """Whether the user wrote other values than zero into the views since the reduction."""
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

    def clear_gradients(self) -> None:
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
        nbytes = {"gradients": self._gradients.nbytes if self.casts else self.nbytes}
        if self.casts:
            nbytes["communication"] = self.nbytes
        for category, n in nbytes.items():
            events.emit("memory", rank=self._world_rank, category=category, nbytes=sign * n)


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
