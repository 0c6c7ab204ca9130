"""What cannot be sent to a process is refused with its name and what to do."""

import pytest

from echelon.laboratory.process_test import rank_in_notes
from tests.laboratory.ranked_tests import is_in_order, run_tests

pytest_plugins = ["pytester"]

MARK = "pytestmark = pytest.mark.ranks(2, world='processes', timeout=5)\n"


@pytest.mark.slow
def test_a_value_that_cannot_be_sent_is_named(pytester: pytest.Pytester) -> None:
    source = """
import threading

@pytest.fixture
def lock():
    return threading.Lock()

def test_fixture(world, lock):
    pass

@pytest.mark.parametrize("steps", [iter(x for x in [1])], ids=["steps"])
def test_parameter(world, steps):
    pass

class TestIt:
    def setup_method(self):
        self.lock = threading.Lock()

    def test_attribute(self, world):
        pass

class TestClass:
    @classmethod
    def setup_class(cls):
        cls.lock = threading.Lock()

    def test_unused(self, world):
        pass
"""
    result = run_tests(pytester, MARK + source)
    result.assert_outcomes(failed=4)
    is_in_order(
        result,
        "E*ArgumentError: 'lock' of test_fixture cannot be sent to ranks that are processes "
        "(cannot pickle*): fixtures are set up once*or use world='threads'",
        "E*ArgumentError: 'steps' of test_parameter* cannot be sent *",
        "E*ArgumentError: 'self.lock' of test_attribute cannot be sent *",
        "E*StateError: self.lock was set by setup_class or a fixture and cannot be sent*",
    )


@pytest.mark.slow
def test_a_test_that_a_rank_does_not_find_is_refused(pytester: pytest.Pytester) -> None:
    source = """
import multiprocessing

def make():
    def test_it(world):
        pass
    return test_it

test_made = make()
if multiprocessing.parent_process() is None:
    test_of_the_caller = make()
"""
    result = run_tests(pytester, MARK + source)
    result.assert_outcomes(passed=1, failed=1)
    is_in_order(
        result, "E*ArgumentError: test_of_the_caller is not found in the module test_it, where*"
    )


def test_the_rank_of_an_error_is_in_its_notes() -> None:
    error = ValueError()
    assert rank_in_notes(error) is None
    error.add_note("a note")
    error.add_note("raised on rank 12 of 16")
    assert rank_in_notes(error) == 12
