"""What came of operations on absent tensors, so that a steady step does not repeat them.

[Note: the same absence again]
A stage runs the model's forward for every microbatch, and most of what comes before its blocks is
absent: shapes in, shapes out, the same each time. So the outcome of an operation is remembered by
its place in the forward, its function, and its operands: an absent one is itself, for it has
nothing but a shape; a real one is its shape, dtype, strides and device, for nothing else of it can
reach an absent outcome; a plain value is its value. The place keeps apart what two equal
calls give, which is not the same where a real operand or a random number is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

_MOST = 4096  # outcomes; a model of ever new shapes begins again from there
_PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@final
class Recall:
    """The outcomes of one stage; whether they are there or not, the stage computes the same."""

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, Any] = {}
        self._held: dict[int, Any] = {}  # tensors by identity, which no other gets while they live
        self._standing: dict[int, Any] | None = None  # those of modules that the stage lacks
        self._place = 0
        self._is_on = True

    def begin(self) -> None:
        """A forward begins."""
        self._place = 0
        if self._standing is None:
            self._standing = dict(self._held)
        if len(self._outcomes) > _MOST:
            self._forget()

    def stop(self) -> None:
        """An absent tensor was written, so it is no longer what it was: remember nothing more."""
        self._is_on = False
        self._forget()

    def _forget(self) -> None:
        self._outcomes.clear()
        self._held = dict(self._standing or {})

    def hold(self, tensor: Tensor) -> None:
        """``tensor`` is absent, and will be an operand again."""
        self._held[id(tensor)] = tensor

    def made(self, plain: Sequence[Any], make: Callable[[], Any]) -> Any:
        """What ``make`` gives, once for all plain values that are equal to these."""
        try:
            key = "made", self._form(plain)
        except _Unknown:
            return make()
        if not self._is_on:
            return make()
        if key not in self._outcomes:
            self._outcomes[key] = make()
        return self._outcomes[key]

    def key(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Hashable | None:
        """Under which the outcome of the next operation is remembered; None if it is not."""
        self._place += 1
        if not self._is_on:
            return None
        try:
            named = self._form(tuple(kwargs.items())) if kwargs else None
            return self._place, func, self._form(args), named
        except _Unknown:
            return None

    def find(self, key: Hashable | None) -> tuple[Any] | None:
        """The outcome, in a tuple; None if there is none."""
        return None if key is None else self._outcomes.get(key)

    def keep(self, key: Hashable | None, outcome: Any) -> None:
        """Remember an outcome, if it is such that nobody can change it."""
        parts = outcome if isinstance(outcome, tuple) else (outcome,)
        if key is None or not all(one is None or isinstance(one, _KEPT) for one in parts):
            return
        for one in parts:
            if isinstance(one, Tensor):
                self.hold(one)
        self._outcomes[key] = (outcome,)

    def _form(self, value: Any) -> Hashable:
        kind = type(value)
        if id(value) in self._held:  # absent
            return id(value)
        if kind in _PLAIN or value is None or value is ...:
            return kind, value
        if kind in (tuple, list, torch.Size):
            return kind, tuple([self._form(one) for one in value])
        if kind in (Tensor, torch.nn.Parameter):
            return value.shape, value.dtype, value.stride(), value.device
        if kind is slice:
            return slice, self._form((value.start, value.stop, value.step))
        raise _Unknown


_KEPT = (Tensor, *_PLAIN)


class _Unknown(Exception):
    """An operand that cannot be told from another."""
