"""Passes that add transfers, unshards and reductions to the computations of a schedule.

Each pass takes a schedule and returns a new one; the computations keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from echelon import checks
from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline.schedules.check import check
from echelon.pipeline.schedules.costs import CostsByName
from echelon.pipeline.schedules.dataflow import FLOWS, Values, ends_of, receive_before
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    WEIGHT,
    WHOLE_STAGE,
    Action,
    Item,
    Kind,
    Schedule,
)
from echelon.pipeline.schedules.simulate import simulate
from echelon.pipeline.schedules.walk import Channel, walk

MAX_AHEAD = 4  # computations between the post of a receive and its consumer


def lower(
    schedule: Schedule,
    costs: CostsByName | None = None,
    *,
    gather: Sequence[int] | None = None,
    window_nbytes: int | None = None,
    reduce: bool = True,
    in_order: bool = False,
) -> Schedule:
    """Run all passes, then check all rules.

    Args:
        schedule: computations only.
        costs: as ``simulate``; they decide the order of transfers.
        gather: bytes of the parameters of each stage, where stages are sharded.
        window_nbytes: how many of them may be unsharded on a rank at once; all of its stages if
            None.
        reduce: whether gradients are reduced over replicas of the stages.
        in_order: messages have no tags, or wait for those issued before them: see
            ``add_transfers``.

    Raises:
        ArgumentError: an argument is not what it must be.
        ScheduleError: the schedule breaks a rule, or is lowered already.

    Example:
        >>> from echelon.pipeline.schedules.looped import one_f_one_b
        >>> print(lower(one_f_one_b(2, 1)))
        rank 0 | 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD
        rank 1 | 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD
    """
    checks.flag("reduce", reduce)
    checks.flag("in_order", in_order)
    if gather is not None:
        checks.integers("gather", gather)
    if window_nbytes is not None:
        checks.integer("window_nbytes", window_nbytes)
    check(schedule)
    lowered = add_transfers(schedule, costs, in_order=in_order)
    if reduce and schedule.has_backward:
        lowered = add_reductions(lowered)
    if gather is not None:
        lowered = add_unshards(lowered, gather, window_nbytes)
    check(lowered)
    return lowered


# --- transfers -----------------------------------------------------------------------------------


def add_transfers(
    schedule: Schedule, costs: CostsByName | None = None, *, in_order: bool = False
) -> Schedule:
    """Add sends and receives, in the better of two orders, or ``in_order`` by sender.

    *By sender*: computations are taken in the order in which they end in the simulation. A send is
    appended to the list of its rank and at the same time its receive to that of the other rank. So
    every list follows one global order, whose first action that has not run can always run. This
    holds also where messages have no tags, where their first use holds both ranks, and where one
    queue serves a rank: all that it needs is before it in the global order.

    *By arrival*: transfers of two ranks are ordered by their arrival in the simulation, and a
    receive is posted at most four computations before its consumer, so that fewer buffers wait.
    This order may stall or be slow, so it is used only if it passes ``check`` and takes no longer
    when the transfers of two ranks share one queue.
    """
    if schedule.is_lowered:
        raise ScheduleError("it has transfers already; give the computations only")
    order = _by_end(schedule, costs)
    routes = _routes(schedule, order)
    by_sender = _by_sender(schedule, order, routes)
    if in_order:
        return by_sender
    by_arrival = _by_arrival(schedule, routes)
    try:
        check(by_arrival)
    except ScheduleError:  # it may stall
        return by_sender
    first, second = (
        simulate(lowered, costs, channel=Channel.PAIR).makespan
        for lowered in (by_arrival, by_sender)
    )
    return by_arrival if first <= second * (1 + 1e-9) else by_sender


def add_transfers_in_sweeps(schedule: Schedule) -> Schedule:
    """Add sends and receives where PyTorch's runtime places them.

    Again and again each rank in turn runs its next action, if its inputs are there; a send and its
    receive are appended to both lists right after the computation of the value.

    Args:
        schedule: computations in an order that does not stall.

    Example:
        >>> print(add_transfers_in_sweeps(Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")))
        rank 0 | 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        rank 1 | 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    values = Values(schedule.num_stages, schedule.num_microbatches)
    sweeps = [0] * schedule.num_ranks  # by rank, that of its last action
    computed: dict[int, tuple[int, int]] = {}  # the sweep and the rank of a value
    order: list[tuple[int, int, int]] = []  # the sweep, rank and position of each action
    for rank, position, item, _ in walk(schedule):
        inputs = [computed[value] for part in item.parts for value in values.needed(part)]
        # A sweep goes through the ranks in ascending order, and runs one action of each.
        first = [sweep + (source > rank) for sweep, source in inputs]
        sweeps[rank] = max(sweeps[rank] + 1, *first, 0)
        order.append((sweeps[rank], rank, position))
        for result in map(values.result, item.parts):
            if result is not None:
                computed[result] = sweeps[rank], rank
    places = [(rank, position) for _, rank, position in sorted(order)]
    return _by_sender(schedule, places, _routes(schedule, places))


@dataclass(frozen=True, kw_only=True)
class _Route:
    """A value that another rank needs.

    Attributes:
        send: the action on the rank that computes it.
        receive: the action on the rank that needs it.
        src: the rank and the position of the computation that produces it.
        dst: the rank and the position of the computation that needs it.
    """

    send: Action
    receive: Action
    src: tuple[int, int]
    dst: tuple[int, int]


def _by_end(schedule: Schedule, costs: CostsByName | None) -> list[tuple[int, int]]:
    """Rank and position of every item, by its end in the simulation and after its inputs."""
    ends: list[list[float]] = [[] for _ in schedule.orders]
    for step in simulate(schedule, costs).timeline.steps:
        ends[step.rank].append(step.end)
    remaining = [iter(ends_of_rank) for ends_of_rank in ends]
    now = [0.0] * schedule.num_ranks
    places = []
    # Computations may cost nothing; the walk orders those that end at the same time.
    for n, (rank, position, item, _) in enumerate(walk(schedule)):
        now[rank] = next(remaining[rank]) if item.kind not in WHOLE_STAGE else now[rank]
        places.append((now[rank], n, rank, position))
    return [(rank, position) for _, _, rank, position in sorted(places)]


def _routes(schedule: Schedule, order: list[tuple[int, int]]) -> list[_Route]:
    """The values that ranks send, in the order in which they are sent."""
    consumers: dict[Action, tuple[int, int]] = {}  # by the receive that stands before it
    for rank, position in order:
        for part in schedule.orders[rank][position].parts:
            if part.kind in FLOWS:
                consumers[receive_before(part)] = rank, position
    routes = []
    for rank, position in order:
        for part in schedule.orders[rank][position].parts:
            if part.kind in FLOWS:
                send, receive = ends_of(part)
                dst = consumers.get(receive)
                if dst is not None and dst[0] != rank:
                    routes.append(_Route(send=send, receive=receive, src=(rank, position), dst=dst))
    return routes


def _by_sender(schedule: Schedule, order: list[tuple[int, int]], routes: list[_Route]) -> Schedule:
    """Append both ends of a transfer right after the computation of its value."""
    routes_from: dict[tuple[int, int], list[_Route]] = {}
    for route in routes:
        routes_from.setdefault(route.src, []).append(route)
    lists: list[list[Item]] = [[] for _ in schedule.orders]
    for rank, position in order:
        lists[rank].append(schedule.orders[rank][position])
        for route in routes_from.get((rank, position), ()):
            lists[rank].append(route.send)
            lists[route.dst[0]].append(route.receive)
    return replace(schedule, orders=tuple(map(tuple, lists)))


def _by_arrival(schedule: Schedule, routes: list[_Route]) -> Schedule:
    """Transfers of two ranks by arrival; a send at once, a receive shortly before its consumer."""
    channels: dict[tuple[int, int], list[tuple[int, Action]]] = {}  # by rank and peer
    slots: dict[Action, int] = {}  # the position in its list before which an action stands
    receives = set()
    for n, route in enumerate(routes):
        (src, produced), (dst, needed) = route.src, route.dst
        slots[route.send] = produced + 1
        slots[route.receive] = max(0, needed - MAX_AHEAD)
        receives.add(route.receive)
        channels.setdefault((src, dst), []).append((n, route.send))
        channels.setdefault((dst, src), []).append((n, route.receive))
    lists: list[list[tuple[int, int, Action]]] = [[] for _ in schedule.orders]
    for (rank, _), ends in channels.items():
        # A receive must not stand behind its successors in the channel, and then no action before
        # its predecessors.
        latest = len(schedule.orders[rank])
        for _, action in reversed(ends):
            if action in receives:
                slots[action] = min(slots[action], latest)
            latest = slots[action]
        earliest = 0
        for n, action in ends:
            earliest = max(earliest, slots[action])
            lists[rank].append((earliest, n, action))
    orders = []
    for order, posted in zip(schedule.orders, lists, strict=True):
        waiting = deque(sorted(posted))
        merged: list[Item] = []
        for position in range(len(order) + 1):
            while waiting and waiting[0][0] <= position:
                merged.append(waiting.popleft()[2])
            merged.extend(order[position : position + 1])
        orders.append(tuple(merged))
    return replace(schedule, orders=tuple(orders))


# --- gradients and parameters of whole stages ----------------------------------------------------


def add_reductions(schedule: Schedule) -> Schedule:
    """Add a reduction after the last backward of each stage.

    Example:
        >>> print(add_reductions(Schedule.from_csv("0F0,0I0,0W0")))
        rank 0 | 0F0 0I0 0W0 0REDUCE_GRAD
    """
    orders = []
    for order in schedule.orders:
        last = {
            part.stage: position
            for position, item in enumerate(order)
            for part in item.parts
            if part.kind in (BACKWARD, WEIGHT)
        }
        grown: list[Item] = []
        waiting: list[int] = []  # stages whose gradients are complete
        for position, item in enumerate(order):
            # The gradients that a backward sends go first, because other ranks wait for them.
            if item.kind not in (Kind.SEND_F, Kind.SEND_B):
                grown.extend(
                    Action(kind=Kind.REDUCE, microbatch=None, stage=stage) for stage in waiting
                )
                waiting = []
            grown.append(item)
            waiting += [part.stage for part in item.parts if last.get(part.stage) == position]
        grown.extend(Action(kind=Kind.REDUCE, microbatch=None, stage=stage) for stage in waiting)
        orders.append(tuple(grown))
    return replace(schedule, orders=tuple(orders))


def add_unshards(
    schedule: Schedule, stage_nbytes: Sequence[int], window_nbytes: int | None = None
) -> Schedule:
    """Unshard stages before computations and reshard them afterwards, in a window of bytes.

    Before each computation the stages that the rank uses next, in the order of their use, are
    unsharded as long as they fit into the window, and the others are resharded. The stages of the
    computation itself are always unsharded.

    Example:
        >>> schedule = Schedule.from_csv("0F0,1F0,1B0,0B0")
        >>> print(add_unshards(schedule, [8, 8], window_nbytes=8))
        rank 0 | 0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD
        >>> print(add_unshards(schedule, [8, 8]))
        rank 0 | 0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0 0RESHARD
    """
    if len(stage_nbytes) != schedule.num_stages or any(size < 0 for size in stage_nbytes):
        raise ArgumentError(
            f"the bytes of stages are {list(stage_nbytes)!r:.80}; give one number >= 0 for each of "
            f"the {schedule.num_stages} stages"
        )
    room = sum(stage_nbytes) if window_nbytes is None else window_nbytes
    return replace(
        schedule,
        orders=tuple(tuple(_with_unshards(order, stage_nbytes, room)) for order in schedule.orders),
    )


def _with_unshards(order: Sequence[Item], sizes: Sequence[int], room: int) -> Iterator[Item]:
    unsharded: list[int] = []
    for item, upcoming in zip(order, _next_uses(order), strict=True):
        current = [part.stage for part in item.parts if part.kind in COMPUTE]
        if current:
            wanted, used = list[int](), 0
            for stage in upcoming:
                used += sizes[stage]
                if used > room and stage not in current:
                    break
                wanted.append(stage)
            yield from (
                Action(kind=Kind.RESHARD, microbatch=None, stage=s)
                for s in unsharded
                if s not in wanted
            )
            yield from (
                Action(kind=Kind.UNSHARD, microbatch=None, stage=s)
                for s in wanted
                if s not in unsharded
            )
            unsharded = wanted
        yield item
    yield from (Action(kind=Kind.RESHARD, microbatch=None, stage=stage) for stage in unsharded)


def _next_uses(order: Sequence[Item]) -> list[tuple[int, ...]]:
    """At each position, the stages that compute there or later, in the order of their next use."""
    uses: list[tuple[int, ...]] = []
    upcoming: tuple[int, ...] = ()
    for item in reversed(order):
        now = tuple(dict.fromkeys(part.stage for part in item.parts if part.kind in COMPUTE))
        if now:
            upcoming = now + tuple(stage for stage in upcoming if stage not in now)
        uses.append(upcoming)
    return uses[::-1]


# ``lower``, done once for all simulated ranks, which give it the same arguments.
lower_once = lru_cache(maxsize=16)(lower)


def forwards_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Forwards on the placement of ``schedule``: one wave after another through all stages."""
    orders: list[list[Item]] = [[] for _ in range(schedule.num_ranks)]
    waves = sorted(
        (i + stage, stage, i)
        for stage in range(schedule.num_stages)
        for i in range(num_microbatches)
    )
    for _, stage, i in waves:
        orders[schedule.placement[stage]].append(Action(kind=FORWARD, microbatch=i, stage=stage))
    return replace(
        schedule,
        name="forward-only",
        num_microbatches=num_microbatches,
        orders=tuple(map(tuple, orders)),
    )
