"""``SteppedCall``: one call of several ranks, with what each of them gave and got."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from rich.text import Text

from echelon.diagnosis.collective_call import CallSite
from echelon.errors.message_text import ranks_text
from echelon.laboratory.data_moves import DataMove
from echelon.laboratory.tensor_glance import TensorGlance
from echelon.page import TextTable, View, ViewPart, bytes_text, html_of, view_of

_FROM_ROOT = ("broadcast", "scatter")
_GAP = 3  # between columns


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SteppedCall:
    """A collective, or a message, at which ``ec.step_through`` holds the ranks.

    Ranks are those in the job. Values are copies, which stay when the ranks go on.

    Attributes:
        number: counts the calls of the run from 1.
        op: the name of the method, such as ``all_reduce``; of a message, ``send``.
        reduce: the reduction, such as ``"sum"``; None without.
        root: the rank that gives or gets everything; None without.
        label: what is communicated, in the words of who called; None without.
        group: the name of the group.
        ranks: that take part; of a message, the sender and the receiver.
        dtype: of the elements; None where nothing moves.
        shape: of the tensor that the call is about; empty where ranks may differ in it. Of a
            ``subgroup``, its members.
        places: the line of the user's code on each rank.
        before: what each rank gave, before the call: parts for all ranks in rank order, where the
            call has such. Of a rank that gives nothing, what its tensor held.
        after: what each rank got, after the call.
        changed: ranges of elements of ``after`` that differ from those before, where the result is
            written over the values that were given. Whole blocks, of a large tensor.
        moves: whose values which rank got, as the meaning of the call says.
    """

    number: int
    op: str
    reduce: str | None = None
    root: int | None = None
    label: str | None = None
    group: str
    ranks: Sequence[int]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    places: Mapping[int, CallSite]
    before: Mapping[int, TensorGlance] = field(default_factory=dict)
    after: Mapping[int, TensorGlance] = field(default_factory=dict)
    changed: Mapping[int, list[tuple[int, int]]] = field(default_factory=dict)
    moves: Sequence[DataMove] = ()

    _repr_html_ = html_of

    @property
    def nbytes(self) -> int:
        """The bytes that move, between all ranks together."""
        return sum(move.nbytes for move in self.moves)

    def sent(self, rank: int) -> int:
        """The bytes of values of this rank that others got, counted for each of them."""
        return sum(move.nbytes for move in self.moves if move.src == rank)

    def received(self, rank: int) -> int:
        """The bytes of values of others that this rank got."""
        return sum(move.nbytes for move in self.moves if move.dst == rank)

    def __str__(self) -> str:
        return self.__rich__().plain

    def __repr__(self) -> str:
        return f"<SteppedCall {self.number}: {self.title}>"

    def __rich__(self) -> Text:
        """A head line, and a row for each rank; what has changed is bold."""
        lines = [Text(f"call {self.number}: {self.title}", style="bold")]
        if place := self._common_place():
            lines.append(Text(f"  at {_place_text(place)}", style="dim"))
        heads, rows = _table(self)
        columns = list(zip([Text(head, style="dim") for head in heads], *rows, strict=True))
        widths = [max(text.cell_len for text in column) + _GAP for column in columns]
        for cells in zip(*columns, strict=True):
            line = Text("  ")
            for cell, width in zip(cells, widths, strict=True):
                line.append_text(cell)
                line.append(" " * (width - cell.cell_len))
            line.rstrip()
            lines.append(line)
        return Text("\n").join(lines)

    def _common_place(self) -> CallSite | None:
        """The line of all ranks; None if they differ."""
        places = set(self.places.values())
        return places.pop() if len(places) == 1 else None

    @property
    def title(self) -> str:
        """The call in one line, without its number."""
        where = f"in group {self.group!r}"
        if self.op == "subgroup":
            members = ranks_text(self.shape)
            return f"{self.op} {self.label!r} of {members} {where} of {ranks_text(self.ranks)}"
        text = self.op if self.reduce is None else f"{self.op}({self.reduce})"
        if self.dtype is not None:
            text += f" {str(self.dtype).removeprefix('torch.')}"
            text += f"{list(self.shape)}" if self.shape else ""
        if self.is_message:
            sender, receiver = self.ranks
            return f"{text}, {self.label}, from rank {sender} to rank {receiver} {where}"
        if self.root is not None:
            text += f" {'from' if self.op in _FROM_ROOT else 'to'} rank {self.root}"
        if self.label is not None:
            text += f" of {self.label!r}"
        return f"{text} {where} of {ranks_text(self.ranks)}"

    @property
    def is_message(self) -> bool:
        """Whether one rank sends to another."""
        return self.op == "send"


def _table(call: SteppedCall) -> tuple[list[str], list[list[Text]]]:
    """Columns and rows, without columns in which nothing stands."""
    heads = ["", "before", "after", "gets", "at"]
    rows = []
    received, place = _received_texts(call), call._common_place()
    for rank in call.ranks:
        before, after = call.before.get(rank), call.after.get(rank)
        changed = call.changed.get(rank)
        result = Text() if after is None or not after.numel else after.text(changed or ())
        if changed == []:
            result = Text("unchanged", style="dim")
        rows.append(
            [
                Text(f"rank {rank}"),
                Text() if before is None else before.text(),
                result,
                Text(received[rank]),
                Text("" if place else _place_text(call.places[rank])),
            ]
        )
    shown = [i for i in range(len(heads)) if any(row[i].plain for row in rows)]
    if shown == [0]:  # nothing moves, and all ranks call it in the same line
        return [], []
    return [heads[i] for i in shown], [[row[i] for i in shown] for row in rows]


def _place_text(place: CallSite) -> str:
    """A line of code, with the path from the working directory if it is in there."""
    return str(place).removeprefix(os.path.join(os.getcwd(), ""))


def _received_texts(call: SteppedCall) -> dict[int, str]:
    """Such as ``8 B from each of ranks 0, 2``, by rank."""
    sizes: dict[int, dict[int, list[int]]] = {rank: {} for rank in call.ranks}
    for src, dst, nbytes in call.moves:
        sizes[dst].setdefault(nbytes, []).append(src)
    return {
        rank: ", ".join(
            f"{bytes_text(nbytes)} from {'each of ' if len(ranks) > 1 else ''}{ranks_text(ranks)}"
            for nbytes, ranks in of_rank.items()
        )
        for rank, of_rank in sizes.items()
    }


@view_of.register
def _(shown: SteppedCall) -> View:
    heads, rows = _table(shown)
    place = shown._common_place()
    table = TextTable(heads=heads, rows=[[text.plain for text in row] for row in rows])
    about = "" if place is None else f"at {_place_text(place)}"
    return View(
        title=f"Call {shown.number}: {shown.title}",
        facts=[(bytes_text(shown.nbytes), "move between ranks")],
        parts=[ViewPart(title="Ranks", about=about, content=table)],
    )
