"""Who needs what in a schedule: the values, and what makes, moves and needs each of them.

A value is the output of a stage for a microbatch, or the gradient of its inputs. For stage j:

=========  =============  ==============================  ===============  =======================
value      made by        moved by                        needed by        in its own stage by
=========  =============  ==============================  ===============  =======================
output     ``F`` of j     ``SEND_F`` of j, ``RECV_F`` of  ``F`` of j+1     ``B`` or ``I`` of j
                          j+1
gradient   ``B`` or       ``SEND_B`` of j, ``RECV_B`` of  ``B`` or ``I``   ``W`` of j, which stands
           ``I`` of j     j-1                             of j-1           behind ``I``
=========  =============  ==============================  ===============  =======================

All that checks, places, simulates, judges or runs actions asks here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from echelon.errors import ScheduleError
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    SENDS,
    WEIGHT,
    Action,
    Kind,
    Schedule,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Flow:
    """A kind of value that passes from one stage to the next or to the previous one.

    Attributes:
        made_by: the computations of which one makes it; those of the target stage need it.
        send: the action that sends it.
        receive: the action that receives it.
        step: from the stage that makes it to the stage that needs it.
    """

    made_by: tuple[Kind, ...]
    send: Kind
    receive: Kind
    step: int

    def source(self, stage: int) -> int:
        """The stage that makes what a stage needs."""
        return stage - self.step

    def target(self, stage: int) -> int:
        """The stage that needs what a stage makes."""
        return stage + self.step


OUTPUT = Flow(made_by=(FORWARD,), send=Kind.SEND_F, receive=Kind.RECV_F, step=1)
GRADIENT = Flow(made_by=(BACKWARD, INPUT), send=Kind.SEND_B, receive=Kind.RECV_B, step=-1)
# What a computation needs and makes, a send sends, a receive receives. Gradients of weights neither
# come from another stage nor go to one.
FLOWS: Mapping[Kind, Flow] = {
    kind: flow for flow in (OUTPUT, GRADIENT) for kind in (*flow.made_by, flow.send, flow.receive)
}
# The computation of the same stage and microbatch whose value a computation needs as well.
OWN: Mapping[Kind, Kind] = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}
# By how many microbatches of its stage an action changes what is kept for a backward.
KEPT: Mapping[Kind, int] = {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}


def ends_of(action: Action) -> tuple[Action, Action]:
    """The send and the receive of what a computation makes, or of which an action is one.

    Example:
        >>> print(*ends_of(Action(kind=Kind.I, microbatch=0, stage=2)))
        2SEND_B0 1RECV_B0
        >>> print(*ends_of(Action(kind=Kind.RECV_F, microbatch=0, stage=2)))
        1SEND_F0 2RECV_F0
    """
    kind, i, stage = action
    flow = FLOWS[kind]
    source = flow.source(stage) if kind is flow.receive else stage
    return (
        Action(kind=flow.send, microbatch=i, stage=source),
        Action(kind=flow.receive, microbatch=i, stage=flow.target(source)),
    )


def receive_before(part: Action) -> Action:
    """The receive of what a forward or a backward needs of another stage."""
    kind, i, stage = part
    return Action(kind=FLOWS[kind].receive, microbatch=i, stage=stage)


# By kind and stage: the numbers of values for microbatch 0; those for microbatch i are larger by i.
Numbers = dict[Kind, dict[int, tuple[int, ...]]]


class Values:
    """Numbers the values that computations make, so that they can index a list.

    There are ``count`` of them.
    """

    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._gradients = num_stages * num_microbatches
        self.count = 2 * self._gradients
        # By kind: what is added to stage * num_microbatches + microbatch, and the stage of which
        # there is no such value.
        last = num_stages - 1
        self._results: dict[Kind, int] = {}
        self._far: dict[Kind, tuple[int, int]] = {}
        self._moved: dict[Kind, tuple[int, int]] = {}
        for flow, first in ((OUTPUT, 0), (GRADIENT, self._gradients)):
            forward = flow.step > 0
            self._results.update(dict.fromkeys(flow.made_by, first))
            incoming = first - flow.step * num_microbatches, 0 if forward else last
            self._far.update(dict.fromkeys(flow.made_by, incoming))
            self._moved[flow.receive] = incoming
            self._moved[flow.send] = first, last if forward else 0
        self._own = {kind: self._results[made] for kind, made in OWN.items()}

    def stage(self, value: int) -> int:
        """The stage that makes a value."""
        return value % self._gradients // self._num_microbatches

    def owners(self, placement: Sequence[int]) -> list[int]:
        """By value, the rank that makes it."""
        outputs = [rank for rank in placement for _ in range(self._num_microbatches)]
        return outputs * 2  # and gradients

    def text(self, value: int) -> str:
        """The text of the action that makes a value; a backward is written as ``B``."""
        kind = "F" if value < self._gradients else "B"
        return f"{self.stage(value)}{kind}{value % self._num_microbatches}"

    def far(self, part: Action) -> int | None:
        """What a computation needs of another stage; None of other actions."""
        kind, i, stage = part
        first, edge = self._far.get(kind, (0, stage))
        return None if stage == edge or i is None else first + stage * self._num_microbatches + i

    def needed(self, part: Action) -> tuple[int, ...]:
        """The inputs of a computation, those of its own stage last; none of other actions."""
        kind, i, stage = part
        own, far = self._own.get(kind), self.far(part)
        inputs = () if far is None else (far,)
        if own is None or i is None:
            return inputs
        return (*inputs, own + stage * self._num_microbatches + i)

    def result(self, part: Action) -> int | None:
        """The value that a computation makes; a whole backward has that of its first half."""
        kind, i, stage = part
        first = self._results.get(kind)
        return None if first is None or i is None else first + stage * self._num_microbatches + i

    def moved(self, action: Action) -> int | None:
        """The value that a send sends or a receive receives; None if its stage has no neighbour."""
        kind, i, stage = action
        first, edge = self._moved[kind]
        return None if stage == edge else first + stage * self._num_microbatches + (i or 0)

    def by_stage(self, stages: Iterable[int], *, own: bool = True) -> tuple[Numbers, Numbers]:
        """The inputs and the results of all actions of stages, for loops over many.

        Without ``own``, the inputs are those of other stages only.
        """
        needs: Numbers = {kind: defaultdict(tuple) for kind in Kind}
        gives: Numbers = {kind: defaultdict(tuple) for kind in Kind}
        for stage in stages:
            for kind in COMPUTE:
                part = Action(kind=kind, microbatch=0, stage=stage)
                far, result = self.far(part), self.result(part)
                needs[kind][stage] = self.needed(part) if own else () if far is None else (far,)
                gives[kind][stage] = () if result is None else (result,)
            for kind in SENDS:
                sent = self.moved(Action(kind=kind, microbatch=0, stage=stage))
                needs[kind][stage] = () if sent is None else (sent,)
        return needs, gives


class Transfer(NamedTuple):
    """The transfer of a value, by its number in ``Values``, from one rank to another."""

    value: int
    src: int
    dst: int

    def pair(self) -> tuple[int, int]:
        """The two ranks, in ascending order."""
        return min(self.src, self.dst), max(self.src, self.dst)


def transfer_of(
    action: Action, schedule: Schedule, values: Values, *, index: int | None = None
) -> Transfer:
    """The transfer of a send or a receive, at position ``index`` of the list of its rank."""
    value = values.moved(action)
    kind, _, stage = action
    placement, flow = schedule.placement, FLOWS[kind]
    if value is None:
        raise ScheduleError(
            f"stage {stage} has no neighbour to exchange this with",
            rank=placement[stage],
            index=index,
            action=action,
        )
    if kind is flow.send:
        return Transfer(value, placement[stage], placement[stage + flow.step])
    return Transfer(value, placement[stage - flow.step], placement[stage])


def crossings(placement: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The stages whose next one is on another rank: the stage, its rank, and that of the next.

    Example:
        >>> list(crossings([0, 1, 1, 0]))
        [(0, 0, 1), (2, 1, 0)]
    """
    for stage, (rank, after) in enumerate(pairwise(placement)):
        if after != rank:
            yield stage, rank, after


assert set(COMPUTE) == {*OUTPUT.made_by, *GRADIENT.made_by, WEIGHT}
