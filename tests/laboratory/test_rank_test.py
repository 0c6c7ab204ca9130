"""The body of a test gets its values on each rank; what cannot run on ranks is refused."""

import pytest

from echelon.errors import StateError
from echelon.laboratory.rank_cases import RankCase
from echelon.laboratory.rank_test import FutureWorld
from tests.laboratory.ranked_tests import is_in_order, run_tests

pytest_plugins = ["pytester"]


def test_a_fixture_knows_only_the_number_of_ranks() -> None:
    world = FutureWorld(RankCase(4, "threads", 1.0))
    assert world.size == 4
    with pytest.raises(StateError, match=r"a fixture uses world\.group before the ranks run"):
        _ = world.group
    assert not hasattr(world, "hypothesis_internal_is_this_a_mock_check")


def test_a_fixture_that_uses_the_world_is_shown_at_its_own_line(pytester: pytest.Pytester) -> None:
    source = """
@pytest.fixture
def model(world):
    return ec.DDP(torch.nn.Linear(1, 1), world.group)

@pytest.mark.ranks(2)
def test_it(world, model):
    pass
"""
    result = run_tests(pytester, source)
    result.assert_outcomes(errors=1)
    is_in_order(result, ">*return ec.DDP*", "E*RanksNotRunning: a fixture uses world.group before*")


def test_each_rank_trains_its_own_copy_of_the_model_of_a_fixture(pytester: pytest.Pytester) -> None:
    source = """
@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1).double()

@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

@pytest.mark.ranks([1, 2, 4])
def test_it(world, model, optimizer):
    x = torch.arange(24, dtype=torch.float64).reshape(8, 3) / 10
    expected = torch.nn.Linear(3, 1).double()
    expected.load_state_dict(model.state_dict())
    expected(x).pow(2).mean().backward()
    model = ec.DDP(model, world.group)
    model(x[world.rank :: world.size]).pow(2).mean().backward()
    optimizer.step()
    for ours, other in zip(model.module.parameters(), expected.parameters()):
        torch.testing.assert_close(ours.data, other.data - 0.1 * other.grad, rtol=1e-12, atol=0)
"""
    run_tests(pytester, source).assert_outcomes(passed=3)


def test_an_exception_in_a_fixture_is_an_error_and_no_rank_runs(pytester: pytest.Pytester) -> None:
    source = """
@pytest.fixture
def broken():
    raise RuntimeError("no server")

@pytest.fixture
def broken_later():
    yield
    raise RuntimeError("no end")

@pytest.mark.ranks(2)
def test_it(world, broken):
    raise AssertionError

@pytest.mark.ranks(2)
def test_later(world, broken_later):
    pass
"""
    result = run_tests(pytester, source)
    result.assert_outcomes(errors=2, passed=1)


def test_an_async_test_is_refused(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(2)\nasync def test_it(world): pass\n"
    result = run_tests(pytester, source, "-p", "no:anyio")
    result.assert_outcomes(failed=1)
    is_in_order(result, "E*ArgumentError: test_it is an async function, which cannot run on ranks*")


def test_a_test_that_returns_something_warns_as_in_pytest(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(2)\ndef test_it(world):\n    return world.rank == 0\n"
    result = run_tests(pytester, source, "-Wdefault")
    result.assert_outcomes(passed=1, warnings=1)
    is_in_order(result, "*PytestReturnNotNoneWarning*")


HYPOTHESIS = """
from hypothesis import HealthCheck, given, settings, strategies as st

options = {"database": None, "deadline": None}
options["suppress_health_check"] = [HealthCheck.function_scoped_fixture]

@pytest.mark.ranks(2)
@settings(max_examples=50, **options)
@given(value=st.integers(0, 100))
def test_it(world, value):
    print("drew", value)
    values = world.group.all_gather_object(value)
    assert values == [value, value]
    assert value < 50 or world.rank == 0

@pytest.mark.ranks(2)
class TestIt:
    @settings(max_examples=5, **options)
    @given(st.integers(0, 100))
    def test_it(self, world, value):
        world.group.barrier()
"""


@pytest.mark.slow
def test_ranks_run_each_example_of_hypothesis_together(pytester: pytest.Pytester) -> None:
    result = run_tests(pytester, HYPOTHESIS)
    result.assert_outcomes(passed=1, failed=1)
    is_in_order(result, "rank 1 of 2:", "*Captured stdout rank 0 call*", "drew 50")
    assert result.stdout.str().count("Captured stdout rank 1") == 1
    result = run_tests(pytester, HYPOTHESIS, "--echelon-world=processes")
    is_in_order(result, "E*UnsupportedError: test_it draws examples with hypothesis*")


def test_stepping_through_the_main_thread_is_refused(pytester: pytest.Pytester) -> None:
    source = "@pytest.mark.ranks(2)\ndef test_it(world): pass\n"
    is_in_order(run_tests(pytester, source, "--trace"), "E*UnsupportedError: --trace steps*")
