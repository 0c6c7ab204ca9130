"""The actions of all ranks as somebody gives them, and the mistakes in them that are no waits.

``read`` takes a schedule, lists by rank of objects, or text, of which nobody has to say its form:

==============  ============================================================================
CSV             one row for each rank, as ``torch.distributed.pipelining`` writes it
lists           as Python prints them: ``[0F0, 0B0]``, one for each rank, also in one list or
                in a dict by rank
lines by rank   ``rank 0: 0F0 0F1``, in any order of ranks
lines           one for each rank, with spaces between actions
==============  ============================================================================

A list inside the list of a rank is a batch, and so are actions with ``+`` between them; ``...``
stands for actions that are left out. What is no list of actions is refused. ``mistake`` then names
the first action that is missing, too much or on the wrong rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline.schedules.check import local_order, placed_and_complete, transfers
from echelon.pipeline.schedules.dataflow import FLOWS, OWN, Transfer, Values
from echelon.pipeline.schedules.ir import (
    SENDS,
    TRANSFER,
    WHOLE_STAGE,
    Action,
    Item,
    Kind,
    Schedule,
    parse_item,
    placed_parts,
)

MAX_NBYTES = 1 << 25  # some millions of actions, which need some gigabytes of memory
_MAX_RANK = 1 << 16
_MAX_DEPTH = 8
_MAX_SHOWN = 40  # characters of a text that an error repeats

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v'"`]+|None\b)
    | (?P<newline>\n)
    | (?P<label>\[?rank[ \t_=\#-]*[0-9]{1,9}(?![0-9A-Za-z_])\]?[ \t]*[:|=\u2502]?
        |[0-9]{1,9}[ \t'"]*:)
    | (?P<action>\([^()\[\]{}\n]*;[^()\[\]{}\n]*\)[ \t]*[A-Za-z_]+|[0-9]+[A-Za-z_]+[0-9]*)
    | (?P<gap>\.{2,}|\u2026)
    | (?P<open>[\[({])
    | (?P<close>[\])}])
    | (?P<comma>,)
    | (?P<join>\+)
    | (?P<word>[0-9A-Za-z_]+|.)""",
    re.VERBOSE | re.IGNORECASE,
)
_CLOSING = {"[": "]", "(": ")", "{": "}"}

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
        is_excerpt: whether actions are left out.
        text: in which they stand; None if they were given as objects.
        offsets: where each action stands in the text, in characters.
    """

    orders: tuple[tuple[Item, ...], ...]
    batches: tuple[tuple[int | None, ...], ...]
    form: str
    is_excerpt: bool = False
    text: str | None = None
    offsets: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def has_transfers(self) -> bool:
        """Whether sends and receives stand in the lists."""
        return any(item.kind in TRANSFER for order in self.orders for item in order)

    @cached_property
    def ends(self) -> TransferEnds:
        """Where the two ends of each transfer stand."""
        return TransferEnds(self.orders, explicit=self.has_transfers)

    def place(self, rank: int, index: int) -> str:
        """Where an action stands: in the text, or in the list of its rank."""
        if self.text is not None:
            return place_in(self.text, self.offsets[rank][index])
        return f"index {index}"


class TransferEnd(NamedTuple):
    """One end of a transfer: the rank, and the position of the action in its list."""

    rank: int
    position: int


class TransferEnds:
    """Where the two ends of each transfer stand, by the number of its value.

    A send and its receive are the two ends of one transfer, by the name of the value. Which rank
    holds which stage does not matter, so excerpts are read as well as whole lists; a transfer of
    which one end is left out is no transfer. In lists without sends and receives (not ``explicit``)
    the computations that make and need a value are the ends.

    Attributes:
        stages: all that have an action.
        values: the numbers of the values.
        sent: the ends that send.
        received: the ends that receive.
        transfers: the transfers.
    """

    def __init__(self, orders: Sequence[Sequence[Item]], *, explicit: bool) -> None:
        parts = list(placed_parts(orders))
        self.stages = {part.stage for _, _, _, part in parts}
        num_microbatches = 1 + max((part.microbatch or 0 for _, _, _, part in parts), default=0)
        self.values = Values(1 + max(self.stages, default=0), num_microbatches)
        self._arrivals = self.values.count if explicit else 0
        sent: dict[int | None, TransferEnd] = {}
        received: dict[int | None, TransferEnd] = {}
        for rank, index, _, part in parts:
            if not explicit:
                sent[self.values.result(part)] = TransferEnd(rank, index)
                received[self.values.far(part)] = TransferEnd(rank, index)
            elif part.kind in TRANSFER:
                ends = sent if part.kind in SENDS else received
                ends[self.values.moved(part)] = TransferEnd(rank, index)
        self.sent: dict[int, TransferEnd] = {}
        self.received: dict[int, TransferEnd] = {}
        self.transfers: dict[int | None, Transfer] = {}
        for value, end in sent.items():
            other = received.get(value)
            if value is not None and other is not None and other.rank != end.rank:
                self.sent[value], self.received[value] = end, other
                self.transfers[value] = Transfer(value, end.rank, other.rank)

    def of(self, value: int) -> tuple[TransferEnd, TransferEnd]:
        """The end that sends and the end that receives."""
        return self.sent[value], self.received[value]

    def on(self, value: int, rank: int) -> TransferEnd:
        """The end on a rank."""
        return next(end for end in self.of(value) if end.rank == rank)

    def arrival(self, value: int) -> int:
        """The number for which a computation waits that needs a value of another rank."""
        return value + self._arrivals


def read(source: Source, *, batched: bool = False) -> ActionLists:
    """The actions of each rank, whichever form they have.

    Args:
        source: text in one of the forms above, a schedule, or lists by rank. Members of lists are
            actions, or objects whose text is one, such as those of PyTorch.
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
        lists = _of_text(source)
    else:
        lists = _of_objects(source)
    return _with_batches(lists) if batched else lists


# --- text ----------------------------------------------------------------------------------------


class _Node(NamedTuple):
    """A token, or a list with what is in it."""

    kind: str
    text: str
    offset: int
    children: list[_Node]


class _Cell(NamedTuple):
    """An action of a text, the number of its batch, and where it stands."""

    item: Item
    batch: int | None
    offset: int


def _of_text(text: str) -> ActionLists:
    if len(text) > MAX_NBYTES:
        raise ArgumentError(
            f"the text has {len(text)} characters, more than {MAX_NBYTES}; give one step of the "
            "schedule, which repeats"
        )
    text = text.removeprefix("\ufeff")
    form, rows = _rows(text, _tree(text))
    cells = [_cells(text, row) for row in rows]
    if not any(cells):
        raise ArgumentError("the text is empty: it has no action of any rank")
    return ActionLists(
        orders=tuple(tuple(cell.item for cell in row) for row in cells),
        batches=tuple(tuple(cell.batch for cell in row) for row in cells),
        form=form,
        is_excerpt=any(node.kind == "gap" for row in rows for node in row),
        text=text,
        offsets=tuple(tuple(cell.offset for cell in row) for row in cells),
    )


def place_in(text: str, offset: int) -> str:
    """A place as people count: lines and columns from 1.

    Example:
        >>> place_in("0F0,0B0\\n1F0,1B0", 12)
        'line 2, column 5'
    """
    line = text.count("\n", 0, offset) + 1
    return f"line {line}, column {offset - text.rfind(chr(10), 0, offset)}"


def _refuse(text: str, offset: int, problem: str) -> NoReturn:
    """Raise an error that begins with a place of the text."""
    raise ArgumentError(f"{place_in(text, offset)}: {problem}")


def _no_action(text: str) -> str:
    """The sentence about a text that is no action: short, without what a terminal would obey."""
    cut = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return (
        f"{cut if cut.isprintable() else ascii(cut)} is no action; write stage, kind and "
        "microbatch, such as 2F0, 3SEND_B1, 0UNSHARD or (0F4;7B1)OVERLAP_F_B"
    )


def _tree(text: str) -> list[_Node]:
    """All tokens but spaces and quotation marks, with those between brackets in a list."""
    stack = [_Node("list", "", 0, [])]
    for match in _TOKEN.finditer(text):
        kind, node = match.lastgroup, _Node(match.lastgroup or "", match[0], match.start(), [])
        if kind == "word":
            cut_off = (
                "" if text[match.end() :].strip() else "; the text ends here and may be cut off"
            )
            _refuse(text, node.offset, _no_action(match[0]) + cut_off)
        elif kind == "open":
            if len(stack) > _MAX_DEPTH:
                _refuse(text, node.offset, f"{len(stack)} lists stand inside each other here")
            node = node._replace(kind="list")
            stack[-1].children.append(node)
            stack.append(node)
        elif kind == "close":
            opened = stack.pop()
            if not stack or _CLOSING[opened.text] != node.text:
                _refuse(text, node.offset, f"{node.text} closes no list that is open here")
        elif kind != "space":
            stack[-1].children.append(node)
    if len(stack) > 1:
        _refuse(
            text,
            stack[-1].offset,
            f"the list that begins here does not end with {_CLOSING[stack[-1].text]}; the text may "
            "be cut off",
        )
    return stack[0].children


def _rows(text: str, nodes: list[_Node]) -> tuple[str, list[list[_Node]]]:
    """The form of the text, and what it has for each rank."""
    inner = _content(nodes)
    if len(inner) == 1 and inner[0].kind == "list":  # a dict, or a list of lists
        children = _content(inner[0].children)
        if any(node.kind == "label" for node in children):
            nodes = inner[0].children
        elif children and all(node.kind == "list" for node in children):
            return "lists", [node.children for node in children]
    labels = [_rank_of(node) for node in nodes if node.kind == "label"]
    # The agent of PyTorch writes [rank0]: before each line that a process prints.
    if len(labels) == 1 or len(set(labels)) > 1:
        return "lines by rank", _rows_by_label(text, nodes)
    nodes = [node for node in nodes if node.kind != "label"]
    inner = _content(nodes)
    kinds = {node.kind for node in inner}
    if kinds == {"list", "gap"}:
        gap = next(node for node in inner if node.kind == "gap")
        _refuse(text, gap.offset, "ranks are left out here; give the list of each")
    if kinds == {"list"}:
        return "lists", [node.children for node in inner]
    rows: list[list[_Node]] = [[]]
    for node in nodes:
        if node.kind == "newline":
            rows.append([])
        else:
            rows[-1].append(node)
    form = "CSV" if any(node.kind == "comma" for node in nodes) else "lines"
    return form, [_unwrapped(row) for row in rows if row]  # commas alone: no actions


def _rows_by_label(text: str, nodes: list[_Node]) -> list[list[_Node]]:
    """What ranks have that are named, in the order of ranks."""
    rows: dict[int, list[_Node]] = {}
    labels: dict[int, _Node] = {}
    rank = -1  # before the first label
    for node in nodes:
        if node.kind != "label":
            if rank >= 0:
                rows[rank].append(node)
            elif node.kind not in ("newline", "comma"):
                _refuse(text, node.offset, "no rank is named before it, and others are")
            continue
        if rank >= 0 and not rows[rank]:  # [rank0]:rank 1: the second name is meant
            del rows[rank]
        rank = _rank_of(node)
        if rank in rows:
            first = place_in(text, labels[rank].offset)
            _refuse(text, node.offset, f"rank {rank} has a list already, at {first}")
        if rank >= _MAX_RANK:
            _refuse(text, node.offset, f"rank {rank} is too large; count ranks from 0")
        rows[rank], labels[rank] = [], node
    for missing in sorted(set(range(max(rows))) - set(rows)):
        later = min(labels[other].offset for other in rows if other > missing)
        _refuse(text, later, f"there is a list for this rank and none for rank {missing}")
    return [_unwrapped(rows[rank]) for rank in sorted(rows)]


def _rank_of(label: _Node) -> int:
    return int("".join(filter(str.isdecimal, label.text)))


def _cells(text: str, row: list[_Node]) -> list[_Cell]:
    """The actions of one rank; those of a batch get its number."""
    cells: list[_Cell] = []
    batches, join = 0, False
    for node in row:
        if node.kind == "join":
            if not cells or join:
                _refuse(text, node.offset, "+ stands between two sends or receives")
            join = True
        elif node.kind == "list":
            cells += [_cell(text, member, batches) for member in _content(node.children)]
            batches += 1
        elif node.kind == "action":
            if join and cells[-1].batch is None:
                cells[-1] = _in_batch(text, cells[-1]._replace(batch=batches))
                batches += 1
            cells.append(_cell(text, node, cells[-1].batch if join else None))
            join = False
    if join:
        _refuse(text, row[-1].offset, "+ stands between two sends or receives")
    return cells


def _cell(text: str, node: _Node, batch: int | None) -> _Cell:
    if node.kind != "action":
        _refuse(text, node.offset, "a batch has only sends and receives")
    item = parse_loosely(node.text)
    if item is None:
        _refuse(text, node.offset, _no_action(node.text))
    return _in_batch(text, _Cell(item, batch, node.offset))


def _in_batch(text: str, cell: _Cell) -> _Cell:
    if cell.batch is not None and cell.item.kind not in TRANSFER:
        problem = f"{cell.item} is in a batch, and a batch has only sends and receives"
        _refuse(text, cell.offset, problem)
    return cell


def _content(nodes: list[_Node]) -> list[_Node]:
    """Without the ends of lines and commas."""
    return [node for node in nodes if node.kind not in ("newline", "comma")]


def _unwrapped(row: list[_Node]) -> list[_Node]:
    """What is in the list of a rank, if its line has one list and nothing else but gaps."""
    inner = _content(row)
    lists = [node for node in inner if node.kind == "list"]
    gaps = [node for node in inner if node.kind == "gap"]
    if len(lists) == 1 and len(lists) + len(gaps) == len(inner):
        return [*gaps, *lists[0].children]
    return row


# --- objects -------------------------------------------------------------------------------------


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
    return replace(lists, batches=tuple(batches))


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


# --- mistakes ------------------------------------------------------------------------------------


def mistake(lists: ActionLists) -> ScheduleError | None:
    """The first action that is missing, twice, on a wrong rank or before what it needs there."""
    try:
        _check_own_values(lists.orders, lists.ends.values)
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


def _check_own_values(orders: Sequence[Sequence[Item]], values: Values) -> None:
    """Check that a computation stands behind the one of another stage, of its rank, it is fed by.

    No transfer moves such a value, so the walk over transfers does not see it.
    """
    places = {
        (rank, values.result(part)): (index, part) for rank, index, _, part in placed_parts(orders)
    }
    for rank, index, item, part in placed_parts(orders):
        far = values.far(part)
        place = None if far is None else places.get((rank, far))
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
        for needed in _before(part):
            if places.get(needed, -1) > index:
                raise ScheduleError(
                    f"it stands before {needed}, which is at index {places[needed]}",
                    rank=rank,
                    index=index,
                    action=item,
                )


def _before(action: Action) -> list[Action]:
    """What stands before an action of the same stage and microbatch."""
    kind, i, stage = action
    flow = FLOWS.get(kind)
    kinds: list[Kind] = [OWN[kind]] if kind in OWN else []
    if flow is not None and kind in flow.made_by:
        kinds.append(flow.receive)
    elif flow is not None and kind is flow.send:
        kinds.extend(flow.made_by)
    return [Action(kind=before, microbatch=i, stage=stage) for before in kinds]
