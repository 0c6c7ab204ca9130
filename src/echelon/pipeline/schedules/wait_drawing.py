"""Draws a circle of waits: as text for a terminal, and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from echelon.pipeline.schedules.action_lists import ActionLists
from echelon.pipeline.schedules.waits import Wait, WaitCause

HELD, AWAITED = "■", "□"
_NEIGHBOURS = 2  # actions that are drawn on both sides of a marked one
_ALWAYS_DRAWN = 12  # a list that is not longer is drawn whole

# Geometry of the SVG, in pixels.
_BOX, _ROW, _LEFT, _TOP, _CHAR, _PAD, _SPACE = 24, 96, 74, 34, 7, 9, 6


def circle_text(lists: ActionLists, circle: Sequence[Wait]) -> str:
    """The lists of the ranks in a circle with its actions marked, and the circle as a ladder."""
    return "\n".join([*_rows(lists, circle), "", *_ladder(lists, circle)])


def circle_in_short(circle: Sequence[Wait]) -> str:
    """The actions of a circle on one line.

    Example:
        >>> from echelon.pipeline.schedules.action_lists import read
        >>> from echelon.pipeline.schedules.waits import WaitRule, find_circle
        >>> lists = read("[... 0SendF1, 2RecvF0, 2F0]\\n[... 1SendF0, 1RecvF1, 1F1]")
        >>> print(circle_in_short(find_circle(lists, WaitRule.BLOCKING)))
        rank 0 at 0SEND_F1, rank 1 at 1SEND_F0
    """
    shown = [f"rank {wait.rank} at {wait.action}" for wait in circle[:4]]
    if len(circle) > len(shown):
        shown.append(f"{len(circle) - len(shown)} more")
    return ", ".join(shown)


# --- the lists -----------------------------------------------------------------------------------


def _marks(circle: Sequence[Wait]) -> dict[int, dict[int, str]]:
    """By rank and position: whether the action waits or is waited for."""
    marks: dict[int, dict[int, str]] = {}
    for wait in circle:
        marks.setdefault(wait.for_rank, {}).setdefault(wait.for_position, AWAITED)
        marks.setdefault(wait.rank, {})[wait.position] = HELD
    return dict(sorted(marks.items()))


def _drawn(length: int, marked: Sequence[int]) -> list[int | None]:
    """The positions of a list that are drawn; None where some are left out."""
    if length <= _ALWAYS_DRAWN:
        return list(range(length))
    near = sorted(
        {
            position
            for mark in marked
            for position in range(mark - _NEIGHBOURS, mark + _NEIGHBOURS + 1)
            if 0 <= position < length
        }
    )
    drawn: list[int | None] = [] if near[0] == 0 else [None]
    for before, position in zip([near[0] - 1, *near], near, strict=False):
        if position != before + 1:
            drawn.append(None)
        drawn.append(position)
    return drawn if near[-1] == length - 1 else [*drawn, None]


def _rows(lists: ActionLists, circle: Sequence[Wait]) -> list[str]:
    marks = _marks(circle)
    width = len(str(max(marks)))
    lines = []
    for rank, marked in marks.items():
        order = lists.orders[rank]
        actions, below = "", ""
        for position in _drawn(len(order), sorted(marked)):
            text = "…" if position is None else str(order[position])
            mark = marked.get(position, "") if position is not None else ""
            actions += f" {text}"
            below += f" {mark:<{len(text)}}"
        lines += [f"rank {rank:>{width}} │{actions}", f"{'':{width + 5}} │{below}".rstrip()]
    return [*lines, f"{'':{width + 5}}   {HELD} waits   {AWAITED} is waited for"]


# --- the ladder ----------------------------------------------------------------------------------


def _ladder(lists: ActionLists, circle: Sequence[Wait]) -> list[str]:
    """Two lines for each wait, with the way back at the side."""
    lines = []
    for number, wait in enumerate(circle):
        following = circle[(number + 1) % len(circle)]
        is_last = number == len(circle) - 1
        head, cause = _sentences(lists, wait, following)
        lines.append(f"{'┌─▶' if number == 0 else '│  '} {head}")
        lines.append(f"{'└──' if is_last else '│  '}     {cause}")
    return lines


def _sentences(lists: ActionLists, wait: Wait, following: Wait) -> tuple[str, str]:
    """Who waits where, and for what."""
    here = f"({lists.place(wait.rank, wait.position)})"
    there = f"{wait.for_action} ({lists.place(wait.for_rank, wait.for_position)})"
    if wait.cause is WaitCause.QUEUE:
        cause = f"behind {there}"
        if following.rank != wait.for_rank:
            cause += f", whose other end is {following.action} of rank {following.rank}"
        return f"rank {wait.rank} has {wait.action} {here} in its queue", cause
    head = f"rank {wait.rank} waits at {wait.action} {here}"
    if wait.cause is WaitCause.ARRIVE:
        return head, f"for its {there}"
    cause = f"for {there} of rank {wait.for_rank}"
    if (following.rank, following.position) != (wait.for_rank, wait.for_position):
        cause += f", which comes after {following.action}"
    return head, cause


# --- SVG -----------------------------------------------------------------------------------------


def circle_svg(lists: ActionLists, circles: Mapping[str, Sequence[Wait]]) -> str:
    """Circles under each other, each with its title: the lists of its ranks, and arrows.

    Args:
        lists: the actions.
        circles: by title.
    """
    y, width, parts = 0, 400, list[str]()
    for title, circle in circles.items():
        parts.append(f'<text x="4" y="{y + 17}" class="title">{escape(title)}</text>')
        y += _TOP
        boxes: dict[tuple[int, int], tuple[float, float]] = {}  # centre and top
        for rank, marked in _marks(circle).items():
            parts.append(f'<text x="4" y="{y + 16}" class="rank">rank {rank}</text>')
            x = _LEFT
            for position in _drawn(len(lists.orders[rank]), sorted(marked)):
                text = "…" if position is None else str(lists.orders[rank][position])
                length = len(text) * _CHAR + 2 * _PAD
                if position is not None:
                    boxes[rank, position] = x + length / 2, y
                    parts.append(_box(lists, rank, position, (x, y, length), marked))
                else:
                    parts.append(f'<text x="{x + length / 2}" y="{y + 16}" class="gap">…</text>')
                x += length + _SPACE
            width = max(width, x + 20)
            y += _ROW
        parts.extend(_arrow(boxes, wait) for wait in circle)
        y += _TOP - (_ROW - _BOX) // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" role="img">\n<style>text {{ font: 11px monospace; fill: #777 }} '
        ".title { font-weight: bold } .gap, .action { text-anchor: middle } "
        ".free { fill: none; stroke: #999 } .held { fill: #c8503c; stroke: #c8503c } "
        ".awaited { fill: none; stroke: #c8503c; stroke-width: 2 } .on { fill: #fff } "
        ".arrow { fill: none; stroke: #c8503c; stroke-width: 1.5 }</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#c8503c"/></marker></defs>'
        "\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _box(
    lists: ActionLists,
    rank: int,
    position: int,
    area: tuple[float, float, float],
    marked: Mapping[int, str],
) -> str:
    """One action, with its place as a tooltip."""
    x, y, length = area
    text = str(lists.orders[rank][position])
    mark = marked.get(position)
    meaning = {HELD: "held", AWAITED: "awaited", None: "free"}[mark]
    tip = f"rank {rank}: {text}, {lists.place(rank, position)}"
    colour = " on" if mark == HELD else ""
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x}" y="{y}" width="{length}" height="{_BOX}" '
        f'rx="3" class="{meaning}"/><text x="{x + length / 2}" y="{y + 16}" '
        f'class="action{colour}">{escape(text)}</text></g>'
    )


def _arrow(boxes: Mapping[tuple[int, int], tuple[float, float]], wait: Wait) -> str:
    """From the action that waits to the one that is waited for."""
    (x1, y1), (x2, y2) = boxes[wait.rank, wait.position], boxes[wait.for_rank, wait.for_position]
    if y1 == y2:
        bend = y1 + _BOX + 22
        start, end, middle = y1 + _BOX, y2 + _BOX, (bend, bend)
    else:
        down = y2 > y1
        start, end = (y1 + _BOX, y2) if down else (y1, y2 + _BOX)
        middle = ((start + end) / 2, (start + end) / 2)
    return (
        f'<path class="arrow" marker-end="url(#head)" d="M{x1} {start} C{x1} {middle[0]} '
        f'{x2} {middle[1]} {x2} {end}"/>'
    )
