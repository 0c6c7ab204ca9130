"""The numbers of a line of ``metrics.jsonl``, under the flat names that trackers show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_STEP_NAMES = {
    "loss": "train/loss",
    "tokens_per_s": "perf/tokens_per_second",
    "time_s": "perf/elapsed_seconds",
    "process_peak": "memory/process_peak_bytes",
}
_START_FIELDS = ("ranks", "backend", "device", "total_steps", "unit")


def tracked_config(start: Mapping[str, Any]) -> dict[str, object]:
    """The options of a run from its ``start`` line; the script's own options come first.

    Example:
        >>> tracked_config({"ranks": 2, "backend": "shm", "config": {"lr": 0.1}})
        {'ranks': 2, 'backend': 'shm', 'lr': 0.1}
    """
    facts = {name: start[name] for name in _START_FIELDS if name in start}
    return {**facts, **start.get("config", {})}


def tracked_values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by name; none for lines about other things.

    A number that was not finite is NaN, as ``metrics.jsonl`` has null there.

    Example:
        >>> tracked_values({"kind": "step", "step": 1, "loss": 2.0, "learning_rate": 0.1})
        {'train/loss': 2.0, 'train/learning_rate': 0.1}
        >>> tracked_values({"kind": "evaluation", "step": 1, "time_s": 3.0, "loss": None})
        {'validation/loss': nan}
    """
    match line["kind"]:
        case "step":
            return _of_step(line)
        case "evaluation":
            return {"validation/loss": _as_float(line["loss"])}
        case "ranks":
            return _greatest(line["ranks"])
    return {}


def _of_step(line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {
        _step_name(name): _as_float(value)
        for name, value in line.items()
        if name not in ("kind", "step") and _is_number(value)
    }
    for category, nbytes in line.get("memory", {}).items():
        numbers[f"memory/{_as_name(category)}_bytes"] = float(nbytes)
    for phase, seconds in line.get("phases", {}).items():
        numbers[f"time/{_as_name(phase)}_seconds"] = float(seconds)
    return numbers


def _step_name(name: str) -> str:
    return _STEP_NAMES.get(name, name if "/" in name else f"train/{name}")


def _greatest(ranks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Memory and communication of a run: of each number the greatest of all ranks."""
    values: dict[str, float] = {}
    for rank in ranks:
        numbers = {"memory/greatest_process_peak_bytes": rank["process_peak"]}
        for category, total in rank["memory"].items():
            numbers[f"memory/{_as_name(category)}_peak_bytes"] = total["peak"]
        for op, total in rank["comm"].items():
            numbers[f"comm/{_as_name(op)}_calls"] = total["calls"]
            numbers[f"comm/{_as_name(op)}_bytes"] = total["nbytes"]
            numbers[f"comm/{_as_name(op)}_wait_seconds"] = total["wait_s"]
        for name, number in numbers.items():
            values[name] = max(values.get(name, -math.inf), float(number))
    return values


def _as_name(text: str) -> str:
    return text.replace(" ", "_")


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _as_float(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else float(value)
