"""The state of one forward and of one backward of a sharded model, unit by unit.

A forward of a unit knows whether a backward may still reach it, and how many of its inputs the
backward that runs has not passed yet. A backward knows which units it has reached, and which of
them are complete.

[Note: when backward has left a unit]
When the backward of an operation runs, it reads the parameters that the operation has saved, also
frozen ones, which get no gradient. So a unit must stay unsharded until the backward of its last
operation is done. The gradients of its parameters do not show that: the gradient of the input of a
LayerNorm with frozen weights comes after those of all trainable parameters behind it.
::

    x ──> frozen norm ──> linear ──> y
          4: reads .weight     2: gradient of linear.weight      1: backward reaches y
    3: gradient of linear's input                 5: gradient of x: backward has left the unit

Backward has passed an input when the gradient of that input is complete, because all operations of
the unit on it ran backward before. So hooks on the inputs that need a gradient show when backward
has left the unit. An operation that depends on no input was recorded after the inputs were made,
and the engine runs the operations that were recorded last first. A backward may reach no input of a
forward, because none needs a gradient or because they were hidden in a closure. Then it leaves that
forward only at its end.

[Note: a backward inside a backward]
A reentrant checkpoint runs its forward without a graph. In backward it runs the forward again with
a graph, whose backward it runs inside of the outer one. Each such backward gives one gradient of a
parameter. So a unit that was called several times in this way is complete only when all those calls
were repeated.

[Note: one parameter, several accumulators]
Autograd adds up the gradients of all uses of a parameter, and accumulates their sum once. But where
the shards of a unit have another dtype or device than its unsharded parameters, torch gives a
parameter a new accumulator each time it is unsharded. A unit that ran twice then gets two gradients
of it in one backward, and is complete only when backward has run through all of its forwards.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, final

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from echelon.fsdp.gradients import Reduction
from echelon.modules.autograd import Token, in_backward, sequence_number, will_run
from echelon.modules.nested import tensors


@final
class ForwardRun:
    """What one forward of the model has used; it is gone when no backward of it can come.

    Attributes:
        has_graph: whether autograd was enabled.
        units: the units that it has called.
        opaque: those whose outputs show no tensor, so that no hook tells when backward comes.
        awaits_backward: whether it has made a graph that no backward has reached yet.
        num_without_graph: by unit, its calls that made no graph, as in reentrant checkpoints.
    """

    __slots__ = (
        "__weakref__",
        "awaits_backward",
        "has_graph",
        "num_without_graph",
        "opaque",
        "units",
    )

    def __init__(self, *, has_graph: bool) -> None:
        self.has_graph = has_graph
        self.units = {0}
        self.opaque: set[int] = set()
        self.awaits_backward = False
        self.num_without_graph: Counter[int] = Counter()


@final
class _Input:
    """An input of a forward that needs a gradient; ``hook`` is called when that is complete.

    The input is remembered as it was before the forward, which may write into it.
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
        """Whether ``tensor`` is this input, unchanged."""
        return tensor.grad_fn is self._node and tensor.output_nr == self._index

    @property
    def will_run(self) -> bool:
        """Whether the backward that runs reaches it; torch does not tell for a leaf: assume yes."""
        return self._is_leaf or will_run(self._node)


@final
class UnitForward:
    """One forward of a unit. Its graph holds it, so it is gone when no backward can come.

    Attributes:
        nested: whether it ran inside of a backward; see the note on a backward inside a backward.
    """

    __slots__ = (
        "__weakref__",
        "_bases",
        "_by_base",
        "_first",
        "_inputs",
        "_num_left",
        "_reached_by",
        "nested",
    )

    def __init__(self) -> None:
        self.nested = in_backward()
        self._reached_by: weakref.ref[BackwardPass] | None = None
        self._inputs: list[_Input] = []
        self._bases: list[_Input] = []  # of inputs that are views: see ``watch``
        self._by_base = False  # whether the backward that runs passes the bases, not the inputs
        self._num_left = 0  # inputs that the backward that runs has not passed yet
        self._first = sequence_number()  # nodes with a lower number were made before this forward

    def watch(self, inputs: Any, passed: Callable[[UnitForward, bool], None]) -> None:
        """Call ``passed`` with the arguments of ``leave`` whenever a backward passes an input.

        The hooks are on the graph that made the inputs. A forward that writes into an input which
        is a view removes the node of the view from the graph, but not that of its base.
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
        reference = weakref.ref(self)  # an input may live longer than this forward

        def hook(*_: Tensor | None) -> None:
            forward = reference()
            if forward is not None:
                passed(forward, by_base)

        return hook

    def nodes_of(self, output: Tensor) -> list[Node]:
        """The nodes of this forward by which backward may reach ``output``.

        If code writes into an output that is a view, only the node of its base is reached.
        """
        nodes = []
        for tensor in (output, output._base):
            node = None if tensor is None else tensor.grad_fn
            if tensor is None or node is None or node._sequence_nr() < self._first:
                continue
            if not any(watched.is_of(tensor) for watched in self._inputs):
                nodes.append(node)
        return nodes

    def reach(self, current: BackwardPass) -> bool:
        """A backward has reached an output of this forward; returns whether it is the first."""
        if self.is_reached_by(current):
            return False
        self._reached_by = weakref.ref(current)
        self._num_left = sum(watched.will_run for watched in self._inputs)
        self._by_base = not self._num_left
        if self._by_base:
            self._num_left = sum(watched.will_run for watched in self._bases)
        return True

    def leave(self, by_base: bool) -> bool:
        """Backward has passed an input, or the base of one; returns whether it was the last."""
        self._num_left -= by_base is self._by_base
        return self._num_left == 0 and by_base is self._by_base

    def is_reached_by(self, current: BackwardPass) -> bool:
        """Whether a backward has reached an output of this forward."""
        return self._reached_by is not None and self._reached_by() is current


@final
class UnitForwards:
    """The forwards of one unit that have a graph."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[UnitForward] = weakref.WeakSet()

    def add(self) -> UnitForward:
        """Add a forward that begins and may make a graph."""
        forward = UnitForward()
        self._alive.add(forward)
        return forward

    def awaits(self, current: BackwardPass) -> bool:
        """Whether a backward has not reached all of the forwards."""
        return not all(forward.is_reached_by(current) for forward in self._alive)


class BackwardState(Enum):
    """The state of one unit in one backward."""

    UNREACHED = "no gradient of it has arrived, and no output of it was reached"
    REACHED = "its gradients arrive"
    COMPLETE = "its gradients were detached from its parameters"
    SKIPPED = "it was reduced without gradients, because no forward had used it"


UNREACHED, REACHED, COMPLETE, SKIPPED = BackwardState


@final
class UnitBackward:
    """One unit in one backward.

    Attributes:
        state: how far the backward is with the unit.
        remaining: the number of gradients that have not arrived.
        arrived: the ``id`` of each parameter whose gradient has arrived. Those of the root may be
            used in several reentrant checkpoints, each of which gives a gradient.
        is_repeated: whether each forward of the unit gives gradients of its own.
        inside: the number of its forwards that backward has reached and not left.
        nested: the number of its forwards that ran, and run backward, inside of this backward.
    """

    __slots__ = ("arrived", "inside", "is_repeated", "nested", "remaining", "state")

    def __init__(self) -> None:
        self.state = UNREACHED
        self.is_repeated = False
        self.arrived: set[int] = set()  # a tensor's own hash is a function of Python
        self.remaining = self.inside = self.nested = 0


@final
class BackwardPass:
    """One backward: from the first gradient to the end, or until it is found to be aborted.

    Attributes:
        token: returns None when the backward is over or was aborted.
        requires_gradient_sync: whether it reduces gradients.
        units: the state of each unit.
        completed: the units whose gradients were all there, in that order.
        reduced_before: by unit, what ``GradientShard.set_aside`` returned for each of its shards.
        joined: by unit whose gradients were added to what ``no_sync`` had kept: of which parameters
            that was.
        waiting: by unit, unsharded gradients that wait for the reductions that come before.
        num_reduced: the number of units, in the order of reductions, that were launched.
        reductions: the reductions that were launched, by unit.
    """

    def __init__(
        self, token: Callable[[], Token | None], requires_gradient_sync: bool, num_units: int
    ) -> None:
        self.token, self.requires_gradient_sync = token, requires_gradient_sync
        self.units = [UnitBackward() for _ in range(num_units)]
        self.completed: list[int] = []
        self.reduced_before: dict[int, list[list[bool] | None]] = {}
        self.joined: dict[int, list[bool]] = {}
        self.waiting: dict[int, list[Tensor | None]] = {}
        self.num_reduced = 0
        self.reductions: list[list[Reduction]] = []
