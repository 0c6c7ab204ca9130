"""The picture of who has which bytes: one bar for each buffer, cut into ranges with an owner.

::

    blocks.0  |0000000000000000|1111111111111111|        a box is a range; its colour is its owner

"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from echelon.page.view import Picture, bytes_text

# Of owners in turn. White text can be read on each, and each on a light and on a dark ground.
OWNER_COLOURS = ("#3b74b8", "#c4622d", "#3f8f5b", "#8a5fb0", "#b5487a", "#8a7a2c", "#2f8d94")
SHARED_COLOUR = "#76808c"  # of what all ranks have

# Geometry of the SVG, in pixels.
WIDTH, LEFT, ROW, GAP = 920, 190, 20, 6
TEXT_CHARS = 60  # the width of the longest bar in the text


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A range of a buffer.

    Attributes:
        label: what it is, such as ``weight[0:8]``.
        nbytes: its length.
        owner: the rank that has it; None: all ranks.
    """

    label: str
    nbytes: int
    owner: int | None


@dataclass(frozen=True, kw_only=True)
class OwnedBuffer:
    """One bar of the picture.

    Attributes:
        name: of the buffer.
        extents: its ranges, in order.
    """

    name: str
    extents: Sequence[Extent]

    @property
    def nbytes(self) -> int:
        """Its length."""
        return sum(extent.nbytes for extent in self.extents)


def ownership(buffers: Sequence[OwnedBuffer]) -> Picture:
    """Draw buffers, the longest over the whole width, with the ranges' labels as tooltips.

    Example:
        >>> half = [Extent(label="w", nbytes=8, owner=rank) for rank in range(2)]
        >>> print(ownership([OwnedBuffer(name="layer", extents=half)]).text)
        layer  |000000000000000000000000000000|111111111111111111111111111111|  16 B
    """
    longest = max((buffer.nbytes for buffer in buffers), default=0) or 1
    return Picture(svg=_svg(buffers, longest), text=_text(buffers, longest))


def _text(buffers: Sequence[OwnedBuffer], longest: int) -> str:
    width = max((len(buffer.name) for buffer in buffers), default=0)
    lines = []
    for buffer in buffers:
        cells, start = "", 0
        for owner, nbytes in _runs(buffer):
            end = start + nbytes
            num_chars = round(end / longest * TEXT_CHARS) - round(start / longest * TEXT_CHARS)
            mark = "*" if owner is None else str(owner)
            cells += "|" + (mark * TEXT_CHARS)[: max(1, num_chars)]
            start = end
        lines.append(f"{buffer.name:<{width}}  {cells}|  {bytes_text(buffer.nbytes)}")
    return "\n".join(lines)


def _runs(buffer: OwnedBuffer) -> list[tuple[int | None, int]]:
    """Owners and lengths, with neighbours of one owner joined."""
    runs: list[tuple[int | None, int]] = []
    for extent in buffer.extents:
        if runs and runs[-1][0] == extent.owner:
            runs[-1] = (extent.owner, runs[-1][1] + extent.nbytes)
        elif extent.nbytes:
            runs.append((extent.owner, extent.nbytes))
    return runs


def _svg(buffers: Sequence[OwnedBuffer], longest: int) -> str:
    scale, y, parts = (WIDTH - LEFT - 90) / longest, 2, list[str]()
    for buffer in buffers:
        name = buffer.name if len(buffer.name) <= 28 else f"…{buffer.name[-27:]}"
        parts.append(
            f'<text x="0" y="{y + 14}" fill="currentColor" font-size="12">{escape(name)}</text>'
        )
        x = float(LEFT)
        for extent in buffer.extents:
            parts.append(_box(extent, x, y, extent.nbytes * scale))
            x += extent.nbytes * scale
        parts.append(
            f'<text x="{x + 6:.1f}" y="{y + 14}" fill="currentColor" opacity="0.7" '
            f'font-size="12">{bytes_text(buffer.nbytes)}</text>'
        )
        y += ROW + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" '
        f'height="{y}" role="img" font-family="sans-serif">\n' + "\n".join(parts) + "\n</svg>"
    )


def _box(extent: Extent, x: float, y: int, width: float) -> str:
    if not extent.nbytes:
        return ""
    who = "all ranks" if extent.owner is None else f"rank {extent.owner}"
    colour = (
        SHARED_COLOUR if extent.owner is None else OWNER_COLOURS[extent.owner % len(OWNER_COLOURS)]
    )
    text = "all" if extent.owner is None else str(extent.owner)
    shown = (
        f'<text x="{x + width / 2:.1f}" y="{y + 14}" fill="#fff" font-size="11" '
        f'text-anchor="middle">{text}</text>'
        if width > 10 + 7 * len(text)
        else ""
    )
    tip = escape(f"{extent.label}: {who}, {bytes_text(extent.nbytes)}")
    return (
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{y}" width="{max(0.5, width - 1):.2f}" '
        f'height="{ROW}" rx="2" fill="{colour}"/>{shown}</g>'
    )
