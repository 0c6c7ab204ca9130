"""The costs of computations and messages, in any one unit of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.ir import BACKWARD, FORWARD, INPUT, WEIGHT, Item, Kind, Pair

_NAMES = ("F", "B", "I", "W", "F&B", "hop")
CostsByName = Mapping[str, float | Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one microbatch costs in each stage.

    Attributes:
        by_kind: times of F, B, I and W, by stage.
        pair: time of a fused pair, by the stage of its forward; None: the sum of its parts.
        hop: time from the end of a computation to the arrival of its result on another rank.
    """

    by_kind: Mapping[Kind, tuple[float, ...]]
    pair: tuple[float, ...] | None
    hop: float

    def of(self, item: Item) -> float:
        """How long an item takes; 0 if it is not a computation."""
        if isinstance(item, Pair):
            if self.pair is not None:
                return self.pair[item.forward.stage]
            return self.of(item.forward) + self.of(item.backward)
        times = self.by_kind.get(item.kind)
        return 0.0 if times is None else times[item.stage]


def read_costs(costs: CostsByName | None, num_stages: int) -> Costs:
    """Check the costs of a user, and complete them.

    ``F``, ``B``, ``I``, ``W`` and, for fused pairs, ``F&B`` are costs of one stage and one
    microbatch: a number for all stages, or a list by stage. ``hop`` is a number. F is 1 by default.
    B and I + W are the same time, so the others follow from one or two of them; I and W are half of
    B if only B is given, and 1 if none of the three is.

    Example:
        >>> costs = read_costs({"F": [1, 2], "B": 3, "hop": 0.1}, num_stages=2)
        >>> [costs.by_kind[kind] for kind in (FORWARD, INPUT, WEIGHT)]
        [(1.0, 2.0), (1.5, 1.5), (1.5, 1.5)]
    """
    costs = {} if costs is None else costs
    if not isinstance(costs, Mapping):
        raise ArgumentError(
            f"costs is {costs!r:.80}; give numbers by name, as in {{'F': 1, 'B': 2}}"
        )
    unknown = sorted(set(costs) - set(_NAMES))
    if unknown:
        raise ArgumentError(f"costs has {unknown[0]!r}; its names are {', '.join(_NAMES)}")
    lists = {
        name: _by_stage(name, value, num_stages) for name, value in costs.items() if name != "hop"
    }
    ones = (1.0,) * num_stages
    b, i, w = lists.get("B"), lists.get("I"), lists.get("W")
    if b is None:
        i, w = i or ones, w or ones
        b = tuple(x + y for x, y in zip(i, w, strict=True))
    elif i is None and w is None:
        i = w = tuple(x / 2 for x in b)
    elif i is None or w is None:
        half = i or w or ones
        rest = tuple(x - y for x, y in zip(b, half, strict=True))
        if min(rest, default=0.0) < 0:
            raise ArgumentError(f"costs has a part of the backward that is more than B: {costs!r}")
        i, w = i or rest, w or rest
    hop = costs.get("hop", 0.0)
    if not isinstance(hop, int | float) or not 0 <= hop < math.inf:
        raise ArgumentError(f"costs['hop'] is {hop!r:.80}; give one number >= 0 for all messages")
    return Costs(
        by_kind={FORWARD: lists.get("F", ones), BACKWARD: b, INPUT: i, WEIGHT: w},
        pair=lists.get("F&B"),
        hop=float(hop),
    )


def _by_stage(name: str, value: object, num_stages: int) -> tuple[float, ...]:
    numbers = [value] * num_stages if isinstance(value, int | float) else value
    if isinstance(numbers, str) or not isinstance(numbers, Sequence) or len(numbers) != num_stages:
        raise ArgumentError(
            f"costs[{name!r}] is {value!r:.80}; give a number, or one for each of the "
            f"{num_stages} stages"
        )
    for number in numbers:
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ArgumentError(f"costs[{name!r}] has {number!r:.80}; a cost is a number >= 0")
    return tuple(float(number) for number in numbers)
