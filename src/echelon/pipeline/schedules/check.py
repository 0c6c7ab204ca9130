"""The rules of schedules, one per function: a schedule that keeps them all cannot stall.

A rule that is broken raises a ``ScheduleError`` that names the rank, the position in its list and
the action.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from echelon.checks import numbers
from echelon.errors import ScheduleError
from echelon.pipeline.schedules.dataflow import KEPT, OWN, Values, transfer_of
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    SENDS,
    TRANSFER,
    WEIGHT,
    Action,
    Kind,
    Schedule,
    check_type,
    placed_parts,
)
from echelon.pipeline.schedules.walk import walk

# Positions in the lists of ranks, by kind and by stage * num_microbatches + microbatch; -1 if an
# action is missing.
Places = dict[Kind, list[int]]


def check(schedule: Schedule, memory_cap: float | Sequence[float] | None = None) -> None:
    """Refuse a schedule that breaks a rule.

    Args:
        schedule: computations only, or with transfers, unshards and reductions.
        memory_cap: most activations of one microbatch over one rank's whole share, on each rank or
            by rank; None for no cap.

    Raises:
        ArgumentError: it is no schedule.
        ScheduleError: it breaks a rule.

    Example:
        >>> check(Schedule.from_csv("0F0,0B0\\n1F0,1B0"))
        >>> check(Schedule.from_csv("0F0,0B0\\n1B0,1F0"))
        Traceback (most recent call last):
        echelon.errors.ScheduleError: the schedule cannot run: rank 1, index 0 (1B0): it stands \
before 1F0, which is at index 1
    """
    check_type(schedule)
    local_order(schedule, placed_and_complete(schedule))
    if schedule.is_lowered:
        channel_order(transfers(schedule))
    check_deadlock(schedule)
    coverage(schedule)
    if memory_cap is not None:
        memory(schedule, memory_cap)


def placed_and_complete(schedule: Schedule) -> Places:
    """Each stage does each microbatch once, on its own rank: one F, and one B or one I and one W.

    A schedule without any backward needs forwards only. Returns where each computation stands.
    """
    num_stages, m, placement = schedule.num_stages, schedule.num_microbatches, schedule.placement
    places = {kind: [-1] * (num_stages * m) for kind in COMPUTE}
    for rank, index, item, (kind, i, stage) in placed_parts(schedule.orders):
        problem = None
        if not (0 <= stage < num_stages and (i is None or 0 <= i < m)):
            problem = f"there are {num_stages} stages and {m} microbatches, counted from 0"
        elif placement[stage] != rank:
            problem = f"stage {stage} is on rank {placement[stage]}"
        elif kind in places:
            indices, n = places[kind], stage * m + (i or 0)
            if indices[n] >= 0:
                problem = f"it is at index {indices[n]} already"
            indices[n] = index
        if problem is not None:
            raise ScheduleError(problem, rank=rank, index=index, action=item)
    _check_complete(schedule, places)
    return places


def _check_complete(schedule: Schedule, places: Places) -> None:
    """Name the first computation that is missing or too much."""
    for n, indices in enumerate(zip(*(places[kind] for kind in COMPUTE), strict=True)):
        has_forward, has_backward, has_input, has_weight = (index >= 0 for index in indices)
        wrong, problem = None, "it is missing"
        if not has_forward:
            wrong = FORWARD
        elif has_backward and (has_input or has_weight):
            wrong, problem = INPUT if has_input else WEIGHT, "the whole backward {} is there too"
        elif schedule.has_backward and not has_backward:
            if not has_input:
                wrong = INPUT if has_weight else BACKWARD
            elif not has_weight:
                wrong = WEIGHT
        if wrong is not None:
            stage, i = divmod(n, schedule.num_microbatches)
            raise ScheduleError(
                problem.format(Action(kind=BACKWARD, microbatch=i, stage=stage)),
                rank=schedule.placement[stage],
                index=None if places[wrong][n] < 0 else places[wrong][n],
                action=Action(kind=wrong, microbatch=i, stage=stage),
            )


def local_order(schedule: Schedule, places: Places) -> None:
    """On a rank, for each stage and microbatch: F, then B or I, then W."""
    m = schedule.num_microbatches
    for second, first in OWN.items():
        pairs = zip(places[first], places[second], strict=True)
        for n, (before, after) in enumerate(pairs):
            if 0 <= after < before:
                stage, i = divmod(n, m)
                needed = Action(kind=first, microbatch=i, stage=stage)
                raise ScheduleError(
                    f"it stands before {needed}, which is at index {before}",
                    rank=schedule.placement[stage],
                    index=after,
                    action=Action(kind=second, microbatch=i, stage=stage),
                )


class _ListedTransfer(NamedTuple):
    """One end of a transfer: the value, and where the action stands in the list of its rank."""

    value: int
    position: int
    action: Action


Channels = dict[tuple[int, int], dict[int, list[_ListedTransfer]]]  # by pair, then by rank


def transfers(schedule: Schedule) -> Channels:
    """Each value that another rank needs is sent and received once, after and before its use.

    Returns the transfers that the ranks list, in their order.
    """
    values = Values(schedule.num_stages, schedule.num_microbatches)
    ends: Counter[tuple[bool, int]] = Counter()
    channels: Channels = {}
    for rank, order in enumerate(schedule.orders):
        done, received = set[int](), set[int]()
        for index, item in enumerate(order):
            if isinstance(item, Action) and item.kind in TRANSFER:
                transfer = transfer_of(item, schedule, values, index=index)
                value, src, dst = transfer
                sends = item.kind in SENDS
                ends[sends, value] += 1
                problem = None
                if src == dst:
                    problem = f"both of its stages are on rank {rank}, so nothing is to transfer"
                elif ends[sends, value] > 1:
                    problem = "it is there twice"
                elif sends and value not in done:
                    problem = f"it stands before {values.text(value)}, which gives what it sends"
                if problem is not None:
                    raise ScheduleError(problem, rank=rank, index=index, action=item)
                received.update(() if sends else (value,))
                listed = channels.setdefault(transfer.pair(), {}).setdefault(rank, [])
                listed.append(_ListedTransfer(value, index, item))
            for part in item.parts:
                for value in values.needed(part):
                    remote = schedule.placement[values.stage(value)] != rank
                    if remote and value not in received:
                        raise ScheduleError(
                            f"no receive of {values.text(value)} stands before it",
                            rank=rank,
                            index=index,
                            action=item,
                        )
                result = values.result(part)
                if result is not None:
                    done.add(result)
    for sends, value in ends:
        if not ends[not sends, value]:
            has, lacks = ("sent", "received") if sends else ("received", "sent")
            rank = schedule.placement[values.stage(value)]
            raise ScheduleError(
                f"what {values.text(value)} gives is {has} and never {lacks}", rank=rank
            )
    return channels


def channel_order(channels: Channels) -> None:
    """Both ranks of a pair list their transfers in the same order."""
    for (low, high), ends in channels.items():
        for listed, other in zip(ends.get(low, ()), ends.get(high, ()), strict=False):
            if listed.value != other.value:
                raise ScheduleError(
                    f"its transfer comes in another order on rank {high}, which has {other.action} "
                    f"(index {other.position}) at that place of their channel",
                    rank=low,
                    index=listed.position,
                    action=listed.action,
                )


def check_deadlock(schedule: Schedule) -> None:
    """No rank waits forever, even if a send holds its rank until the other end takes it."""
    deque(walk(schedule), maxlen=0)


def memory(schedule: Schedule, cap: float | Sequence[float]) -> None:
    """Activations alive never exceed a cap, which is that of ``check``.

    A forward takes one, and the end of a whole backward or of the gradients of weights gives it
    back. In a pair the forward comes first.
    """
    caps = numbers("memory_cap", cap, schedule.num_ranks)
    if not schedule.has_backward:
        return
    shares = [max(1, len(schedule.stages_of(rank))) for rank in range(schedule.num_ranks)]
    alive = [0] * schedule.num_ranks
    for rank, index, item, part in placed_parts(schedule.orders):
        alive[rank] += KEPT.get(part.kind, 0)
        if alive[rank] > caps[rank] * shares[rank]:
            raise ScheduleError(
                f"with it {alive[rank] / shares[rank]:g} microbatches are alive on its rank, more "
                f"than the cap of {caps[rank]:g}",
                rank=rank,
                index=index,
                action=item,
            )


def coverage(schedule: Schedule) -> None:
    """Stages are unsharded where they compute, and reduced once, after their last backward.

    Holds for schedules that unshard or reduce any stage.
    """
    kinds = {item.kind for order in schedule.orders for item in order}
    if Kind.UNSHARD in kinds or Kind.RESHARD in kinds:
        for rank in range(schedule.num_ranks):
            _check_unsharded(schedule, rank)
    if Kind.REDUCE in kinds:
        _check_reduced(schedule)


def _check_reduced(schedule: Schedule) -> None:
    """Refuse reductions that are missing, come twice, or come before a backward."""
    reduced: dict[int, int] = {}  # by stage: the position of its reduction
    for rank, index, item, part in placed_parts(schedule.orders):
        before = reduced.get(part.stage)
        if before is not None and part.kind in (BACKWARD, WEIGHT, Kind.REDUCE):
            raise ScheduleError(
                f"stage {part.stage} is reduced already, at index {before}",
                rank=rank,
                index=index,
                action=item,
            )
        if part.kind is Kind.REDUCE:
            reduced[part.stage] = index
    for stage, rank in enumerate(schedule.placement):
        if stage not in reduced:
            missing = Action(kind=Kind.REDUCE, microbatch=None, stage=stage)
            raise ScheduleError("it is missing", rank=rank, action=missing)


def _check_unsharded(schedule: Schedule, rank: int) -> None:
    """Refuse computations of a rank whose stage is not unsharded."""
    unsharded: set[int] = set()
    for index, item in enumerate(schedule.orders[rank]):
        for part in item.parts:
            stage, problem = part.stage, None
            if part.kind is Kind.UNSHARD:
                problem = "its stage is unsharded already" if stage in unsharded else None
                unsharded.add(stage)
            elif part.kind is Kind.RESHARD:
                problem = None if stage in unsharded else "its stage is not unsharded"
                unsharded.discard(stage)
            elif part.kind in COMPUTE and stage not in unsharded:
                problem = f"stage {stage} is not unsharded: {stage}UNSHARD must stand before it"
            if problem is not None:
                raise ScheduleError(problem, rank=rank, index=index, action=item)
    if unsharded:
        raise ScheduleError(
            "it is missing: the stage stays unsharded",
            rank=rank,
            action=Action(kind=Kind.RESHARD, microbatch=None, stage=min(unsharded)),
        )
