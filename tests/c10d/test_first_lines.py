"""The first line of a failure of a torch.distributed program names the rank that is at fault.

``tests/long/torch_hangs.py`` draws as many of these programs as one likes.
"""

import pytest

from tests.long.torch_hangs import Scenario, first_line, is_right

ALL, PAIR = (0, 1, 2), (1, 2)

SCENARIOS = [
    Scenario("hang", "threads", 3, 1, PAIR, "all_gather"),
    Scenario("hang", "processes", 3, 1, PAIR, "all_reduce"),
    Scenario("late", "processes", 2, 0, (0, 1), "barrier"),
    Scenario("exit", "processes", 3, 2, PAIR, "all_to_all"),
    Scenario("exit", "threads", 3, 2, PAIR, "ring"),
    Scenario("raise", "processes", 3, 2, PAIR, "reduce_scatter"),
    Scenario("shape", "processes", 3, 2, ALL, "all_reduce"),
    Scenario("kill", "processes", 3, 1, PAIR, "ring"),
    Scenario("order", "processes", 3, 1, ALL, "barrier"),
    Scenario("order", "threads", 3, 1, PAIR, "all_reduce"),
    Scenario("groups", "processes", 3, 1, ALL, "barrier"),
    pytest.param(Scenario("hang", "launched", 3, 1, PAIR, "all_reduce"), marks=pytest.mark.slow),
    pytest.param(Scenario("exit", "launched", 3, 1, ALL, "ring"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: f"{each.kind}-{each.world}")
def test_the_first_line_names_the_rank_that_stops_by_its_number_in_the_job(
    scenario: Scenario,
) -> None:
    line = first_line(scenario)
    assert is_right(scenario, line), line
