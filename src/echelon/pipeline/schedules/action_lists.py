"""The actions of all ranks as somebody gives them, and the mistakes in them that are no waits.

``read`` takes text, lists, a dict by rank or a ``Schedule``. It refuses what is no list of actions.
``mistake`` then names the first action that is missing, too much or on the wrong rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline.schedules.action_text import ActionText, Cell, read_text, refuse, shown
from echelon.pipeline.schedules.check import local_order, placed_and_complete, transfers
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    FORWARD,
    INPUT,
    SENDS,
    TRANSFER,
    WEIGHT,
    WHOLE_STAGE,
    Action,
    Item,
    Kind,
    Schedule,
    parse_item,
    placed_parts,
)

# As people write them: 0SendF1, 2recvb0, 1ReduceGrad.
_LOOSE = re.compile(r"([0-9]{1,9})([A-Za-z_]+)([0-9]{0,9})")
_KINDS = {kind.value.replace("_", ""): kind for kind in Kind if kind is not Kind.OVERLAP}

Source = Schedule | str | Mapping[int, Iterable[Any]] | Sequence[Iterable[Any]]


@dataclass(frozen=True, kw_only=True)
class ActionLists:
    """What each rank does.

    Attributes:
        orders: the actions of each rank, in issue order.
        batches: by rank: the number of the batch of each action, or None.
        form: how they were given, in words.
        text: where they stand in a text; None if they were given as objects.
        gaps: the ranks whose list leaves actions out.
    """

    orders: tuple[tuple[Item, ...], ...]
    batches: tuple[tuple[int | None, ...], ...]
    form: str
    text: ActionText | None
    gaps: frozenset[int]

    @property
    def is_excerpt(self) -> bool:
        """Whether actions are left out."""
        return bool(self.gaps)

    @property
    def has_transfers(self) -> bool:
        """Whether sends and receives stand in the lists."""
        return any(item.kind in TRANSFER for order in self.orders for item in order)

    def place(self, rank: int, index: int) -> str:
        """Where an action stands: in the text, or in the list of its rank."""
        if self.text is not None:
            return self.text.place(self.text.cells[rank][index].offset)
        return f"index {index}"


def read(source: Source, *, batched: bool = False) -> ActionLists:
    """The actions of each rank, whichever form they have.

    Args:
        source: text in one of the forms of ``action_text``, a schedule, or lists by rank. Members
            of lists are actions, or objects whose text is one, such as those of PyTorch.
        batched: whether sends and receives that follow each other are issued as one batch.

    Raises:
        ArgumentError: it is none of these, or something in it is no action.

    Example:
        >>> lists = read("rank 0: [... 0SendF1, 2RecvF0, 2F0]\\nrank 1: [... 1SendF0, 1RecvF1]")
        >>> print(*lists.orders[0], lists.is_excerpt, lists.place(1, 0))
        0SEND_F1 2RECV_F0 2F0 True line 2, column 14
    """
    if isinstance(source, Schedule):
        lists = _of_orders(source.orders, "a schedule")
    elif isinstance(source, str):
        lists = _of_text(read_text(source))
    else:
        lists = _of_objects(source)
    return _with_batches(lists) if batched else lists


def _of_text(text: ActionText) -> ActionLists:
    orders = []
    for cells in text.cells:
        order: list[Item] = []
        for cell in cells:
            item = parse_loosely(cell.text)
            if item is None:
                refuse(text.text, cell.offset, _no_action(cell.text))
            order.append(item)
        orders.append(tuple(order))
    for cells, order_ in zip(text.cells, orders, strict=True):
        _check_batches(text, cells, order_)
    return ActionLists(
        orders=tuple(orders),
        batches=tuple(tuple(cell.batch for cell in cells) for cells in text.cells),
        form=text.form,
        text=text,
        gaps=text.gaps,
    )


def _check_batches(text: ActionText, cells: Sequence[Cell], order: Sequence[Item]) -> None:
    for cell, item in zip(cells, order, strict=True):
        if cell.batch is not None and item.kind not in TRANSFER:
            refuse(
                text.text,
                cell.offset,
                f"{item} is in a batch, and a batch has only sends and receives",
            )


def _of_objects(source: object) -> ActionLists:
    """Read lists by rank of objects whose text is an action; None and empty text are bubbles."""
    if isinstance(source, Mapping):
        if set(source) != set(range(len(source))):
            raise ArgumentError(
                f"the lists are for the ranks {list(source)!r:.80}; give one for each rank, by "
                "rank from 0"
            )
        rows: list[object] = [source[rank] for rank in range(len(source))]
    elif isinstance(source, Sequence) and not isinstance(source, bytes | bytearray):
        rows = list(source)
    else:
        raise ArgumentError(
            f"the schedule is {source!r:.80}; give text, a Schedule, or lists of actions by rank"
        )
    orders = []
    for rank, row in enumerate(rows):
        if isinstance(row, str | bytes) or not isinstance(row, Iterable):
            raise ArgumentError(f"the list of rank {rank} is {row!r:.80}; give a list of actions")
        orders.append([_of_object(thing, rank, index) for index, thing in enumerate(row)])
    kept = tuple(tuple(item for item in order if item is not None) for order in orders)
    if not any(kept):
        raise ArgumentError("the lists are empty: no rank has an action")
    return _of_orders(kept, "lists of objects")


def _of_object(thing: object, rank: int, index: int) -> Item | None:
    if thing is None or isinstance(thing, Action) or not str(thing).strip():
        return thing if isinstance(thing, Action) else None
    item = parse_loosely(str(thing))
    if item is None:
        raise ArgumentError(f"rank {rank}, index {index}: {_no_action(str(thing))}")
    return item


def _of_orders(orders: tuple[tuple[Item, ...], ...], form: str) -> ActionLists:
    return ActionLists(
        orders=orders,
        batches=tuple((None,) * len(order) for order in orders),
        form=form,
        text=None,
        gaps=frozenset(),
    )


def _with_batches(lists: ActionLists) -> ActionLists:
    """Make one batch of the sends and receives between two other actions."""
    batches = []
    for order in lists.orders:
        numbers: list[int | None] = []
        number = 0
        for item in order:
            is_transfer = item.kind in TRANSFER
            number += not is_transfer
            numbers.append(number if is_transfer else None)
        batches.append(tuple(numbers))
    return ActionLists(
        orders=lists.orders,
        batches=tuple(batches),
        form=lists.form,
        text=lists.text,
        gaps=lists.gaps,
    )


def parse_loosely(text: str) -> Item | None:
    """An action that may be written without underscores, in any case; None if it is none.

    Example:
        >>> str(parse_loosely("0SendF1")), parse_loosely("0X1")
        ('0SEND_F1', None)
    """
    loose = _LOOSE.fullmatch(text)
    if loose is not None:
        kind = _KINDS.get(loose[2].upper().replace("_", ""))
        if kind is None or (kind in WHOLE_STAGE) != (loose[3] == ""):
            return None
        microbatch = int(loose[3]) if loose[3] else None
        return Action(kind=kind, microbatch=microbatch, stage=int(loose[1]))
    try:
        return parse_item(text)
    except ScheduleError:
        return None


def _no_action(text: str) -> str:
    return (
        f"{shown(text)} is no action; write stage, kind and microbatch, such as 2F0, 3SEND_B1, "
        "0UNSHARD or (0F4;7B1)OVERLAP_F_B"
    )


def mistake(lists: ActionLists) -> ScheduleError | None:
    """The first action that is missing, twice, on a wrong rank or before what it needs there."""
    try:
        _check_own_values(lists.orders)
        if lists.is_excerpt:
            _check_excerpt(lists.orders)
            return None
        schedule = Schedule.from_orders(lists.orders)
        local_order(schedule, placed_and_complete(schedule))
        if schedule.is_lowered:
            transfers(schedule)
    except ScheduleError as error:
        return error
    return None


def _check_own_values(orders: Sequence[Sequence[Item]]) -> None:
    """Check that a computation stands behind the one of another stage, of its rank, it is fed by.

    No transfer moves such a value, so the walk over transfers does not see it.
    """
    places = {
        (rank, part.kind is FORWARD, part.stage, part.microbatch): (index, part)
        for rank, index, _, part in placed_parts(orders)
        if part.kind in (FORWARD, BACKWARD, INPUT)
    }
    for rank, index, item, part in placed_parts(orders):
        if part.kind not in (FORWARD, BACKWARD, INPUT):
            continue
        is_forward = part.kind is FORWARD
        feeder = part.stage - 1 if is_forward else part.stage + 1
        place = places.get((rank, is_forward, feeder, part.microbatch))
        if place is not None and place[0] >= index:
            raise ScheduleError(
                f"it needs the value of {place[1]}, which is not before it but at index "
                f"{place[0]} of the same rank",
                rank=rank,
                index=index,
                action=item,
            )


def _check_excerpt(orders: Sequence[Sequence[Item]]) -> None:
    """Check what can be said of a part of the lists: nothing twice, all in order on its rank."""
    owners: dict[int, int] = {}
    places: dict[Action, int] = {}
    for rank, index, item, part in placed_parts(orders):
        owner = owners.setdefault(part.stage, rank)
        problem = None
        if owner != rank:
            problem = f"stage {part.stage} is on rank {owner}"
        elif part.kind not in WHOLE_STAGE and part in places:
            problem = f"it is at index {places[part]} already"
        if problem is not None:
            raise ScheduleError(problem, rank=rank, index=index, action=item)
        places[part] = index
    for rank, index, item, part in placed_parts(orders):
        for kind in _BEFORE.get(part.kind, ()):
            needed = part._replace(kind=kind)
            if places.get(needed, -1) > index:
                raise ScheduleError(
                    f"it stands before {needed}, which is at index {places[needed]}",
                    rank=rank,
                    index=index,
                    action=item,
                )


# What stands before an action of the same stage and microbatch.
_BEFORE: dict[Kind, tuple[Kind, ...]] = {
    FORWARD: (Kind.RECV_F,),
    BACKWARD: (FORWARD, Kind.RECV_B),
    INPUT: (FORWARD, Kind.RECV_B),
    WEIGHT: (INPUT,),
    Kind.SEND_F: (FORWARD,),
    Kind.SEND_B: (BACKWARD, INPUT),
}
assert set(_BEFORE) >= SENDS
