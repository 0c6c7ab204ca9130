"""What one forward and one backward of a sharded model know of its units.

A forward of a unit knows whether a backward may still come to it, and how far the backward that
runs has come with it. A backward knows which units it has reached, and which are complete.

[Note: when backward has left a unit]
An operation of a unit reads the parameters that it saved when its own backward runs, also those
that are frozen and get no gradient. So a unit must stay unsharded until the last of its operations
is done, and its gradients do not tell: that of a LayerNorm's input, with frozen weights, comes
after those of all trainable parameters behind it.
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
Autograd adds up what the uses of a parameter give, and hands it over once. But where the shards of
a unit have another dtype or device than its unsharded parameters, torch gives a parameter a new
accumulator each time it is unsharded. A unit that ran twice then gets two gradients of it in one
backward, and is complete only when the backward of every one of its forwards was there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, final

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from echelon.fsdp.gradients import Reduction
from echelon.modules.autograd import Token, in_backward, sequence_number, will_run
from echelon.modules.nested import tensors


@final
class ForwardRun:
    """What one forward of the model has used; gone when no backward of it can come.

    Attributes:
        units: those that it has called.
        opaque: those whose outputs show no tensor, so that nothing tells when backward comes.
        is_awaited: whether it has made a graph to which no backward has come.
        unseen: how often it has called a unit without a graph, as reentrant checkpoints do.
    """

    __slots__ = ("__weakref__", "is_awaited", "opaque", "units", "unseen")

    def __init__(self) -> None:
        self.units = {0}
        self.is_awaited = False
        self.unseen: Counter[int] = Counter()
        self.opaque: set[int] = set()


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
class UnitForward:
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
        self._reached_by: weakref.ref[BackwardPass] | None = None
        self._inputs: list[_Input] = []
        self._bases: list[_Input] = []  # of inputs that are views: see ``watch``
        self._by_base = False
        self._left = 0  # inputs that the backward will come to
        self._first = sequence_number()  # what has a lower one was made before

    def watch(self, inputs: Any, passed: Callable[[UnitForward, bool], None]) -> None:
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

    def _hook(
        self, passed: Callable[[UnitForward, bool], None], *, by_base: bool
    ) -> Callable[..., None]:
        find = weakref.ref(self)  # an input may live longer than this

        def hook(*_: Tensor | None) -> None:
            forward = find()
            if forward is not None:
                passed(forward, by_base)

        return hook

    def nodes_of(self, output: Tensor) -> list[Node]:
        """The nodes of this forward by which backward may reach ``output``.

        Code that writes into an output which is a view takes what made the view out of the graph.
        """
        nodes = []
        for tensor in (output, output._base):
            node = None if tensor is None else tensor.grad_fn
            if tensor is None or node is None or node._sequence_nr() < self._first:
                continue
            if not any(known.is_of(tensor) for known in self._inputs):
                nodes.append(node)
        return nodes

    def reach(self, current: BackwardPass) -> bool:
        """A backward has come to an output of this forward; whether for the first time."""
        if self.is_reached_by(current):
            return False
        self._reached_by = weakref.ref(current)
        self._left = sum(known.will_run for known in self._inputs)
        self._by_base = not self._left
        if self._by_base:
            self._left = sum(known.will_run for known in self._bases)
        return True

    def leave(self, by_base: bool) -> bool:
        """That backward has passed one more input, or base of one; whether it was the last one."""
        self._left -= by_base is self._by_base
        return self._left == 0 and by_base is self._by_base

    def is_reached_by(self, current: BackwardPass) -> bool:
        """Whether a backward has come to an output of this forward."""
        return self._reached_by is not None and self._reached_by() is current


@final
class UnitForwards:
    """The forwards of one unit that have a graph."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[UnitForward] = weakref.WeakSet()

    def add(self) -> UnitForward:
        """A forward begins that may make a graph."""
        forward = UnitForward()
        self._alive.add(forward)
        return forward

    def awaits(self, current: BackwardPass) -> bool:
        """Whether a backward may still come to another forward."""
        return not all(forward.is_reached_by(current) for forward in self._alive)


class BackwardState(Enum):
    """How far one backward has come with one unit."""

    UNREACHED = "no gradient of it has come, and no output of it was reached"
    REACHED = "its gradients come"
    COMPLETE = "its gradients were taken off its parameters"
    SKIPPED = "it was reduced without gradients, because no forward had used it"


UNREACHED, REACHED, COMPLETE, SKIPPED = BackwardState


@final
class UnitBackward:
    """One unit in one backward.

    Attributes:
        state: how far the backward has come with it.
        remaining: how many of its gradients have not come.
        arrived: parameters whose gradients have come. In the root there may be parameters of units
            in reentrant checkpoints, and one gradient of them from each.
        is_repeated: whether each forward of it brings gradients of its own.
        inside: forwards of it whose outputs backward has reached, and whose inputs it has not.
        nested: forwards of it that ran in this backward and have a backward of their own in it.
    """

    __slots__ = ("arrived", "inside", "is_repeated", "nested", "remaining", "state")

    def __init__(self) -> None:
        self.state = UNREACHED
        self.is_repeated = False
        self.arrived: set[nn.Parameter] = set()
        self.remaining = self.inside = self.nested = 0


@final
class BackwardPass:
    """One backward: from the first gradient to the end, or until it is found to be aborted.

    Attributes:
        token: gives None when it is over or was aborted.
        synced: whether it reduces.
        units: by unit, how far it has come with that.
        completed: units whose gradients were all there, in that order.
        had: by unit, for each of its gradient shards, which parameters had a gradient before.
        waiting: by unit, unsharded gradients that wait for their turn.
        num_reduced: how many units, in the order of reductions, have been launched.
        reductions: those that were launched, by unit.
    """

    def __init__(self, token: Callable[[], Token | None], synced: bool, num_units: int) -> None:
        self.token, self.synced = token, synced
        self.units = [UnitBackward() for _ in range(num_units)]
        self.completed: list[int] = []
        self.had: dict[int, list[list[bool] | None]] = {}
        self.waiting: dict[int, list[Tensor | None]] = {}
        self.num_reduced = 0
        self.reductions: list[list[Reduction]] = []
