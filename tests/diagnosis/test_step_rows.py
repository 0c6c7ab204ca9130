import pytest

from echelon.diagnosis.step_rows import Activity, RankSteps, StepRows


def times(wall: int, minor: int = 0) -> list[int]:
    """The numbers of a step in which a rank was in backward only, blocked half of the time."""
    spans = [0] * len(Activity)
    spans[Activity.BACKWARD] = wall
    blocked = [ns // 2 for ns in spans]
    return [wall, *spans, *blocked, minor, 0]


def steps_of(rows: StepRows) -> RankSteps:
    return RankSteps.of(3, rows.numbers())


def test_a_table_gives_back_the_steps_and_totals_without_the_first() -> None:
    rows = StepRows.private()
    for wall in (500, 10, 20):
        rows.add(times(wall, minor=2))
    steps = steps_of(rows)
    assert (steps.rank, steps.num_steps, steps.is_stage) == (3, 3, False)
    assert {number: step.wall_ns for number, step in steps.steps.items()} == {0: 500, 1: 10, 2: 20}
    assert steps.steps[1].spans_ns[Activity.BACKWARD] == 10
    assert steps.steps[1].blocked_ns[Activity.BACKWARD] == 5
    assert (steps.totals.wall_ns, steps.totals.minor_faults) == (30, 4)


@pytest.mark.parametrize("num_steps", [168, 169, 1000, 5000])
def test_rows_cover_a_long_run_evenly_and_totals_all_of_it(num_steps: int) -> None:
    rows = StepRows.private()
    for number in range(num_steps):
        rows.add(times(number))
    steps = steps_of(rows)
    numbers = list(steps.steps)
    stride = numbers[1]
    assert numbers == list(range(0, num_steps, stride))
    assert 84 <= len(numbers) <= 168
    assert all(step.wall_ns == number for number, step in steps.steps.items())
    assert steps.totals.wall_ns == sum(range(1, num_steps))
    assert len(rows.numbers()) * 8 <= StepRows.nbytes


def test_a_cleared_table_is_empty() -> None:
    rows = StepRows.private()
    rows.call_stage()
    rows.add(times(10))
    assert steps_of(rows).is_stage
    rows.clear()
    steps = steps_of(rows)
    assert (steps.num_steps, steps.is_stage, steps.steps, steps.totals.wall_ns) == (0, False, {}, 0)


def test_the_totals_are_known_without_the_rows() -> None:
    rows = StepRows.private()
    assert rows.totals().wall_ns == 0
    for wall in (500, 10, 20):
        rows.add(times(wall))
        assert rows.totals() == steps_of(rows).totals
