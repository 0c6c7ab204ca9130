"""The drawings of the report: functions from recorded lines to figures of plotly."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

Line = dict[str, Any]

INK = "#1f2933"
MUTED = "#7b8794"
GRID = "#e8ecf1"
TRAIN = "#2f6fde"
VALIDATION = "#d9480f"
# One colour for each rank; they differ also for those who see few colours.
RANKS = ("#2f6fde", "#e8903a", "#1b9e8a", "#c2417f", "#7a5cc9", "#8a6d3b", "#4b5d73", "#b8a000")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def loss_figure(steps: Sequence[Line], evaluations: Sequence[Line], start: Line) -> go.Figure:
    """The training and validation loss over steps, and the references as lines."""
    unit = start.get("unit", "")
    suffix = f" {unit}" if unit else ""
    figure = go.Figure()
    x = [line["step"] for line in steps]
    losses = [line["loss"] for line in steps]
    hover = f"step %{{x}}<br>%{{y:.3f}}{suffix}<extra>%{{fullData.name}}</extra>"
    figure.add_scatter(
        x=x,
        y=losses,
        name="training, each step",
        mode="lines",
        line={"color": TRAIN, "width": 1},
        opacity=0.4,
        hovertemplate=hover,
    )
    figure.add_scatter(
        x=x,
        y=_smooth(losses),
        name="training, smoothed",
        mode="lines",
        line={"color": TRAIN, "width": 2.5},
        hovertemplate=hover,
    )
    figure.add_scatter(
        x=[line["step"] for line in evaluations],
        y=[line["loss"] for line in evaluations],
        name="validation",
        mode="lines+markers",
        line={"color": VALIDATION, "width": 2.5},
        marker={"size": 8},
        hovertemplate=hover,
    )
    last = max((line["step"] for line in [*steps, *evaluations]), default=1)
    for name, value in start.get("references", {}).items():
        figure.add_scatter(
            x=[0, last],
            y=[value, value],
            name=f"{name} ({value:.3f})",
            mode="lines",
            line={"color": MUTED, "width": 1.5, "dash": "dash"},
            hovertemplate=f"{name}<br>{value:.3f}{suffix}<extra></extra>",
        )
    figure.update_xaxes(title="step", rangemode="tozero")
    figure.update_yaxes(title=f"loss ({unit})" if unit else "loss")
    return _styled(figure, height=420)


def speed_figure(steps: Sequence[Line]) -> go.Figure:
    """The tokens per second of all ranks together, over time."""
    x = [line["time_s"] for line in steps]
    y = [line["tokens_per_s"] for line in steps]
    text = [line["step"] for line in steps]
    hover = "%{y:,.0f} tokens/s<br>step %{text}, after %{x:.1f} s<extra>%{fullData.name}</extra>"
    figure = go.Figure()
    figure.add_scatter(
        x=x,
        y=y,
        text=text,
        name="each step",
        mode="markers",
        marker={"color": TRAIN, "size": 4, "opacity": 0.35},
        hovertemplate=hover,
    )
    figure.add_scatter(
        x=x,
        y=[statistics.median(y[max(0, i - 10) : i + 11]) for i in range(len(y))],
        text=text,
        name="median of 21 steps",
        mode="lines",
        line={"color": TRAIN, "width": 2.5},
        hovertemplate=hover,
    )
    figure.update_xaxes(title="time since the start (s)", rangemode="tozero")
    figure.update_yaxes(title="tokens per second", rangemode="tozero", tickformat="~s")
    return _styled(figure, height=340)


def memory_figure(ranks: Sequence[Line]) -> go.Figure:
    """The peak bytes of each category, with a bar for each rank."""
    categories = dict.fromkeys(name for rank in ranks for name in rank["memory"])

    def peak(rank: Line, category: str) -> float:
        return float(rank["memory"].get(category, {}).get("peak", 0))

    used = [name for name in categories if any(peak(rank, name) for rank in ranks)]
    most = max((peak(rank, name) for rank in ranks for name in used), default=0)
    divisor, unit = _binary_unit(most)
    figure = go.Figure()
    for bar in _bars(ranks, used, lambda rank, name: peak(rank, name) / divisor):
        figure.add_bar(
            **bar,
            hovertemplate=f"%{{x}}<br>%{{y:,.2f}} {unit} at most<extra>%{{fullData.name}}</extra>",
            texttemplate="%{y:,.1f}" if len(ranks) <= len(RANKS) // 2 else None,
            textposition="outside",
            cliponaxis=False,
        )
    figure.update_yaxes(title=f"peak memory ({unit})", rangemode="tozero")
    figure.update_layout(barmode="group", bargap=0.4, bargroupgap=0.06)
    return _styled(figure, height=320)


def memory_over_time_figure(line: Line) -> go.Figure:
    """The bytes of each category during one step, stacked."""
    series = line["nbytes"]
    sums = [sum(column) for column in zip(*series.values(), strict=True)]
    divisor, unit = _binary_unit(max(sums, default=0))
    figure = go.Figure()
    for i, (name, nbytes) in enumerate(series.items()):
        colour = RANKS[i % len(RANKS)]
        figure.add_scatter(
            x=[1e3 * seconds for seconds in line["time_s"]],
            y=[value / divisor for value in nbytes],
            name=name,
            mode="lines",
            line={"color": colour, "width": 1, "shape": "hv"},
            stackgroup="memory",
            hovertemplate=f"%{{y:,.2f}} {unit}<extra>%{{fullData.name}}</extra>",
        )
    figure.update_xaxes(title="time since the step began (ms)", rangemode="tozero")
    figure.update_yaxes(title=f"memory ({unit})", rangemode="tozero")
    figure.update_layout(hovermode="x unified")
    return _styled(figure, height=340)


# The names and colours of the actions of a pipeline, by the letter in their text.
ACTIONS = {
    "F": ("forward", "#2f6fde"),
    "B": ("backward", "#e8903a"),
    "I": ("gradients of inputs", "#e8c23a"),
    "W": ("gradients of weights", "#1b9e8a"),
}


def timelines_figure(line: Line) -> go.Figure:
    """The timelines, one below the other, with a row for each rank and a bar for each action."""
    figure = go.Figure()
    bars: dict[str, list[tuple[list[str], str, float, float]]] = {}  # by letter
    for name, steps in line["timelines"].items():
        for rank, what, start, end in steps:
            letter = next((char for char in what if char in ACTIONS), "F")
            bars.setdefault(letter, []).append(([name, f"rank {rank}"], what, start, end))
    for letter, (meaning, colour) in ACTIONS.items():
        spans = bars.get(letter, [])
        if not spans:
            continue
        rows, texts, starts, ends = zip(*spans, strict=True)
        figure.add_bar(
            orientation="h",
            y=list(zip(*rows, strict=True)),
            base=[1e3 * start for start in starts],
            x=[1e3 * (end - start) for start, end in zip(starts, ends, strict=True)],
            text=texts,
            name=meaning,
            marker={"color": colour},
            textposition="none",
            hovertemplate="%{text}: %{base:,.3f} ms, for %{x:,.3f} ms<extra></extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.15)
    figure.update_xaxes(title="time since the step began (ms)", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    num_rows = len({(*row,) for spans in bars.values() for row, *_ in spans})
    return _styled(figure, height=140 + 26 * num_rows)


def comm_figure(ranks: Sequence[Line]) -> go.Figure:
    """The calls, bytes and seconds waited of each operation, with a bar for each rank."""
    operations = list(dict.fromkeys(op for rank in ranks for op in rank["comm"]))
    most = max((t["nbytes"] for rank in ranks for t in rank["comm"].values()), default=0)
    divisor, unit = _binary_unit(most)
    panels: tuple[tuple[str, str, float, str], ...] = (
        ("calls", "calls", 1, "%{x:,.0f} calls"),
        (f"volume ({unit})", "nbytes", divisor, f"%{{x:,.2f}} {unit}"),
        ("time waited (s)", "wait_s", 1, "%{x:,.3f} s"),
    )
    figure = make_subplots(
        rows=1,
        cols=len(panels),
        shared_yaxes=True,
        horizontal_spacing=0.05,
        subplot_titles=[title for title, *_ in panels],
    )
    for column, (_, field, scale, shown) in enumerate(panels, start=1):

        def value(rank: Line, op: str, field: str = field, scale: float = scale) -> float:
            return float(rank["comm"].get(op, {}).get(field, 0)) / scale

        for bar in _bars(ranks, operations, value):
            bar["x"], bar["y"] = bar["y"], bar["x"]
            figure.add_bar(
                **bar,
                orientation="h",
                legendgroup=bar["name"],
                showlegend=column == 1,
                hovertemplate=f"%{{y}}<br>{shown}<extra>%{{fullData.name}}</extra>",
                row=1,
                col=column,
            )
    figure.update_xaxes(rangemode="tozero", nticks=5)
    figure.update_yaxes(ticksuffix="  ", autorange="reversed")  # the first at the top
    figure.update_layout(barmode="group", bargap=0.35, bargroupgap=0.06)
    bars = len(operations) * min(len(ranks), 3 if len(ranks) > len(RANKS) else len(ranks))
    return _styled(figure, height=max(240, 150 + 22 * bars), legend_y=-44)


def _bars(
    ranks: Sequence[Line], names: Sequence[str], value: Callable[[Line, str], float]
) -> list[Line]:
    """A series of bars for each rank; for many ranks the lowest, the median and the highest."""
    if len(ranks) <= len(RANKS):
        return [
            {
                "x": list(names),
                "y": [value(rank, name) for name in names],
                "name": rank.get("title", f"rank {rank['rank']}"),
                "marker": {"color": RANKS[i]},
            }
            for i, rank in enumerate(ranks)
        ]
    values = {name: sorted(value(rank, name) for rank in ranks) for name in names}
    kinds = (("lowest rank", 0), ("median rank", len(ranks) // 2), ("highest rank", -1))
    return [
        {
            "x": list(names),
            "y": [values[name][position] for name in names],
            "name": kind,
            "marker": {"color": RANKS[i]},
        }
        for i, (kind, position) in enumerate(kinds)
    ]


def _smooth(values: Sequence[float | None]) -> list[float | None]:
    """The mean over a window centred at each step; the window is smaller at both ends."""
    reach = max(2, len(values) // 60)
    smooth: list[float | None] = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        known = [value for value in values[i - near : i + near + 1] if value is not None]
        smooth.append(statistics.fmean(known) if known else None)
    return smooth


def _binary_unit(nbytes: float) -> tuple[float, str]:
    """The divisor and the name of the largest unit of which ``nbytes`` has at least one."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return float(1024**power), unit
    return 1.0, "bytes"


def _styled(figure: go.Figure, *, height: int, legend_y: float | None = None) -> go.Figure:
    """Give a figure the common style: light, few lines, the legend above the drawing."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 64, "r": 24, "t": 44, "b": 44},
        font={"family": FONT, "size": 13, "color": INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"bgcolor": "white", "font": {"family": FONT, "size": 13}},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.04, "yanchor": "bottom"},
    )
    if legend_y is not None:  # below the axes, because titles stand above them
        figure.update_layout(
            legend={"y": legend_y / height, "yanchor": "top"},
            margin={"t": 40, "b": 84},
        )
    axes = {"gridcolor": GRID, "zeroline": False, "title_standoff": 10, "automargin": True}
    # Ticks that cannot be seen keep the labels off the axes.
    figure.update_xaxes(**axes, ticks="outside", ticklen=5, tickcolor="rgba(0,0,0,0)")
    figure.update_yaxes(**axes, ticks="outside", ticklen=5, tickcolor="rgba(0,0,0,0)")
    return figure
