from echelon.diagnosis.step_rows import Activity, StepTimes
from echelon.observe.phases import PHASES, phase_seconds


def test_each_activity_is_in_one_phase() -> None:
    activities = [activity for group in PHASES.values() for activity in group]
    assert sorted(activities) == sorted(Activity)


def test_the_seconds_of_all_phases_are_those_of_all_activities() -> None:
    spans = tuple(10**9 * (activity + 1) for activity in Activity)
    assert sum(phase_seconds(StepTimes(0, spans, spans)).values()) == sum(spans) / 1e9
