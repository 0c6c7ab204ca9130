"""Curves and stacked areas over one axis, as HTML that fits any width without a script.

::

    unit                       [1] a legend, above the drawing
    0.4 ┤    ╱╲                [2] an SVG that is stretched to the width; strokes are not
    0.2 ┤╱╲╱    ╲              [3] texts are HTML, so that they keep their size
      0 └────────────
        0   20   40  step      [4] every second label goes where the page is narrow
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from html import escape

from echelon.page.colours import colour
from echelon.page.ticks import number_text, thinned, ticks

LONGEST = 600  # points of a curve; of more than that the highest and the lowest are kept
_TICK = 14  # pixels
_WIDTH = 1000.0  # of the SVG in its own unit; its height is in pixels


class Stroke(Enum):
    """How a curve is drawn."""

    LINE = "line"
    FAINT = "faint"
    DASHED = "dashed"
    DOTS = "dots"
    JOINED = "joined"  # dots with a line
    AREA = "area"  # stacked on the areas before it
    STEPS = "steps"  # an area that keeps each value until the next


_STACKED = (Stroke.AREA, Stroke.STEPS)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A sequence of points with a name.

    Attributes:
        name: in the legend.
        x: ascending where the curve is an area.
        y: None is a gap. Areas of one chart have the same ``x``.
        meaning: of its colour.
        stroke: how it is drawn.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    meaning: str
    stroke: Stroke = Stroke.LINE


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment on the axis, such as a restart.

    Attributes:
        x: where it is.
        name: what it is, in the legend; marks of one name have one entry.
        meaning: of its colour.
        is_small: a tick at the axis, for what happens often, instead of a line.
    """

    x: float
    name: str
    meaning: str
    is_small: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one axis.

    Attributes:
        curves: the later ones are drawn above the others.
        x_label: with its unit.
        y_label: with its unit.
        marks: moments, as vertical lines or ticks.
        from_zero: whether the axis of values begins at 0.
        height: of the drawing, in pixels.
    """

    curves: Sequence[Curve]
    x_label: str
    y_label: str
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    height: int = 240

    def html(self) -> str:
        """The chart as a part of a page with ``CHART_STYLE``."""
        scale = _Scale.of(self)
        if any(len(curve.y) > LONGEST for curve in self.curves if curve.stroke in _STACKED):
            return self._with_thinned_areas().html()
        curves = self.curves if len(self.curves) > 1 else ()  # of one the axis says what it is
        legend = "".join(
            f'<li><i class="{curve.stroke.value}" style="--c:{colour(curve.meaning)}"></i>'
            f"{escape(curve.name)}</li>"
            for curve in curves
            if curve.y
        ) + "".join(
            f'<li><i class="mark" style="--c:{colour(meaning)}"></i>{escape(name)}</li>'
            for name, meaning in {mark.name: mark.meaning for mark in self.marks}.items()
        )
        x_ticks, y_ticks = ticks(*scale.x, most=9), ticks(*scale.y, most=5)
        y_labels = "".join(
            f'<span style="top:{scale.down(y):.1f}px">{number_text(y)}</span>' for y in y_ticks
        )
        x_labels = "".join(
            f'<span style="left:{scale.right(x) / 10:.2f}%">{number_text(x)}</span>'
            for x in x_ticks
        )
        grid = "".join(
            f'<path class="grid" d="M0 {scale.down(y):.1f}H{_WIDTH:g}"/>' for y in y_ticks
        )
        shapes = "".join([*_shapes(self, scale)])
        label = escape(", ".join(curve.name for curve in self.curves) + f" over {self.x_label}")
        return (
            f'<div class="chart"><div class="unit">{escape(self.y_label)}</div>'
            f'<ul class="legend">{legend}</ul>'
            f'<div class="plot" style="height:{self.height}px"><div class="ys">{y_labels}</div>'
            f'<svg viewBox="0 0 {_WIDTH:g} {self.height}" preserveAspectRatio="none" role="img" '
            f'aria-label="{label}">{grid}{shapes}</svg></div>'
            f'<div class="xs">{x_labels}</div><div class="axis">{escape(self.x_label)}</div>'
            f"{self._points(scale)}</div>"
        )

    def _with_thinned_areas(self) -> Chart:
        """The same with fewer points in all areas, which must have theirs at the same places."""
        areas = [curve for curve in self.curves if curve.stroke in _STACKED]
        sums = [sum(y or 0.0 for y in column) for column in zip(*(a.y for a in areas), strict=True)]
        places = thinned(sums, LONGEST)
        thin = [
            replace(curve, x=[curve.x[i] for i in places], y=[curve.y[i] for i in places])
            if curve in areas
            else curve
            for curve in self.curves
        ]
        return replace(self, curves=thin)

    def _points(self, scale: _Scale) -> str:
        """The values, for the script that shows them under the pointer."""
        curves = []
        for curve in self.curves:
            places = thinned(curve.y)
            points = [curve.x[i] for i in places], [curve.y[i] for i in places]
            curves.append([curve.name, *([_short(value) for value in axis] for axis in points)])
        content = {"x": [_short(end) for end in scale.x], "of": self.x_label, "curves": curves}
        text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
        return f'<script type="application/json">{text}</script>'


@dataclass(frozen=True)
class _Scale:
    """From values to places in the SVG."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: int

    @classmethod
    def of(cls, chart: Chart) -> _Scale:
        xs = [x for curve in chart.curves for x in curve.x] + [mark.x for mark in chart.marks]
        ys = [
            y
            for curve in chart.curves
            if curve.stroke not in _STACKED
            for y in curve.y
            if y is not None
        ]
        areas = [curve.y for curve in chart.curves if curve.stroke in _STACKED]
        ys += [sum(y or 0.0 for y in column) for column in zip(*areas, strict=True)]
        if chart.from_zero or areas:
            ys.append(0.0)
        low, high = min(ys, default=0.0), max(ys, default=1.0)
        margin = 0.06 * (high - low) or abs(high) / 2 or 1.0
        bottom = low if (chart.from_zero or areas) and low == 0.0 else low - margin
        left, right = min(xs, default=0.0), max(xs, default=1.0)
        if left > 0.0 and left <= 0.1 * right:
            left = 0.0
        return cls(
            (left, right if right > left else left + 1.0), (bottom, high + margin), chart.height
        )

    def right(self, x: float) -> float:
        return _WIDTH * (x - self.x[0]) / (self.x[1] - self.x[0])

    def down(self, y: float) -> float:
        return self.height * (1 - (y - self.y[0]) / (self.y[1] - self.y[0]))


def _shapes(chart: Chart, scale: _Scale) -> Iterator[str]:
    base: list[float] | None = None
    for curve in chart.curves:
        paint = colour(curve.meaning)
        if curve.stroke in _STACKED:
            base = [0.0] * len(curve.y) if base is None else base
            top = [low + (y or 0.0) for low, y in zip(base, curve.y, strict=True)]
            yield f'<path style="fill:{paint}" d="{_area(curve, base, top, scale)}"/>'
            base = top
            continue
        kinds = {Stroke.JOINED: ("line", "dots")}.get(curve.stroke, (curve.stroke.value,))
        for kind in kinds:
            path = _path(curve, scale, is_dots=kind == "dots")
            yield f'<path class="{kind}" style="stroke:{paint}" d="{path}"/>'
    for mark in chart.marks:
        x, upper = scale.right(mark.x), chart.height - _TICK if mark.is_small else 0
        yield (
            f'<path class="mark" style="stroke:{colour(mark.meaning)}" '
            f'd="M{x:.1f} {upper}V{chart.height}"><title>{escape(mark.name)}</title></path>'
        )


def _path(curve: Curve, scale: _Scale, *, is_dots: bool) -> str:
    parts, is_open, last_x = [], False, -float("inf")
    for i in thinned(curve.y):
        x, y = curve.x[i], curve.y[i]
        if y is None:
            is_open = False
            continue
        # A curve that goes back, because steps were made again, begins anew.
        letter = "L" if is_open and not is_dots and x >= last_x else "M"
        parts.append(f"{letter}{scale.right(x):.1f} {scale.down(y):.1f}" + ("h0" * is_dots))
        is_open, last_x = True, x
    return "".join(parts)


def _area(curve: Curve, base: Sequence[float], top: Sequence[float], scale: _Scale) -> str:
    corners = []
    for edge in (top, base):
        points = [(scale.right(x), scale.down(y)) for x, y in zip(curve.x, edge, strict=True)]
        if curve.stroke is Stroke.STEPS:
            ends = [*[x for x, _ in points[1:]], *[x for x, _ in points[-1:]]]
            points = [(at, y) for (x, y), end in zip(points, ends, strict=True) for at in (x, end)]
        corners += points if edge is top else points[::-1]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners) + "Z" if corners else ""


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
