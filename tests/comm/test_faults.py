"""A dozen of the faults of ``tests/long/test_fault_scenarios.py``: of each sort one."""

import pytest

from tests.long.fault_scenarios import Scenario
from tests.long.test_fault_scenarios import ended

DOZEN = [
    Scenario("threads", "fsdp3", "backward", "ValueError: boom", 2),
    Scenario("threads", "pp3", "forward", "out of memory", 1),
    Scenario("threads", "hybrid4", "wrap", "sys.exit(0)", 3),
    Scenario("threads", "pp2-dp2", "after the last call", "lock", 1),
    Scenario("threads", "ddp3", "load", "fork", 0),
    Scenario("processes", "ddp3", "async save", "SIGKILL", 2),
    Scenario("processes", "fsdp2", "backward", "SIGSEGV", 0),
    Scenario("processes", "pp2", "optimizer", "exit code 0", 1),
    Scenario("processes", "fsdp3-rows", "subgroup", "abort", 1),
    Scenario("processes", "pp2-dp2", "clip", "sys.exit(3)", 3),
    Scenario("processes", "pp2", "exit handler", "sleep", 0),
    Scenario("processes", "ddp3", "after the last call", "C call with the interpreter", 1),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("scenario", DOZEN, ids=str)
def test_a_fault_ends_its_job_in_time_and_blames_no_innocent_rank(scenario: Scenario) -> None:
    found = ended(scenario)
    assert not found.is_wrong, found
    assert found.seconds < found.bound_s + 10.0, found
