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

[Note: a backward inside a backward]
A reentrant checkpoint runs its forward without a graph, and again in backward, with one whose
backward runs inside. The gradients of a parameter come once from each such backward. So a unit
that was called several times in this way is complete only when all those calls came again.

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
from echelon.modules.autograd import in_backward, sequence_number, will_run
from echelon.modules.nested import tensors


@final
class _Input:
    """An input of a forward that needs a gradient, as it was before that forward.

    Args:
        tensor: the input.
        hook: called when its gradient is complete.
    """

    __slots__ = ("_index", "_is_leaf", "_node")

    def __init__(self, tensor: Tensor, hook: Callable[..., None]) -> None:
        node = tensor.grad_fn
        self._index, self._is_leaf = tensor.output_nr, node is None
        if node is None:  # a hook on a leaf itself would outlive the graph
            node = get_gradient_edge(tensor).node
            node.register_prehook(hook)
        else:
            tensor.register_hook(hook)
        self._node = node

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is this input."""
        return tensor.grad_fn is self._node and tensor.output_nr == self._index

    @property
    def will_run(self) -> bool:
        """Whether the backward that runs comes to it; a leaf cannot be asked, and mostly is."""
        return self._is_leaf or will_run(self._node)


@final
class Use:
    """One forward of a unit. Its graph holds it, so it is gone when no backward can come.

    Attributes:
        nested: whether it ran inside of a backward; if that reaches it, see the note.
    """

    __slots__ = (
        "__weakref__",
        "_bases",
        "_by_base",
        "_first",
        "_inputs",
        "_left",
        "_reached_by",
        "nested",
    )

    def __init__(self) -> None:
        self.nested = in_backward()
        self._reached_by: weakref.ref[Pass] | None = None
        self._inputs: list[_Input] = []
        self._bases: list[_Input] = []  # of inputs that are views: see ``watch``
        self._by_base = False
        self._left = 0  # inputs that the pass will come to
        self._first = sequence_number()  # what has a lower one was made before

    def watch(self, inputs: Any, passed: Callable[[Use, bool], None]) -> None:
        """Have ``passed`` called, for ``leave``, each time that a backward passes an input.

        The hooks stay with the graph that made the inputs. A forward that writes into an input
        which is a view takes what made the view out of the graph, and what made its base stays.
        """
        for tensor in tensors(inputs):
            if tensor.requires_grad:
                self._inputs.append(_Input(tensor, self._hook(passed, by_base=False)))
                base = tensor._base
                if base is not None and base.requires_grad:
                    self._bases.append(_Input(base, self._hook(passed, by_base=True)))

    def _hook(self, passed: Callable[[Use, bool], None], *, by_base: bool) -> Callable[..., None]:
        find = weakref.ref(self)  # an input may live longer than this

        def hook(*_: Tensor | None) -> None:
            use = find()
            if use is not None:
                passed(use, by_base)

        return hook

    def made(self, output: Tensor) -> list[Node]:
        """The nodes of this forward by which backward may reach ``output``.

        Code that writes into an output which is a view takes what made the view out of the graph.
        """
        nodes = []
        for tensor in (output, output._base):
            node = None if tensor is None else tensor.grad_fn
            if tensor is None or node is None or node._sequence_nr() < self._first:
                continue
            if not any(one.is_of(tensor) for one in self._inputs):
                nodes.append(node)
        return nodes

    def reach(self, current: Pass) -> bool:
        """A pass has come to an output of this use; whether for the first time."""
        if self.is_reached_by(current):
            return False
        self._reached_by = weakref.ref(current)
        self._left = sum(one.will_run for one in self._inputs)
        self._by_base = not self._left
        if self._by_base:
            self._left = sum(one.will_run for one in self._bases)
        return True

    def leave(self, by_base: bool) -> bool:
        """The pass has passed one more input, or base of one; whether that was the last one."""
        self._left -= by_base is self._by_base
        return self._left == 0 and by_base is self._by_base

    def is_reached_by(self, current: Pass) -> bool:
        """Whether a pass has come to an output of this use."""
        return self._reached_by is not None and self._reached_by() is current


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
