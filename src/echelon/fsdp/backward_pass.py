"""What one forward and one backward of a sharded model know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import final

from torch import Tensor, nn

from echelon.fsdp.gradients import Reduction
from echelon.modules.autograd import Token


@final
class Run:
    """The units that one forward of the model has used; gone when no backward of it can come.

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
class UnitPass:
    """One unit in one backward.

    Attributes:
        opened: whether backward has reached it.
        remaining: how many of its gradients have not come.
        arrived: parameters whose gradients have come. In the root there may be parameters of units
            in reentrant checkpoints, and one gradient of them from each.
        is_repeated: whether each forward of it brings gradients of its own.
        inside: forwards of it whose outputs backward has reached, and whose inputs it has not.
        nested: forwards of it that ran in this backward and have a backward of their own in it.
        completed: whether its gradients were taken off.
    """

    __slots__ = (
        "arrived",
        "completed",
        "inside",
        "is_repeated",
        "nested",
        "opened",
        "remaining",
    )

    def __init__(self) -> None:
        self.opened = self.completed = self.is_repeated = False
        self.arrived: set[nn.Parameter] = set()
        self.remaining = self.inside = self.nested = 0


@final
class Pass:
    """From the first gradient to the end, or until the next forward finds it aborted.

    Attributes:
        token: gives None when it is over or was aborted.
        synced: whether it reduces.
        units: by unit, how far backward has come with it.
        completed: units whose gradients were all there, in that order.
        had: by unit, for each of its storages, which parameters had a gradient before.
        held: by unit, whole gradients that wait for their turn.
        sent: how many units have left.
        left_out: those that left without gradients, because no forward had used them.
        reductions: what is under way.
    """

    def __init__(self, token: Callable[[], Token | None], synced: bool, num_units: int) -> None:
        self.token, self.synced = token, synced
        self.units = [UnitPass() for _ in range(num_units)]
        self.completed: list[int] = []
        self.had: dict[int, list[list[bool] | None]] = {}
        self.held: dict[int, list[Tensor | None]] = {}
        self.sent = 0
        self.left_out: set[int] = set()
        self.reductions: list[list[Reduction]] = []
