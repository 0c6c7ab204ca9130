"""Where the gradients of a stage's large weights go: to ``.grad`` at once, or later.

[Note: two halves of a backward]
The gradient of a linear layer's input is needed by the stage before; that of its weight by nobody
until the optimizer. While a stage *defers*, its linear layers compute the first and keep what the
second needs: their input and the gradient of their output. Everything else (biases, norms,
embeddings) is finished at once. Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2;
by layer, as in Megatron-LM, so the graph is walked once and is free after the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from echelon.comm.streams import adds_in_order
from echelon.modules.autograd import (
    add_row_gradients,
    add_weight_gradient,
    weight_gradient,
)

_Half = tuple[Tensor, Tensor, Tensor]  # weight, input, gradient of the output


@final
class Deferred:
    """The second half of one backward: calls of ``run`` give what is left to the weights."""

    def __init__(self) -> None:
        self._halves: list[_Half] = []

    def add(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Keep what the gradient of ``weight`` needs."""
        self._halves.append((weight, x, grad))

    @torch.no_grad()
    def run(self, add: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Give all of it to ``add``, which takes a weight, an input and a gradient."""
        halves, self._halves = self._halves, []
        halves.reverse()
        while halves:
            add(*halves.pop())


@final
class WeightGradients:
    """What the layers of one stage do with the gradients of their weights.

    Args:
        local: whether nobody but the optimizer waits for them, so that they may be added to
            ``.grad`` without autograd. See [Note: added where it lies].
    """

    def __init__(self, *, local: bool) -> None:
        self._local = local
        self._adds = False  # a backward of this stage runs
        self._later: Deferred | None = None

    @contextmanager
    def added(self) -> Iterator[None]:
        """A backward in the body adds to what there is."""
        self._adds = self._local
        try:
            yield
        finally:
            self._adds = False

    @contextmanager
    def deferred(self) -> Iterator[Deferred]:
        """A backward in the body leaves the gradients of linear layers to what this yields."""
        self._later = later = Deferred()
        try:
            with self.added():
                yield later
        finally:
            self._later = None

    def linear(self, weight: Tensor, x: Tensor, grad: Tensor) -> Tensor | None:
        """What autograd gets as the gradient of a linear layer's weight; None if it is cared for.

        Args:
            x: the layer's input. (..., in)
            grad: of its output. (..., out)
        """
        if self._later is not None and not self._is_watched(weight):
            self._later.add(weight, x, grad)
            return None
        if self._may_add(weight):
            add_weight_gradient(weight, x, grad)
            return None
        return weight_gradient(x, grad)

    def embedding(self, weight: Tensor, index: Tensor, grad: Tensor) -> bool:
        """Whether the gradient of looked-up rows of ``weight`` has been added."""
        if not (adds_in_order(weight.device) and self._may_add(weight)):
            return False
        add_row_gradients(weight, index, grad)
        return True

    def _may_add(self, weight: Tensor) -> bool:
        return self._adds and weight.grad is not None and not self._is_watched(weight)

    def _is_watched(self, weight: Tensor) -> bool:
        """Whether the user has a hook on its gradient, which must then go through autograd."""
        # Wrappers that share gradients hang on to their arrival, and are told of them otherwise.
        arrives = self._local and weight._post_accumulate_grad_hooks
        return bool(weight._backward_hooks or arrives)
