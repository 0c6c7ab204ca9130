"""Buckets: which gradients are reduced together, and the memory in which they are.

``plan_buckets`` is pure arithmetic: no ranks, no memory, no autograd. A ``Bucket`` is the buffer
of one plan and the views of it that are ``.grad``.

[Note: gradients that somebody keeps]
After ``zero_grad()`` plain torch leaves the earlier gradients to whoever keeps them. If somebody
holds gradients of a bucket when the next ones are about to be written, these get ordinary memory,
on this rank alone: a collective takes tensors of a window and others together. The bucket returns
to its window when that is free again. Gradients that were not dropped are added to in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.comm.group import Group
from echelon.ddp.gradient_memory import GradientMemory
from echelon.ddp.options import DDPOptions
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.ranges import Placement, pack

# Gradients start at multiples of 16 elements: 64 bytes of float32, a cache line.
ALIGN_NUMEL = 16

# The notices are numbers behind the flags of a bucket. In the last bucket they are not zero after
# the reduction if, on some rank, a buffer has changed, a parameter was frozen or unfrozen, a
# forward wrote into a parameter, reduced gradients were set aside, none were or gradients had
# shares of them, or the last two are not looked at at once.
BUFFERS_CHANGED, TRAINABLE_CHANGED, PARAMETERS_WRITTEN, SET_ASIDE, SETS_NONE_ASIDE, LOOKS_LATE = (
    range(6)
)
NUM_NOTICES = 6

_grad = attrgetter("grad")


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: its gradients, in the order in which they lie in its buffer.

    Attributes:
        indices: the indices of the parameters; the position in this tuple is called *slot*.
        placement: where each gradient begins, in elements.
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
    cap makes a larger bucket, and then it is alone in it. ``first_bucket_bytes`` is one more cap of
    the first bucket. Gradients of different ``kinds`` never share a bucket. ``order`` is the
    expected order; None means the reverse of ``nbytes``. Buckets are listed by their last gradient,
    because that one decides when a bucket is ready.
    Law: every index is in exactly one bucket, and no bucket is empty.

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
    first_cap = min(first_cap, bucket_bytes)
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
    positions = {i: position for position, i in enumerate(ready_order)}
    return sorted(buckets, key=lambda bucket: positions[bucket[-1]])


def plan_buckets(
    params: Sequence[Tensor], options: DDPOptions, order: Iterable[int] | None = None
) -> tuple[BucketPlan, ...]:
    """Cut the gradients of ``params`` into buckets of one dtype and lay each bucket out.

    Example:
        >>> plan_buckets([torch.zeros(3), torch.zeros(5)], DDPOptions())[0].indices
        (1, 0)
    """
    buckets = compute_buckets(
        [param.numel() * options.wire_dtype(param.dtype).itemsize for param in params],
        options.bucket_bytes,
        options.first_bucket_bytes,
        kinds=[param.dtype for param in params],
        order=order,
    )
    return tuple(
        BucketPlan(tuple(bucket), pack([params[i].numel() for i in bucket], align=ALIGN_NUMEL))
        for bucket in buckets
    )


@final
class Bucket:
    """Gradients that are reduced together, in one buffer.

    Each ``.grad`` is a view of the buffer, as in torch's DDP with ``gradient_as_bucket_view=True``.

    ::

        wire  | gradient 0 | pad | gradient 1 | … | 1 1 … 1 | n n n |
                [1] wire_views                      [2]       [3]

    [1] These are ``.grad`` of the parameters. If gradients are reduced in another dtype, ``.grad``
    are the views of a second buffer, which has the parameters' dtype. [2] There is one flag for
    each gradient: 1 where this rank has it. After the reduction, 0 means that no rank has it.
    [3] The notices are six more numbers, which the reducer writes and reads.

    Attributes:
        indices: the indices of the parameters; methods name a gradient by its slot, which is the
            position in here.
        params: the parameters, in the order of the buffer.
        names: their names.
        wire: the buffer that is reduced. 1D
        notices: the part of ``wire`` that has the notices.
        grad_views: what ``.grad`` is, in the shape of each parameter.
        casts: whether gradients are reduced in another dtype than their parameters'.
        label: what errors and events call the bucket; the same on all ranks.
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
        self._starts, self._numel = plan.placement.starts, numel
        self._window = group.window(numel + num + NUM_NOTICES, wire_dtype)
        self.casts = wire_dtype != self.dtype
        self._home = self._memory_in(self._window.local)
        if self.casts:
            self._use_wire(self._home)
            self._home = self._memory_in(self.wire.new_zeros(numel, dtype=self.dtype))
        self._use(self._home)
        self._version = 0
        self._emit_memory(1)

    @property
    def nbytes(self) -> int:
        """Bytes that one reduction of this bucket sends, with flags and padding."""
        return self.wire.numel() * self.wire.element_size()

    @property
    def held_nbytes(self) -> int:
        """Bytes of the memory that it holds."""
        memories = [self.wire, self._home.flat, self._gradients.flat]
        return sum({flat.data_ptr(): flat.nbytes for flat in memories}.values())

    def _memory_in(self, flat: Tensor) -> GradientMemory:
        return GradientMemory(flat, self._numel, self._starts, self.params)

    def _use(self, memory: GradientMemory) -> None:
        """Let ``.grad`` lie in there from now on."""
        self._gradients, self.grad_views = memory, memory.views
        if not self.casts:
            self._use_wire(memory)

    def _use_wire(self, memory: GradientMemory) -> None:
        self.wire, self.notices, self._flags = memory.flat, memory.notices, memory.flags
        self._wire_grads, self._wire_views = memory.gradients, memory.views

    # Before the reduction --------------------------------------------------------------------

    def leave_to_holders(self) -> None:
        """Write the next gradients elsewhere if somebody keeps earlier ones; see the note."""
        before, home = self._gradients, self._home
        grads = list(map(_grad, self.params))
        is_left = False
        if before.exchanged():
            is_left = before.is_left()
            if not is_left:
                before.bring_back(grads)
        is_ours = list(map(is_, grads, before.views))
        del grads  # or these references would count as those of somebody who holds them
        if all(is_ours) and not is_left:
            return  # they are added to in place
        ours = [slot for slot, is_it in enumerate(is_ours) if is_it] if any(is_ours) else []
        for slot in ours:
            self.params[slot].grad = None
        may_return = before is not home and not ours
        if (is_held := is_left or before.is_held()) or may_return:
            if before is not home and not home.is_held():
                self._move(home)
            elif is_held:
                with torch.inference_mode(False):
                    self._move(self._memory_in(torch.zeros_like(before.flat)))
        for slot in ours:
            if self._gradients is not before:
                self.grad_views[slot].copy_(before.views[slot])
            self.params[slot].grad = self.grad_views[slot]
        if is_left:
            before.bring_back([None] * len(self.params))

    def _move(self, memory: GradientMemory) -> None:
        if self._gradients is not self._home:
            self._emit_bytes("gradients", -self._gradients.flat.nbytes)
        self._use(memory)
        if memory is not self._home:
            self._emit_bytes("gradients", memory.flat.nbytes)

    def copy_in(self, missing: Collection[int] = ()) -> None:
        """Move all gradients into the buffer; each ``.grad`` becomes its view.

        Slots that are ``missing`` contribute zeros, and their ``.grad`` stays as it is.
        """
        # Runs over all parameters in each backward: one fused copy, and loops that stay in C.
        grads = list(map(_grad, self.params))
        if has_views := any(map(is_, grads, self.grad_views)):
            self._gradients.bring_back(grads)  # a hook may have replaced the memory of one
        if not missing and (self.casts or not has_views):
            self._copy(self._wire_views, grads)
            deque(map(setattr, self.params, repeat("grad"), self.grad_views), maxlen=0)
        else:
            for slot in range(len(self.indices)):
                if slot in missing:
                    self._wire_views[slot].zero_()
                else:
                    self._copy_gradient_in(slot)

    def _copy_gradient_in(self, slot: int) -> None:
        param, view = self.params[slot], self.grad_views[slot]
        grad = param.grad
        if grad is not view or self.casts:
            self._copy([self._wire_views[slot]], [grad])
            param.grad = view

    def set_flags(self, missing: Sequence[int]) -> None:
        """Write the flags: 1 for all slots but those that are missing."""
        self._flags.fill_(1)
        for slot in missing:
            self._flags[slot] = 0

    # After the reduction ---------------------------------------------------------------------

    def finalize(self, divisor: float, missing: Sequence[int]) -> list[int]:
        """Divide the sums by ``divisor``, and give ``missing`` slots the gradient of other ranks.

        It returns those of the missing slots for which no rank had a gradient.
        """
        if self.casts:
            self._gradients.gradients.copy_(self._wire_grads)
        if divisor != 1:
            self._gradients.gradients.div_(divisor)
        if not missing:
            return []
        present = (self._flags != 0).tolist()
        for slot in missing:
            if present[slot]:
                self.params[slot].grad = self.grad_views[slot]
        return [slot for slot in missing if not present[slot]]

    def detach_reduced(self, arrived: nn.Parameter | None) -> dict[int, Tensor]:
        """Take reduced gradients off their parameters, so that backward writes new ones.

        It returns copies by the index of the parameter. ``arrived`` is skipped: this backward has
        already added to its gradient, which therefore is no longer the reduced one.
        """
        copies: dict[int, Tensor] = {}
        if not any(map(is_, map(_grad, self.params), self.grad_views)):
            return copies  # the usual case, after zero_grad(): one loop that stays in C
        for i, param, view in zip(self.indices, self.params, self.grad_views, strict=True):
            if param.grad is view and param is not arrived:
                copies[i] = view.clone()
                param.grad = None
        return copies

    def add_reduced(self, copies: Mapping[int, Tensor]) -> None:
        """Add the copies that ``detach_reduced`` has returned to the present gradients."""
        slots = [slot for slot, i in enumerate(self.indices) if i in copies]
        if slots:
            views = [self.grad_views[slot] for slot in slots]
            torch._foreach_add_(views, [copies[self.indices[slot]] for slot in slots])
        for slot in slots:
            self.params[slot].grad = self.grad_views[slot]

    def put_back(self, copies: Mapping[int, Tensor]) -> None:
        """Move the copies that ``detach_reduced`` has returned back into the buffer.

        Only those that are ``.grad``: somebody may have replaced or dropped others meanwhile.
        """
        for i, param, view in zip(self.indices, self.params, self.grad_views, strict=True):
            if i in copies and param.grad is copies[i]:
                param.grad = view.copy_(copies[i])

    def remember_version(self) -> None:
        """Remember that the ranks have reduced the gradients as they are now."""
        self._version = self._gradients.gradients._version

    def is_written(self) -> bool:
        """Whether the user has written values other than zero into the views since then."""
        return self._gradients.gradients._version != self._version and any(
            param.grad is view and bool(view.any())
            for param, view in zip(self.params, self.grad_views, strict=True)
        )

    def scale(self, factor: float) -> None:
        """Multiply the gradients that are views of this bucket."""
        views = [
            view
            for param, view in zip(self.params, self.grad_views, strict=True)
            if param.grad is view
        ]
        if views:
            torch._foreach_mul_(views, factor)

    def contribute_nothing(self) -> None:
        """Fill the buffer with zeros, and set ``.grad`` to None where it is a view of it."""
        for param, view in zip(self.params, self.grad_views, strict=True):
            if param.grad is view:
                param.grad = None
        self.leave_to_holders()
        self.wire.zero_()

    def close(self) -> None:
        """Give the memory back; gradients that lie in it move to memory of their own."""
        for param, view in zip(self.params, self.grad_views, strict=True):
            if param.grad is view:
                param.grad = view.clone()
        self._move(self._home)
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
        if self.casts:
            self._emit_bytes("communication", sign * self.nbytes)
        self._emit_bytes("gradients", sign * self._home.flat.nbytes)

    def _emit_bytes(self, category: str, nbytes: int) -> None:
        if events.listening():
            events.emit("memory", rank=self._world_rank, category=category, nbytes=nbytes)


def _span(names: Sequence[str]) -> str:
    """``a`` or ``a … b (7 parameters)``."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} … {names[-1]} ({len(names)} parameters)"
