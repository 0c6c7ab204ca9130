"""Whether a schedule can run, one rule per function. Nothing that passes here can stall.

Each rule names the rank, the position in its list and the action that breaks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from echelon.errors import ArgumentError, ScheduleError
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
)
from echelon.pipeline.schedules.readiness import Values, transfer_of, walk

# Positions in the lists of ranks, by kind and by stage * num_microbatches + microbatch; -1 for
# those that are not there.
Places = dict[Kind, list[int]]


def check(schedule: Schedule, memory_cap: float | Sequence[float] | None = None) -> None:
    """Apply all rules to ``schedule``.

    Args:
        schedule: computations only, or with transfers, unshards and reductions.
        memory_cap: as ``memory``.

    Raises:
        ArgumentError: it is no schedule.
        ScheduleError: a rule is broken.

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
        transfers(schedule)
        channel_order(schedule)
    event_graph(schedule)
    coverage(schedule)
    if memory_cap is not None:
        memory(schedule, memory_cap)


def placed_and_complete(schedule: Schedule) -> Places:
    """Each stage does each microbatch once, on its own rank: one F, and one B or one I and one W.

    A schedule without any backward needs forwards only.

    Returns:
        where each computation stands.

    Raises:
        ScheduleError: an action is missing, is there twice, or is on the wrong rank.
    """
    num_stages, m, placement = schedule.num_stages, schedule.num_microbatches, schedule.placement
    places = {kind: [-1] * (num_stages * m) for kind in COMPUTE}
    for rank, order in enumerate(schedule.orders):
        for index, item in enumerate(order):
            for kind, i, stage in (item,) if isinstance(item, Action) else item.parts:
                wrong = None
                if not (0 <= stage < num_stages and (i is None or 0 <= i < m)):
                    wrong = f"there are {num_stages} stages and {m} microbatches, counted from 0"
                elif placement[stage] != rank:
                    wrong = f"stage {stage} is on rank {placement[stage]}"
                elif kind in places:
                    found, n = places[kind], stage * m + (i or 0)
                    if found[n] >= 0:
                        wrong = f"it is at index {found[n]} already"
                    found[n] = index
                if wrong is not None:
                    raise ScheduleError(wrong, rank=rank, index=index, action=item)
    _check_complete(schedule, places)
    return places


def _check_complete(schedule: Schedule, places: Places) -> None:
    """Name the first computation that is missing or too much."""
    m = schedule.num_microbatches
    for n, (f, b, i, w) in enumerate(zip(*(places[kind] for kind in COMPUTE), strict=True)):
        stage, microbatch = divmod(n, m)
        rank = schedule.placement[stage]
        missing = []
        if f < 0:
            missing = [FORWARD]
        elif b >= 0 and (i >= 0 or w >= 0):
            half = INPUT if i >= 0 else WEIGHT
            raise ScheduleError(
                f"the whole backward {Action(BACKWARD, microbatch, stage)} is there too",
                rank=rank,
                index=places[half][n],
                action=Action(half, microbatch, stage),
            )
        elif schedule.has_backward and b < 0:
            missing = [BACKWARD] if i < 0 and w < 0 else [INPUT] * (i < 0) + [WEIGHT] * (w < 0)
        if missing:
            raise ScheduleError(
                "it is missing", rank=rank, action=Action(missing[0], microbatch, stage)
            )


def local_order(schedule: Schedule, places: Places) -> None:
    """On a rank, for each stage and microbatch: F, then B or I, then W.

    Args:
        schedule: the schedule.
        places: what ``placed_and_complete`` returned for it.

    Raises:
        ScheduleError: an action stands before one that it needs.
    """
    m = schedule.num_microbatches
    for first, second in ((FORWARD, BACKWARD), (FORWARD, INPUT), (INPUT, WEIGHT)):
        pairs = zip(places[first], places[second], strict=True)
        for n, (before, after) in enumerate(pairs):
            if after < before and after >= 0:
                stage, i = divmod(n, m)
                raise ScheduleError(
                    f"it stands before {Action(first, i, stage)}, which is at index {before}",
                    rank=schedule.placement[stage],
                    index=after,
                    action=Action(second, i, stage),
                )


def transfers(schedule: Schedule) -> None:
    """Each value that another rank needs is sent once and received once, after and before its use.

    Raises:
        ScheduleError: an end is missing, is there twice, is not needed, or stands at a wrong place.
    """
    values = Values(schedule)
    ends: Counter[tuple[bool, int]] = Counter()
    for rank, order in enumerate(schedule.orders):
        done, received = set[int](), set[int]()
        for index, item in enumerate(order):
            if isinstance(item, Action) and item.kind in TRANSFER:
                value, src, dst = transfer_of(item, schedule, values, index=index)
                sends = item.kind in SENDS
                ends[sends, value] += 1
                wrong = None
                if src == dst:
                    wrong = f"both of its stages are on rank {rank}, so nothing is to transfer"
                elif ends[sends, value] > 1:
                    wrong = "it is there twice"
                elif sends and value not in done:
                    wrong = f"it stands before {values.text(value)}, which gives what it sends"
                if wrong is not None:
                    raise ScheduleError(wrong, rank=rank, index=index, action=item)
                received.update(() if sends else (value,))
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
                given = values.given(part)
                if given is not None:
                    done.add(given)
    for sends, value in ends:
        if not ends[not sends, value]:
            has, lacks = ("sent", "received") if sends else ("received", "sent")
            rank = schedule.placement[values.stage(value)]
            raise ScheduleError(
                f"what {values.text(value)} gives is {has} and never {lacks}", rank=rank
            )


def channel_order(schedule: Schedule) -> None:
    """Both ranks of a pair list their transfers in the same order.

    Raises:
        ScheduleError: the lists differ; the first difference is named.
    """
    values = Values(schedule)
    lists: dict[tuple[int, int], dict[int, list[tuple[int, int, Action]]]] = {}
    for rank, order in enumerate(schedule.orders):
        for index, item in enumerate(order):
            if isinstance(item, Action) and item.kind in TRANSFER:
                transfer = transfer_of(item, schedule, values)
                ends = lists.setdefault(transfer.pair(), {})
                ends.setdefault(rank, []).append((transfer.value, index, item))
    for (low, high), ends in lists.items():
        for mine, theirs in zip(ends.get(low, ()), ends.get(high, ()), strict=False):
            if mine[0] != theirs[0]:
                raise ScheduleError(
                    f"its transfer comes in another order on rank {high}, which has {theirs[2]} "
                    f"(index {theirs[1]}) at that place of their channel",
                    rank=low,
                    index=mine[1],
                    action=mine[2],
                )


def event_graph(schedule: Schedule) -> None:
    """No rank waits for ever, even where a send holds its rank until the other end takes it.

    Raises:
        ScheduleError: ranks wait for one another; the circle is drawn.
    """
    for _ in walk(schedule):
        pass


def memory(schedule: Schedule, cap: float | Sequence[float]) -> None:
    """Activations alive never exceed a cap.

    A forward takes one, and the end of a whole backward or of the gradients of weights gives it
    back. In a pair the forward comes first.

    Args:
        schedule: the schedule.
        cap: activations of one microbatch over one rank's whole share, on each rank or by rank.

    Raises:
        ScheduleError: the action that exceeds it is named.
    """
    caps = [cap] * schedule.num_ranks if isinstance(cap, int | float) else list(cap)
    if len(caps) != schedule.num_ranks:
        raise ArgumentError(
            f"memory_cap has {len(caps)} numbers for {schedule.num_ranks} ranks; give one per rank"
        )
    for rank, order in enumerate(schedule.orders):
        alive, share = 0, max(1, len(schedule.stages_of(rank)))
        for index, item in enumerate(order):
            for part in item.parts:
                if part.kind is FORWARD:
                    alive += 1
                elif part.kind in (BACKWARD, WEIGHT):
                    alive -= 1
                if schedule.has_backward and alive > caps[rank] * share:
                    raise ScheduleError(
                        f"with it {alive / share:g} microbatches are alive on its rank, more than "
                        f"the cap of {caps[rank]:g}",
                        rank=rank,
                        index=index,
                        action=item,
                    )


def coverage(schedule: Schedule) -> None:
    """Stages are unsharded where they compute, and reduced once, after their last backward.

    Holds for schedules that unshard or reduce any stage.

    Raises:
        ScheduleError: a computation of a sharded stage, an unshard or reshard twice in turn, a
            stage that stays unsharded, or a reduction too early, twice, or missing.
    """
    kinds = {item.kind for order in schedule.orders for item in order}
    for rank, order in enumerate(schedule.orders):
        if Kind.UNSHARD in kinds or Kind.RESHARD in kinds:
            _check_unsharded(schedule, rank)
        if Kind.REDUCE not in kinds:
            continue
        reduced: dict[int, int] = {}
        for index, item in enumerate(order):
            for part in item.parts:
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
        for stage in schedule.stages_of(rank):
            if stage not in reduced:
                raise ScheduleError(
                    "it is missing", rank=rank, action=Action(Kind.REDUCE, None, stage)
                )


def _check_unsharded(schedule: Schedule, rank: int) -> None:
    """Refuse computations of a rank whose stage is not unsharded."""
    full: set[int] = set()
    for index, item in enumerate(schedule.orders[rank]):
        for part in item.parts:
            stage, wrong = part.stage, None
            if part.kind is Kind.UNSHARD:
                wrong = "its stage is unsharded already" if stage in full else None
                full.add(stage)
            elif part.kind is Kind.RESHARD:
                wrong = None if stage in full else "its stage is not unsharded"
                full.discard(stage)
            elif part.kind in COMPUTE and stage not in full:
                wrong = f"stage {stage} is not unsharded: {stage}UNSHARD must stand before it"
            if wrong is not None:
                raise ScheduleError(wrong, rank=rank, index=index, action=item)
    if full:
        raise ScheduleError(
            "it is missing: the stage stays unsharded",
            rank=rank,
            action=Action(Kind.RESHARD, None, min(full)),
        )
