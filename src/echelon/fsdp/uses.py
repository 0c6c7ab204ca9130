"""Forwards of a unit whose backward may still come, and how far a backward has come with them.

[Note: when backward has left a unit]
An operation of a unit reads the parameters that it saved when its own backward runs, also those
that are frozen and get no gradient. So a unit must stay whole until the last of its operations is
done, and its gradients do not tell: that of a LayerNorm's input, with frozen weights, comes after
those of all trainable parameters behind it.
::

    x ──> frozen norm ──> linear ──> y
          4: reads .weight     2: gradient of linear.weight      1: backward reaches y
    3: gradient of linear's input                 5: gradient of x: backward has left the unit

Backward has passed an input when its gradient is complete, because all that a unit made of it ran
before. So hooks on the inputs that need a gradient tell that backward has left. Where an operation
leads to no input, its graph was made after the inputs were, and the engine runs what was made last
first. A forward of which no input is reached in this backward, because none needs a gradient or
because they came hidden in a closure, is left only when the whole backward is over.

[Note: one parameter, several accumulators]
Autograd adds up what the uses of a parameter give, and hands it over once. But where the parts of a
unit have another dtype or device than its whole parameters, torch gives a parameter a new
accumulator each time it is gathered. A unit that ran twice then gets two gradients of it in one
backward, and is complete only when the backward of every one of its forwards was there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from echelon.fsdp.backward_pass import Pass
from echelon.graph_task import will_run
from echelon.nested import tensors

__all__ = ["Use", "Uses"]


@final
class Use:
    """One forward of a unit. Its graph holds it, so it is gone when no backward can come."""

    __slots__ = ("__weakref__", "_inputs", "_left", "_reached_by")

    def __init__(self) -> None:
        self._reached_by: weakref.ref[Pass] | None = None
        self._inputs: list[tuple[Node, int, bool]] = []  # with the index, and whether it is a leaf
        self._left = 0  # inputs that the pass will come to

    def watch(self, inputs: Any, passed: Callable[[Use], None]) -> None:
        """Have ``passed`` called each time that a backward has passed one of ``inputs``.

        The hooks stay with the graph that made the inputs, also if the unit writes into them.
        """
        find = weakref.ref(self)  # an input may live longer than this

        def hook(*_: Tensor | None) -> None:
            use = find()
            if use is not None:
                passed(use)

        for tensor in tensors(inputs):
            if not tensor.requires_grad:
                continue
            node = tensor.grad_fn
            if node is None:  # a hook on a leaf itself would outlive the graph
                node = get_gradient_edge(tensor).node
                node.register_prehook(hook)
                self._inputs.append((node, 0, True))
            else:
                tensor.register_hook(hook)
                self._inputs.append((node, tensor.output_nr, False))

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is an input as it came in, so that nothing of this use led to it."""
        return any(
            tensor.grad_fn is node and tensor.output_nr == index for node, index, _ in self._inputs
        )

    def reach(self, current: Pass) -> bool:
        """A pass has come to an output of this use; whether for the first time."""
        if self.is_reached_by(current):
            return False
        self._reached_by = weakref.ref(current)
        # Whether a leaf will get its gradient cannot be asked in ``torch.autograd.grad``.
        self._left = sum(is_leaf or will_run(node) for node, _, is_leaf in self._inputs)
        return True

    def is_reached_by(self, current: Pass) -> bool:
        """Whether a pass has come to an output of this use."""
        return self._reached_by is not None and self._reached_by() is current

    def leave(self) -> bool:
        """The pass has passed one more input; whether that was the last one."""
        self._left -= 1
        return self._left == 0


@final
class Uses:
    """The forwards of one unit that have a graph."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Use] = weakref.WeakSet()

    def add(self) -> Use:
        """A forward begins that may make a graph."""
        use = Use()
        self._alive.add(use)
        return use

    def awaits(self, current: Pass) -> bool:
        """Whether a pass may still come to another forward."""
        return not all(use.is_reached_by(current) for use in self._alive)
