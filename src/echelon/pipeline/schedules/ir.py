"""What a pipeline schedule is: actions, one list of them per rank, and their text form.

The text form is that of ``torch.distributed.pipelining``, so schedules travel both ways: an action
is stage, kind, microbatch (``2F0``), and a schedule is a CSV file with one row per rank.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from echelon.errors import ArgumentError, ScheduleError
from echelon.page import html_of


class Kind(StrEnum):
    """What an action does. The values are the words of the text form."""

    F = "F"  # forward
    B = "B"  # backward, whole
    I = "I"  # noqa: E741  # backward, gradients of the inputs only
    W = "W"  # backward, gradients of the weights only
    SEND_F = "SEND_F"  # outputs to the next stage
    RECV_F = "RECV_F"  # inputs from the previous stage
    SEND_B = "SEND_B"  # gradients to the previous stage
    RECV_B = "RECV_B"  # gradients from the next stage
    UNSHARD = "UNSHARD"  # all-gather the parameters of a stage
    RESHARD = "RESHARD"  # free them
    REDUCE = "REDUCE_GRAD"  # reduce the gradients of a stage over its replicas
    OVERLAP = "OVERLAP_F_B"  # a Pair


# The kinds of computation. Loops over all actions compare with them, and a global name is found
# several times faster than a member of an enum.
FORWARD, BACKWARD, INPUT, WEIGHT = Kind.F, Kind.B, Kind.I, Kind.W
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
TRANSFER = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
WHOLE_STAGE = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)  # these have no microbatch

_TEXT = re.compile(
    f"([0-9]{{1,9}})({'|'.join(kind for kind in Kind if kind is not Kind.OVERLAP)})([0-9]{{0,9}})"
)
_PAIR = re.compile(rf"\(\s*([^;()]+?)\s*;\s*([^;()]+?)\s*\){Kind.OVERLAP}")

_MAX_ITEM_CHARS = 80
_MAX_TEXT_CHARS = 1 << 26  # some millions of actions
_MAX_RANKS = 1 << 16
# ``check`` names the missing actions of an incomplete schedule by tables of stages times
# microbatches. So many entries are always allowed, more only where there are as many computations.
_MAX_INCOMPLETE = 1 << 16


class Action(NamedTuple):
    """One step of a stage, for one microbatch or (unshard, reshard, reduce) for the whole stage.

    The text form has the fields in another order, so give them by name.

    A send belongs to the stage that sends, a receive to the stage that receives: ``2SEND_F0`` and
    ``3RECV_F0`` are the two ends of one transfer.

    Attributes:
        kind: what is done.
        microbatch: for which part of the batch; None where it is done for the whole stage.
        stage: by which stage.

    Example:
        >>> str(Action(kind=Kind.F, microbatch=0, stage=2))
        '2F0'
        >>> str(Action(kind=Kind.UNSHARD, microbatch=None, stage=3))
        '3UNSHARD'
    """

    kind: Kind
    microbatch: int | None
    stage: int

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions in it: itself."""
        return (self,)

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}"


class Pair(NamedTuple):
    """A forward and a backward of two microbatches that run as one unit.

    It starts when the inputs of both are there, and what it produces is sent when both have ended.

    Example:
        >>> forward = Action(kind=Kind.F, microbatch=4, stage=0)
        >>> str(Pair(forward, Action(kind=Kind.B, microbatch=1, stage=7)))
        '(0F4;7B1)OVERLAP_F_B'
    """

    forward: Action
    backward: Action

    @property
    def kind(self) -> Kind:
        """``Kind.OVERLAP``."""
        return Kind.OVERLAP

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions in it: the forward, then the backward."""
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){Kind.OVERLAP.value}"


Item = Action | Pair
"""One entry of the list of a rank."""


def parse_item(text: str) -> Item:
    """Parse an action or a pair.

    Raises:
        ScheduleError: the text is neither.

    Example:
        >>> parse_item("3SEND_B1")
        Action(kind=<Kind.SEND_B: 'SEND_B'>, microbatch=1, stage=3)
        >>> parse_item("F3")
        Traceback (most recent call last):
        echelon.errors.ScheduleError: the schedule cannot run: F3: this is no action; write stage, \
kind and microbatch, such as 2F0, 3SEND_B1, 0UNSHARD or (0F4;7B1)OVERLAP_F_B
    """
    text = text.strip()
    if len(text) > _MAX_ITEM_CHARS:
        text = f"{text[:_MAX_ITEM_CHARS]}..."  # which is no action
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        forward, backward = (parse_item(part) for part in pair.groups())
        if forward.kind is FORWARD and backward.kind in (BACKWARD, INPUT):
            assert isinstance(forward, Action)  # a pair has the kind OVERLAP
            assert isinstance(backward, Action)
            return Pair(forward, backward)
    action = _TEXT.fullmatch(text)
    if action is not None:
        stage, kind, microbatch = action.groups()
        if (Kind(kind) in WHOLE_STAGE) == (microbatch == ""):
            return Action(
                kind=Kind(kind),
                microbatch=int(microbatch) if microbatch else None,
                stage=int(stage),
            )
    raise ScheduleError(
        "this is no action; write stage, kind and microbatch, such as 2F0, 3SEND_B1, 0UNSHARD "
        "or (0F4;7B1)OVERLAP_F_B",
        action=text,
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The actions of every rank, in the order in which they run. Immutable.

    Nothing here says that it can run; ``check`` does.

    Attributes:
        name: what generated it, or where it comes from.
        num_stages: into how many parts the model is cut.
        num_microbatches: into how many parts the batch is cut.
        placement: the rank of each stage.
        orders: what each rank does, by rank.

    Example:
        >>> schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")
        >>> schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
        (2, 2, 2)
        >>> schedule.placement
        (0, 1)
    """

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Item, ...], ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks it is for."""
        return len(self.orders)

    @cached_property
    def is_lowered(self) -> bool:
        """Whether transfers between ranks stand in it."""
        return any(item.kind in TRANSFER for order in self.orders for item in order)

    @cached_property
    def has_backward(self) -> bool:
        """Whether it trains; a schedule without any backward only evaluates."""
        backwards = (BACKWARD, INPUT, WEIGHT)
        return any(part.kind in backwards for _, _, _, part in placed_parts(self.orders))

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in ascending order."""
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]

    _repr_html_ = html_of

    def __repr__(self) -> str:
        count = sum(len(order) for order in self.orders)
        return (
            f"<Schedule {self.name!r:.80}: {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches, {count} actions>"
        )

    def __str__(self) -> str:
        width = len(str(self.num_ranks - 1))
        return "\n".join(
            f"rank {rank:>{width}} | " + " ".join(map(str, order))
            for rank, order in enumerate(self.orders)
        )

    def to_csv(self) -> str:
        """One row per rank, one cell per action."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [str(item) for item in order] for order in self.orders
        )
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read a schedule from CSV; empty cells are bubbles and are left out.

        Raises:
            ArgumentError: it is no text.
            ScheduleError: it is no CSV, or too long; a cell is no action; or as ``from_orders``.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"text is {text!r:.80}; give the CSV itself, as a string")
        if len(text) > _MAX_TEXT_CHARS:
            raise ScheduleError(f"its text has {len(text)} characters, more than {_MAX_TEXT_CHARS}")
        rows: list[list[str]] = []
        try:
            for row in csv.reader(io.StringIO(text)):
                rows.append(row)
                if len(rows) > _MAX_RANKS:
                    raise ScheduleError(f"its text has more than {_MAX_RANKS} rows, one for a rank")
        except csv.Error as error:
            raise ScheduleError(f"its text is no CSV: {error}", rank=len(rows)) from error
        return cls.from_orders(rows, name)

    @classmethod
    def from_orders(
        cls, orders: Sequence[Iterable[Item | str | None]], name: str = "orders"
    ) -> Schedule:
        """Make a schedule of lists that a user wrote, one for each rank.

        The numbers of stages and microbatches, and the rank of each stage, are read from the
        computations.

        Args:
            orders: by rank; actions or their text. None and empty text are left out.

        Raises:
            ScheduleError: text that is no action, a stage on two ranks, or a stage on none.
        """
        rows = tuple(
            tuple(
                _read(item, rank, index)
                for index, item in enumerate(order)
                if item is not None and (not isinstance(item, str) or item.strip())
            )
            for rank, order in enumerate(orders)
        )
        _check_numbers(rows)
        owners: dict[int, int] = {}
        microbatches = 0
        for rank, index, item, part in placed_parts(rows):
            if part.kind not in COMPUTE:
                continue
            owner = owners.setdefault(part.stage, rank)
            if owner != rank:
                raise ScheduleError(
                    f"stage {part.stage} runs on rank {owner} already; "
                    "all actions of a stage belong on one rank",
                    rank=rank,
                    index=index,
                    action=item,
                )
            microbatches = max(microbatches, (part.microbatch or 0) + 1)
        missing = sorted(set(range(max(owners, default=0) + 1)) - set(owners))
        if missing:
            raise ScheduleError(f"no rank runs stage {missing[0]}")
        return cls(
            name=name,
            num_stages=len(owners),
            num_microbatches=microbatches,
            placement=tuple(owners[stage] for stage in range(len(owners))),
            orders=rows,
        )


def placed_parts(orders: Iterable[Iterable[Item]]) -> Iterator[tuple[int, int, Item, Action]]:
    """Every action with its place: the rank, the position in its list, the item, the action."""
    for rank, order in enumerate(orders):
        for index, item in enumerate(order):
            for part in item.parts:
                yield rank, index, item, part


def _check_numbers(rows: Sequence[Sequence[Item]]) -> None:
    """Refuse numbers so large that most actions are missing, before there are tables for them."""
    computations = sum(part.kind in COMPUTE for _, _, _, part in placed_parts(rows))
    limit = max(computations, _MAX_INCOMPLETE)
    sizes = {"stage": 0, "microbatch": 0}
    for rank, index, item, part in placed_parts(rows):
        for what, number in (("stage", part.stage), ("microbatch", part.microbatch or 0)):
            if number >= limit:
                raise ScheduleError(
                    f"there are {computations} computations in all, so that most of those "
                    f"of {what} {number} and of those before it are missing",
                    rank=rank,
                    index=index,
                    action=item,
                )
            sizes[what] = max(sizes[what], number + 1)
    needed = sizes["stage"] * sizes["microbatch"]
    if needed > limit:
        raise ScheduleError(
            f"it has {sizes['stage']} stages and {sizes['microbatch']} microbatches, which need "
            f"{needed} forwards, and {computations} computations in all"
        )


def _read(item: Item | str, rank: int, index: int) -> Item:
    if not isinstance(item, str):
        return item
    try:
        return parse_item(item)
    except ScheduleError as error:
        shown = error.action if error.action and error.action.isprintable() else repr(error.action)
        raise ScheduleError(error.problem, rank=rank, index=index, action=shown) from None


def schedule_of(
    name: str,
    placement: tuple[int, ...],
    num_microbatches: int,
    order: Callable[[int], Iterable[Item]],
) -> Schedule:
    """The schedule in which each rank does what ``order(rank)`` gives."""
    return Schedule(
        name=name,
        num_stages=len(placement),
        num_microbatches=num_microbatches,
        placement=placement,
        orders=tuple(tuple(order(rank)) for rank in range(max(placement) + 1)),
    )


def check_type(schedule: object) -> None:
    """Refuse what is no ``Schedule``, such as its name."""
    if not isinstance(schedule, Schedule):
        raise ArgumentError(
            f"schedule is {schedule!r:.80}; give a Schedule, as "
            "ec.pipeline.schedule(name, stages, microbatches, ranks) makes it"
        )
