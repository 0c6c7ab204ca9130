"""The drawings of a run over its steps and over time: functions from a recorded run to a chart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from echelon.observe.phases import PHASES
from echelon.observe.recorded_run import Line, RecordedRun
from echelon.page import Chart, Curve, Mark, Stroke

_STRETCHES = 120  # of the figure of phases, at most

# What the categories of memory that are recorded mean, for their colours.
CATEGORIES = {
    "parameters": "parameters",
    "shards": "parameters",
    "whole parameters": "gathered",
    "gathered": "gathered",
    "gradients": "gradients",
    "optimizer state": "state",
    "optimizer": "state",
    "slots": "communication",
    "gradients under way": "communication",
    "buckets": "communication",
    "buffers": "buffers",
}

PHASE_NAMES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "waiting for others",
    "saving": "saving",
    "other": "other code",
    "idle": "no processor",
}


def meaning_of(category: str) -> str:
    """The meaning of a category of memory, for its colour."""
    return CATEGORIES.get(category, "communication" if "bucket" in category else "other")


def loss_chart(run: RecordedRun) -> Chart:
    """The training and validation loss over steps, and the references as lines."""
    steps = [line["step"] for line in run.steps]
    curves = [
        Curve(
            name="training, each step",
            x=steps,
            y=[line["loss"] for line in run.steps],
            meaning="curve",
            stroke=Stroke.FAINT,
        ),
        Curve(
            name="training, smoothed",
            x=[line["step"] for line in run.kept],
            y=smoothed([line["loss"] for line in run.kept]),
            meaning="curve",
        ),
        Curve(
            name="validation",
            x=[line["step"] for line in run.evaluations],
            y=[line["loss"] for line in run.evaluations],
            meaning="second",
            stroke=Stroke.JOINED,
        ),
    ]
    last = max((line["step"] for line in [*run.steps, *run.evaluations]), default=1)
    for name, value in run.start["references"].items():
        curves.append(
            Curve(
                name=f"{name} ({value:.3f})",
                x=[0, last],
                y=[value, value],
                meaning="other",
                stroke=Stroke.DASHED,
            )
        )
    return Chart(
        curves=curves,
        x_label="step",
        y_label=f"loss ({run.unit})" if run.unit else "loss",
        marks=marks_over_steps(run),
        height=300,
    )


def speed_chart(run: RecordedRun) -> Chart:
    """The tokens per second of all ranks together, over time, with what interrupted them."""
    x = [line["time_s"] for line in run.steps]
    y = [line["tokens_per_s"] for line in run.steps]
    medians = running_median(y)
    # Between the attempts of a job that was restarted there were no steps.
    gaps = {sum(time_s <= restart.time_s for time_s in x) for restart in run.restarts}
    unit, factor = "tokens per second", 1.0
    if run.utilization is not None:
        unit, factor = "utilization (%)", 100 * run.utilization
    curves = [
        Curve(
            name="each step",
            x=x,
            y=[factor * value for value in y],
            meaning="other",
            stroke=Stroke.DOTS,
        ),
        Curve(
            name="median of 21 steps",
            x=x,
            y=[None if i in gaps else factor * value for i, value in enumerate(medians)],
            meaning="curve",
        ),
    ]
    return Chart(
        curves=curves,
        x_label="time since the start (s)",
        y_label=unit,
        marks=marks_over_time(run),
        from_zero=True,
    )


def values_charts(run: RecordedRun) -> list[tuple[str, Chart]]:
    """A chart of each further number that the script has recorded, with its name."""
    known = {"kind", "step", "time_s", "loss", "tokens_per_s", "process_peak", "memory", "phases"}
    names = dict.fromkeys(name for line in run.steps for name in line if name not in known)
    charts = []
    for name in names:
        values = [line.get(name) for line in run.steps]
        if not any(isinstance(value, int | float) for value in values):
            continue
        title = name.replace("_", " ")
        curve = Curve(
            name=title,
            x=[line["step"] for line in run.steps],
            y=[value if isinstance(value, int | float) else None for value in values],
            meaning="curve",
        )
        charts.append(
            (
                title,
                Chart(curves=[curve], x_label="step", y_label=title, height=170, from_zero=True),
            )
        )
    return charts


def memory_chart(run: RecordedRun) -> Chart | None:
    """The bytes that rank 0 held after each step, by category; None if nothing was measured."""
    lines = [line for line in run.kept if line.get("memory")]
    names = dict.fromkeys(name for line in lines for name in line["memory"])
    used = [name for name in names if any(line["memory"].get(name) for line in lines)]
    if not used:
        return None
    nbytes = {name: [line["memory"].get(name, 0) for line in lines] for name in used}
    divisor, unit = binary_unit(max(map(sum, zip(*nbytes.values(), strict=True))))
    return Chart(
        curves=_areas([line["step"] for line in lines], nbytes, divisor, Stroke.AREA),
        x_label="step",
        y_label=f"memory ({unit})",
        marks=marks_over_steps(run),
        from_zero=True,
    )


def memory_of_step_chart(line: Line) -> Chart:
    """The bytes of each category during one step, stacked."""
    nbytes = {name: values for name, values in line["nbytes"].items() if any(values)}
    mapped = [] if nbytes.keys() & {"gathered", "whole parameters"} else _mapped(line)
    sums = [*map(sum, zip(*nbytes.values(), strict=True)), *(value for _, value in mapped)]
    divisor, unit = binary_unit(max(sums, default=0))
    curves = _areas([1e3 * s for s in line["time_s"]], nbytes, divisor, Stroke.STEPS)
    if mapped:
        curves.append(
            Curve(
                name="gathered units, mapped: no memory of this rank",
                x=[1e3 * seconds for seconds, _ in mapped],
                y=[value / divisor for _, value in mapped],
                meaning="gathered",
            )
        )
    return Chart(
        curves=curves,
        x_label="time since the step began (ms)",
        y_label=f"memory ({unit})",
        from_zero=True,
    )


def _mapped(line: Line) -> list[tuple[float, float]]:
    """The corners of the bytes of gathered units over a step."""
    changes = [(start, nbytes) for _, start, _, nbytes in line.get("units", [])]
    changes += [(end, -nbytes) for _, _, end, nbytes in line.get("units", [])]
    corners, total = [(0.0, 0.0)] if changes else [], 0.0
    for seconds, change in sorted(changes):
        corners.append((seconds, total))
        total += change
        corners.append((seconds, total))
    return corners


def phases_chart(run: RecordedRun) -> Chart | None:
    """What rank 0 spent its time on, in each stretch of the run; None if nothing was measured."""
    lines = [line for line in run.kept if line.get("phases")]
    if len(lines) < 2:
        return None
    size = -(-len(lines) // _STRETCHES)
    stretches = [lines[i : i + size] for i in range(0, len(lines), size)]
    totals = [sum(sum(line["phases"].values()) for line in stretch) for stretch in stretches]
    shares = {
        phase: [
            100 * sum(line["phases"].get(phase, 0.0) for line in stretch) / total
            for stretch, total in zip(stretches, totals, strict=True)
        ]
        for phase in PHASES
    }
    return Chart(
        curves=[
            Curve(
                name=PHASE_NAMES[phase],
                x=[stretch[0]["step"] for stretch in stretches],
                y=values,
                meaning=phase,
                stroke=Stroke.AREA,
            )
            for phase, values in shares.items()
            if any(values)
        ],
        x_label="step",
        y_label="share of the time (%)",
        marks=marks_over_steps(run),
        from_zero=True,
    )


def marks_over_steps(run: RecordedRun) -> list[Mark]:
    """Restarts and saves, by step."""
    restarts = [restart.step for restart in run.restarts if restart.step is not None]
    return _marks([save["step"] for save in run.saves], restarts)


def marks_over_time(run: RecordedRun) -> list[Mark]:
    """Restarts and saves, by second."""
    return _marks(
        [save["time_s"] for save in run.saves], [restart.time_s for restart in run.restarts]
    )


def _marks(saves: Sequence[float], restarts: Sequence[float]) -> list[Mark]:
    ticks = [Mark(x=x, name="checkpoint saved", meaning="saving", is_small=True) for x in saves]
    return [*ticks, *(Mark(x=x, name="restart", meaning="second") for x in restarts)]


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """The mean of the values so far, in which a value counts less the older it is.

    It uses no value that follows, so it has the same meaning at the end as before. The weights are
    those of about a twentieth of the values.
    """
    decay = 1 - 2 / (max(3.0, min(100.0, len(values) / 20)) + 1)
    total = weight = 0.0
    means: list[float | None] = []
    for value in values:
        if value is not None:
            total, weight = decay * total + value, decay * weight + 1.0
        means.append(total / weight if weight else None)
    return means


def running_median(values: Sequence[float]) -> list[float]:
    """The median of 21 values around each, of fewer at the ends."""
    return [statistics.median(values[max(0, i - 10) : i + 11]) for i in range(len(values))]


def binary_unit(nbytes: float) -> tuple[float, str]:
    """The divisor and the name of the largest unit of which ``nbytes`` has at least one."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return float(1024**power), unit
    return 1.0, "bytes"


def _areas(
    x: Sequence[float], nbytes: dict[str, list[float]], divisor: float, stroke: Stroke
) -> list[Curve]:
    return [
        Curve(
            name=name,
            x=x,
            y=[value / divisor for value in values],
            meaning=meaning_of(name),
            stroke=stroke,
        )
        for name, values in nbytes.items()
    ]
