"""Reads actions that other programs and people wrote: the text of each rank, with its places.

The forms, of which nobody has to say which it is:

==================  ============================================================================
CSV                 one row for each rank, as ``torch.distributed.pipelining`` writes it
lists               as Python prints them: ``[0F0, 0B0]``, one for each rank, also in one list or
                    in a dict by rank
lines by rank       ``rank 0: 0F0 0F1``, in any order of ranks
lines               one for each rank, with commas or spaces between actions
steps               the table that PyTorch logs when a schedule fails: a column for each rank
==================  ============================================================================

Nothing here says what an action means. A list inside the list of a rank is a batch, and so are
actions with ``+`` between them; ``...`` stands for actions that are left out.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, NoReturn

from echelon.errors import ArgumentError

MAX_NBYTES = 1 << 25  # some millions of actions, which need some gigabytes of memory
_MAX_RANK = 1 << 16
_MAX_DEPTH = 8
_MAX_SHOWN = 40  # characters of a text that an error repeats

# A rank's name stands at the start of a line, also behind the marks of a quotation or a list.
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v'"`]+)
    | (?P<newline>\n)
    | (?P<pair>\([^()\[\]{}\n]*;[^()\[\]{}\n]*\)[ \t]*[A-Za-z_]+)
    | (?P<key>[0-9]{1,9}[ \t'"]*:)
    | (?P<action>[0-9]+[A-Za-z_]+[0-9]*)
    | (?P<none>None\b)
    | (?P<label>\[?(?:pp[ \t_-]*)?rank[ \t_=\#-]*(?P<rank>[0-9]{1,9})(?![0-9A-Za-z_])[\] \t*]*
        (?:[:|=\u2502]|-?>|=>|-(?=[ \t]))?)
    | (?P<gap>\.{2,}|\u2026)
    | (?P<open>[\[({])
    | (?P<close>[\])}])
    | (?P<comma>,)
    | (?P<join>\+)
    | (?P<word>[0-9A-Za-z_]+)
    | (?P<other>.)""",
    re.VERBOSE | re.IGNORECASE,
)
_MARKS = re.compile(r"[ \t]*(?:[>*#-]+[ \t]+)+|[ \t]*```[a-z]*[ \t]*(?=\n|\Z)")
_STEPS_HEAD = re.compile(r"\s*rank[ ]?0(?:\s+rank[ ]?[0-9]+)*\s*", re.IGNORECASE)
_STEP = re.compile(r"\s*step[ ]?[0-9]+:", re.IGNORECASE)
_ERROR_MARK = "<-- ERROR HERE"
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class Cell(NamedTuple):
    """The text of one action.

    Attributes:
        text: as it was written.
        offset: where it stands in the whole text, in characters.
        batch: the number of its batch in the list of its rank; None if it is alone.
    """

    text: str
    offset: int
    batch: int | None


@dataclass(frozen=True, kw_only=True)
class ActionText:
    """The actions of all ranks as text, and where they stand.

    Attributes:
        text: the whole text.
        form: what the text is, in words.
        cells: by rank.
        gaps: the ranks whose list says that actions are left out.
    """

    text: str
    form: str
    cells: Sequence[Sequence[Cell]]
    gaps: frozenset[int]

    @cached_property
    def _line_starts(self) -> list[int]:
        return line_starts(self.text)

    def place(self, offset: int) -> str:
        """The place of a character in words."""
        return place_in(self._line_starts, offset)


class _Node(NamedTuple):
    """A token, or a list with what is in it."""

    kind: str
    text: str
    offset: int
    children: list[_Node]


def line_starts(text: str) -> list[int]:
    """The offset of the first character of each line."""
    return [0, *(match.end() for match in re.finditer("\n", text))]


def place_in(starts: Sequence[int], offset: int) -> str:
    """A place as people count: lines and columns from 1.

    Example:
        >>> place_in(line_starts("0F0,0B0\\n1F0,1B0"), 12)
        'line 2, column 5'
    """
    line = bisect_right(starts, offset)
    return f"line {line}, column {offset - starts[line - 1] + 1}"


def read_text(text: str) -> ActionText:
    """Take a text apart into the actions of each rank.

    Raises:
        ArgumentError: it is empty, or has something at a place where no action, list or rank can
            be; the message has the place.

    Example:
        >>> lists = read_text("rank 1: [... 1F0, 1SEND_F0]\\nrank 0: 0F0 0SEND_F0")
        >>> lists.form, sorted(lists.gaps)
        ('lines by rank', [1])
        >>> [[cell.text for cell in cells] for cells in lists.cells]
        [['0F0', '0SEND_F0'], ['1F0', '1SEND_F0']]
    """
    if len(text) > MAX_NBYTES:
        raise ArgumentError(
            f"the text has {len(text)} characters, more than {MAX_NBYTES}; give one step of the "
            "schedule, which repeats"
        )
    text = text.removeprefix("\ufeff")
    lines = text.split("\n")
    head = next((number for number, line in enumerate(lines) if line.strip(" \t\r`")), None)
    if head is None:
        raise ArgumentError("the text is empty: it has no action of any rank")
    if _STEPS_HEAD.fullmatch(lines[head]) and len(lines) > head + 1:
        later = next((line for line in lines[head + 1 :] if line.strip()), "")
        if _STEP.match(later):
            return _read_steps(text, lines, head)
    return _Reader(text).read()


def refuse(text: str, offset: int, problem: str) -> NoReturn:
    """Raise an error that begins with a place of the text."""
    raise ArgumentError(f"{place_in(line_starts(text), offset)}: {problem}")


def shown(text: str) -> str:
    """A text from a file as an error shows it: short, and without what a terminal would obey."""
    cut = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return cut if cut.isprintable() else ascii(cut)


def _read_steps(text: str, lines: list[str], head: int) -> ActionText:
    """Read the table with a row for each step and a column for each rank."""
    starts = line_starts(text)
    columns = [match.start() for match in re.finditer("rank", lines[head], re.IGNORECASE)]
    cells: list[list[Cell]] = [[] for _ in columns]
    for number, line in enumerate(lines[head + 1 :], head + 1):
        label = _STEP.match(line)
        if label is None:
            if line.strip(" \t\r`"):
                refuse(text, starts[number], f"{shown(line.strip())} is no step of the table")
            continue
        row = line.split(_ERROR_MARK)[0]
        for match in re.finditer(r"\([^()]*\)[A-Z_]+|\S+", row[label.end() :]):
            column = label.end() + match.start()
            rank = bisect_right(columns, column) - 1
            if rank < 0 or columns[rank] != column:
                refuse(
                    text,
                    starts[number] + column,
                    f"{shown(match[0])} stands under no rank's name; the columns of the table "
                    "must be as PyTorch prints them",
                )
            cells[rank].append(Cell(match[0], starts[number] + column, None))
    return ActionText(text=text, form="a table of steps", cells=cells, gaps=frozenset())


class _Reader:
    """Reads lists and lines."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self) -> ActionText:
        """The actions of each rank, whichever form they have."""
        nodes = self._nodes()
        inner = _content(nodes)
        if len(inner) == 1 and inner[0].kind == "list":  # a dict, or a list of lists
            children = _content(inner[0].children)
            if any(node.kind == "label" for node in children):
                nodes = inner[0].children
            elif children and all(node.kind == "list" for node in children):
                return self._with_cells("lists", [node.children for node in children])
        labels = [node for node in nodes if node.kind == "label"]
        # The agent of PyTorch writes [rank0]: before each line that a process prints.
        if labels and (len(labels) == 1 or len({node.text for node in labels}) > 1):
            return self._with_cells("lines by rank", self._labelled(nodes))
        nodes = [node for node in nodes if node.kind != "label"]
        inner = _content(nodes)
        if any(node.kind == "list" for node in inner):
            gap = next((node for node in nodes if node.kind == "gap"), None)
            if gap is not None and all(node.kind in ("list", "gap") for node in inner):
                refuse(self._text, gap.offset, "ranks are left out here; give the list of each")
            if all(node.kind == "list" for node in inner):
                return self._with_cells("lists", [node.children for node in inner])
        return self._with_cells(*self._by_lines(nodes))

    # --- the tree --------------------------------------------------------------------------------

    def _nodes(self) -> list[_Node]:
        """All tokens, with those between brackets in a list."""
        top: list[_Node] = []
        stack: list[_Node] = [_Node("list", "", 0, top)]
        for kind, text, offset in self._tokens():
            if kind == "open":
                if len(stack) > _MAX_DEPTH:
                    refuse(self._text, offset, f"{len(stack)} lists stand inside each other here")
                node = _Node("list", text, offset, [])
                stack[-1].children.append(node)
                stack.append(node)
            elif kind == "close":
                opened = stack.pop()
                if not stack or _CLOSING[opened.text] != text:
                    refuse(self._text, offset, f"{text} closes no list that is open here")
            else:
                stack[-1].children.append(_Node(kind, text, offset, []))
        if len(stack) > 1:
            refuse(
                self._text,
                stack[-1].offset,
                f"the list that begins here does not end with {_CLOSING[stack[-1].text]}; the text "
                "may be cut off",
            )
        return top

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        """What the text consists of, without spaces and quotation marks."""
        text, position, starts_line = self._text, 0, True
        while position < len(text):
            if starts_line:
                marks = _MARKS.match(text, position)
                position = marks.end() if marks is not None else position
                starts_line = False
            match = _TOKEN.match(text, position)
            if match is None:
                break
            kind, start, position = match.lastgroup or "", position, match.end()
            if kind == "newline":
                starts_line = True
            elif kind in ("label", "rank"):
                yield "label", str(int(match["rank"])), start
                continue
            elif kind == "key":
                yield "label", str(int(re.match("[0-9]+", match[0])[0])), start  # type: ignore[index]
                continue
            elif kind in ("space", "none"):
                continue
            elif kind in ("word", "other"):
                self._refuse_word(match[0], start, position)
            yield kind, match[0], start

    def _refuse_word(self, word: str, start: int, end: int) -> NoReturn:
        is_last = not self._text[end:].strip()
        hint = "; the text ends here and may be cut off" if is_last else ""
        refuse(
            self._text,
            start,
            f"{shown(word)} is no action; write stage, kind and microbatch, such as 2F0, 3SEND_B1, "
            f"0UNSHARD or (0F4;7B1)OVERLAP_F_B{hint}",
        )

    # --- the ranks -------------------------------------------------------------------------------

    def _labelled(self, nodes: list[_Node]) -> list[list[_Node]]:
        """The lists of ranks that are named, in the order of ranks."""
        rows: dict[int, list[_Node]] = {}
        places: dict[int, int] = {}
        row: list[_Node] | None = None
        label: _Node | None = None
        for node in nodes:
            if node.kind != "label":
                if row is not None:
                    row.append(node)
                elif node.kind not in ("newline", "comma"):
                    refuse(self._text, node.offset, "no rank is named before it, and others are")
                continue
            if row == [] and label is not None:  # [rank0]:rank 1: the second name is meant
                del rows[int(label.text)]
            rank, row, label = int(node.text), [], node
            if rank in rows:
                first = place_in(line_starts(self._text), places[rank])
                refuse(self._text, node.offset, f"rank {rank} has a list already, at {first}")
            if rank >= _MAX_RANK:
                refuse(self._text, node.offset, f"rank {rank} is too large; count ranks from 0")
            rows[rank], places[rank] = row, node.offset
        for rank in range(max(rows, default=-1) + 1):
            if rank not in rows:
                later = min(places[other] for other in rows if other > rank)
                refuse(self._text, later, f"there is a list for this rank and none for rank {rank}")
        return [_unwrapped(rows[rank]) for rank in sorted(rows)]

    def _by_lines(self, nodes: list[_Node]) -> tuple[str, list[list[_Node]]]:
        """One rank for each line that is not blank; a line of commas is a rank without actions."""
        rows: list[list[_Node]] = [[]]
        for node in nodes:
            if node.kind == "newline":
                rows.append([])
            else:
                rows[-1].append(node)
        rows = [row for row in rows if row]
        has_commas = any(node.kind == "comma" for node in nodes)
        is_csv = has_commas and all(_has_comma_between(row) for row in rows)
        return "CSV" if is_csv else "lines", [_unwrapped(row) for row in rows]

    def _with_cells(self, form: str, rows: list[list[_Node]]) -> ActionText:
        gaps = frozenset(
            rank for rank, row in enumerate(rows) if any(node.kind == "gap" for node in row)
        )
        cells = [self._cells(row) for row in rows]
        if not any(cells):
            raise ArgumentError("the text is empty: it has no action of any rank")
        return ActionText(text=self._text, form=form, cells=cells, gaps=gaps)

    def _cells(self, row: list[_Node]) -> list[Cell]:
        """The actions of one rank; those of a batch get its number."""
        cells: list[Cell] = []
        batches, joins = 0, False
        for node in row:
            if node.kind == "list":
                for member in _content(node.children):
                    if member.kind != "action":
                        refuse(self._text, member.offset, "a batch has only sends and receives")
                    cells.append(Cell(member.text, member.offset, batches))
                batches += 1
            elif node.kind == "join":
                if not cells or joins:
                    refuse(self._text, node.offset, "+ stands between two sends or receives")
                joins = True
            elif node.kind in ("action", "pair"):
                batch = None
                if joins:
                    if cells[-1].batch is None:
                        cells[-1] = cells[-1]._replace(batch=batches)
                        batches += 1
                    batch, joins = cells[-1].batch, False
                cells.append(Cell(node.text, node.offset, batch))
        if joins:
            refuse(self._text, row[-1].offset, "+ stands between two sends or receives")
        return cells


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


def _has_comma_between(row: list[_Node]) -> bool:
    """Whether no two actions of a line stand beside each other without a comma."""
    kinds = [node.kind for node in row]
    return all("comma" in pair or "join" in pair for pair in pairwise(kinds))
