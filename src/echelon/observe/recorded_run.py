"""The lines of a ``metrics.jsonl`` by kind, attempts of a restarted job on one clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from echelon.errors import ArgumentError
from echelon.observe.metrics import check_run

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The launcher has started the job again.

    Attributes:
        step: the last one before it that the job went on from; None if no step followed yet.
        time_s: since the first start.
    """

    step: int | None
    time_s: float


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What is known of a run. Seconds count from its first start.

    Attributes:
        start: the first line.
        steps: of all attempts, those that were made again included.
        kept: the last of each step that was made several times, in order.
        evaluations: losses of validation.
        saves: checkpoints.
        restarts: in order.
        of_kind: all lines, by kind.
    """

    start: Line
    steps: Sequence[Line]
    kept: Sequence[Line]
    evaluations: Sequence[Line]
    saves: Sequence[Line]
    restarts: Sequence[Restart]
    of_kind: dict[str, list[Line]] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Sequence[Line], source: str = "metrics.jsonl") -> Self:
        """Read what the lines of a file say.

        Raises:
            ArgumentError: they are not of a run in this format.
        """
        starts = [line for line in lines if line["kind"] == "start"]
        if not starts:
            raise ArgumentError(f"{source} has no 'start' line: not a run")
        check_run(lines)
        first_s, shift_s = starts[0].get("unix_s"), 0.0
        of_kind: dict[str, list[Line]] = {}
        restarts: list[Line] = []
        for line in lines:
            if line["kind"] == "start" and line is not starts[0]:
                shift_s = max(0.0, (line.get("unix_s") or 0.0) - (first_s or 0.0))
                restarts.append({"time_s": shift_s, "at": len(of_kind.get("step", ()))})
            elif isinstance(line.get("time_s"), int | float):
                line = {**line, "time_s": line["time_s"] + shift_s}
            of_kind.setdefault(line["kind"], []).append(line)
        steps = of_kind.get("step", [])
        return cls(
            start=starts[0],
            steps=steps,
            kept=[*{line["step"]: line for line in _kept(steps)}.values()],
            evaluations=of_kind.get("evaluation", []),
            saves=of_kind.get("save", []),
            restarts=[
                Restart(
                    step=steps[restart["at"]]["step"] - 1 if restart["at"] < len(steps) else None,
                    time_s=restart["time_s"],
                )
                for restart in restarts
            ],
            of_kind=of_kind,
        )

    @property
    def name(self) -> str:
        """Of its folder."""
        return str(self.start["name"])

    @property
    def unit(self) -> str:
        """Of the loss; may be empty."""
        return str(self.start["unit"])

    @property
    def ranks(self) -> list[Line]:
        """The summary of each rank; empty if the run has not come to its end."""
        summaries = self.of_kind.get("ranks", [])
        return list(summaries[-1]["ranks"]) if summaries else []

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return "end" in self.of_kind

    @property
    def seconds(self) -> float:
        """Until the last line that has a time."""
        kinds = ("step", "evaluation", "save", "end")
        return max(
            (line["time_s"] for kind in kinds for line in self.of_kind.get(kind, ())), default=0.0
        )

    @property
    def utilization(self) -> float | None:
        """The share of ``peak_flops`` that one token in each second takes; None: not known."""
        flops, peak = self.start.get("flops_per_token"), self.start.get("peak_flops")
        return flops / (peak * self.start["ranks"]) if flops and peak else None


def _kept(steps: Sequence[Line]) -> list[Line]:
    """The steps that were not made again later."""
    kept: list[Line] = []
    lowest = float("inf")
    for line in reversed(steps):
        if line["step"] < lowest:
            lowest = line["step"]
            kept.append(line)
    return kept[::-1]
