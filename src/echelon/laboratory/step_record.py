"""``StepRecord``: what a rank sends in a block, and how much memory its tensors have over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor, nn

from echelon import checks, events
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from echelon.laboratory.allocations import Allocations
from echelon.modules.sharded_tensor import memory_of_gradient
from echelon.page import Picture, TextTable, View, ViewPart, bytes_text, html_of, view_of

# Calls that move no values of this rank.
SENDS_NOTHING = {"recv", "subgroup", "window"}
_MOST_ROWS = 40
_COLUMNS, _LEVELS = 72, " ▁▂▃▄▅▆▇█"  # of the text
_WIDTH, _HEIGHT, _LEFT = 920, 120, 84  # of the SVG, in pixels


class RecordedCall(NamedTuple):
    """A communication call of this rank.

    Attributes:
        op: the name of the method, such as ``all_reduce``.
        nbytes: the size of the tensor that the call is about.
        label: what is communicated, in the words of who called; None without.
        after: how many operations on tensors the rank had done.
    """

    op: str
    nbytes: int
    label: str | None
    after: int


@final
class StepRecord:
    """Records what this rank sends in a block, and the memory of its tensors over it.

    Memory is that of the storages which the thread of the block uses, from the first operation with
    them to their end, and of what is ``held`` from the start. What a group allocates to move values
    is not counted, nor is workspace inside of an operation. Nothing depends on clocks: two runs of
    a deterministic step have the same record.

    Args:
        world: the world of this rank.
        held: modules, optimizers, tensors, and lists, tuples or dicts of them, whose memory counts
            from the start.

    Attributes:
        calls: the calls in order.
        memory: the bytes at the start, and after each operation.

    Raises:
        ArgumentError: ``held`` has something else, or the world is none.
        StateError: the block is entered for a second time.

    Example:
        >>> from echelon.launch.run import run
        >>> def main(world):
        ...     weight = torch.ones(4)
        ...     with StepRecord(world, weight) as record:
        ...         gradient = 2 * weight
        ...         world.group.all_reduce(gradient, "mean")
        ...         weight -= gradient
        ...     return record.sent_nbytes, record.peak_nbytes, record.calls[0].op
        >>> run(main, 2)
        [(16, 32, 'all_reduce'), (16, 32, 'all_reduce')]
    """

    _repr_html_ = html_of

    def __init__(self, world: World, *held: Any) -> None:
        checks.instance("world", world, World)
        self._rank = world.rank
        self.memory: list[int] = []
        self._allocations = Allocations(self.memory.append)
        for tensor in _tensors(held):
            self._allocations.add(tensor)
        self.calls: list[RecordedCall] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.memory:
            raise StateError("a StepRecord records one block: make another for another step")
        self.memory.append(self._allocations.nbytes)
        self._stack.enter_context(events.listen(self._hear))
        self._stack.enter_context(self._allocations)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        self.memory.append(self._allocations.nbytes)

    def _hear(self, event: events.Event) -> None:
        facts = event.facts
        if event.name != "collective.issue" or facts["rank"] != self._rank:
            return
        if facts["op"] not in SENDS_NOTHING:
            after = len(self.memory) - 1
            call = RecordedCall(facts["op"], facts["nbytes"], facts["label"], after)
            self.calls.append(call)

    @property
    def sent_nbytes(self) -> int:
        """The sum of the sizes of the calls' tensors, in bytes; 0 of a barrier."""
        return sum(call.nbytes for call in self.calls)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of tensors at a time, with those that are held from the start."""
        return max(self.memory, default=0)

    def __repr__(self) -> str:
        return (
            f"<StepRecord of rank {self._rank}: {len(self.calls)} calls, "
            f"{bytes_text(self.sent_nbytes)} sent, peak {bytes_text(self.peak_nbytes)}>"
        )


def _tensors(held: Any) -> Iterator[Tensor]:
    """The tensors of modules, optimizers and collections."""
    if isinstance(held, Tensor):
        yield held
        if held.grad is not None:
            yield from memory_of_gradient(held.grad)
    elif isinstance(held, nn.Module):
        yield from _tensors([*held.parameters(), *held.buffers()])
    elif isinstance(held, torch.optim.Optimizer):
        states = [value for state in held.state.values() for value in state.values()]
        yield from _tensors([value for value in states if isinstance(value, Tensor)])
    elif isinstance(held, Mapping):
        yield from _tensors(list(held.values()))
    elif isinstance(held, list | tuple):
        for item in held:
            yield from _tensors(item)
    else:
        raise ArgumentError(
            f"held has {held!r:.80}, a {type(held).__name__}; give modules, optimizers, tensors, "
            "or lists, tuples or dicts of them"
        )


@view_of.register
def _(shown: StepRecord) -> View:
    totals: dict[tuple[str, str], list[int]] = {}
    for call in shown.calls:
        row = totals.setdefault((call.op, call.label or ""), [0, 0])
        row[0] += 1
        row[1] += call.nbytes
    rows = [
        [op, str(count), bytes_text(nbytes), label]
        for (op, label), (count, nbytes) in list(totals.items())[:_MOST_ROWS]
    ]
    more = "" if len(totals) <= _MOST_ROWS else f"The first {_MOST_ROWS} of {len(totals)}."
    return View(
        title=f"A step of rank {shown._rank}",
        facts=[
            (str(len(shown.calls)), "calls"),
            (bytes_text(shown.sent_nbytes), "sent"),
            (bytes_text(shown.peak_nbytes), "of tensors at most"),
        ],
        parts=[
            ViewPart(
                title="Sent",
                about=more,
                content=TextTable(heads=["call", "how often", "bytes", "of"], rows=rows),
            ),
            ViewPart(
                title="Memory of tensors",
                about="Operations run to the right; a line is drawn where a call was issued.",
                content=_curve(shown.memory, [call.after for call in shown.calls]),
            ),
        ],
    )


def _curve(memory: list[int], marks: Iterable[int]) -> Picture:
    """Bytes over operations, as an area and as a row of blocks."""
    peak = max(memory, default=0) or 1
    last = max(1, len(memory) - 1)
    columns = min(_COLUMNS, len(memory))
    tops = [
        max(memory[i * len(memory) // columns : (i + 1) * len(memory) // columns])
        for i in range(columns)
    ]
    bars = "".join(_LEVELS[round(top / peak * (len(_LEVELS) - 1))] for top in tops)
    text = f"|{bars}| at most {bytes_text(max(memory, default=0))}"

    def at(index: int) -> float:
        return _LEFT + index / last * (_WIDTH - _LEFT - 8)

    points = [f"{at(0):.1f},{_HEIGHT}"]
    for index, nbytes in enumerate(memory):
        y = _HEIGHT - nbytes / peak * (_HEIGHT - 12)
        points += [f"{at(index):.1f},{y:.1f}"]
    points.append(f"{at(last):.1f},{_HEIGHT}")
    lines = "".join(
        f'<line x1="{at(mark):.1f}" x2="{at(mark):.1f}" y1="8" y2="{_HEIGHT}" stroke="#c4622d"/>'
        for mark in sorted(set(marks))
    )
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + 4}" '
        f'width="{_WIDTH}" height="{_HEIGHT + 4}" role="img" font-family="sans-serif" '
        f'font-size="12" fill="currentColor">\n<text x="0" y="16">{bytes_text(peak)}</text>'
        f'<text x="0" y="{_HEIGHT}">0 B</text>\n<polygon points="{" ".join(points)}" '
        f'fill="#3b74b8" fill-opacity="0.6"/>\n{lines}\n</svg>'
    )
    return Picture(svg=svg, text=text)
