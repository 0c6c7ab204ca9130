"""What a rank spent its time on, by the names that the report uses. Pure."""

from __future__ import annotations

from echelon.diagnosis.step_rows import Activity, StepTimes

# From the activities of a rank to what a figure tells apart, in the order of the figure.
PHASES = {
    "data": (Activity.LOADING,),
    "forward": (Activity.FORWARD, Activity.BEFORE_BACKWARD),
    "backward": (Activity.BACKWARD,),
    "optimizer": (Activity.OPTIMIZER,),
    "communication": (Activity.COMMUNICATION,),
    "saving": (Activity.SAVING,),
    "other": (Activity.OTHER, Activity.COLLECTING),
    "idle": (Activity.PROCESSOR,),
}


def phase_seconds(times: StepTimes) -> dict[str, float]:
    """Seconds by phase.

    Example:
        >>> spans = tuple(activity * 10**9 for activity in range(10))
        >>> phase_seconds(StepTimes(0, spans, spans))["forward"]
        3.0
    """
    return {
        phase: sum(times.spans_ns[activity] for activity in activities) / 1e9
        for phase, activities in PHASES.items()
    }
