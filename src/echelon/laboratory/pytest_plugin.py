"""Tests that run on many ranks, for pytest: marks, options, and the fixture ``world``.

pytest loads this file when it starts, so torch and the rest of echelon are imported by the first
test that needs them. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from echelon.laboratory.rank_cases import RankCase

_CASE = "echelon_rank_case"  # the parameter that has a RankCase, where a test has several

_FAILED = pytest.StashKey["pytest.Item | pytest.Collector"]()  # whose failure is looked at

_MARKS = (
    'ranks(ranks, world="threads", timeout=60): run the test once on each of so many ranks; a list '
    'of numbers, or of worlds ("threads", "processes"), runs it with each of them',
    "faults(*faults, rank=0, at=0): run the test with each of these faults of echelon.testing, or "
    "with all, on one rank, and expect the error that the fault ends in",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("echelon", "tests on many ranks")
    group.addoption(
        "--echelon-world",
        choices=("threads", "processes"),
        help="run all tests that are marked with ranks in this world",
    )
    group.addoption(
        "--echelon-timeout",
        type=float,
        metavar="SECONDS",
        help="how long a rank of a test waits for others in one call, where its mark says nothing",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describe our marks."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


def _cases(node: pytest.Item, config: pytest.Config) -> list[RankCase]:
    """All ways in which a test runs on ranks; empty for a test that does not."""
    ranks, faults = node.get_closest_marker("ranks"), node.get_closest_marker("faults")
    if ranks is None and faults is None:
        return []
    from echelon.errors import ArgumentError
    from echelon.laboratory.rank_cases import rank_cases

    if ranks is None:
        raise ArgumentError("@pytest.mark.faults needs @pytest.mark.ranks beside it")
    return rank_cases(
        ranks,
        faults,
        world=config.getoption("echelon_world"),
        timeout=config.getoption("echelon_timeout"),
    )


def _case(item: pytest.Item) -> RankCase | None:
    """How a test runs on ranks, if it does."""
    callspec: Any = getattr(item, "callspec", None)
    if callspec is not None and _CASE in callspec.params:
        case: RankCase = callspec.params[_CASE]
        return case
    return next(iter(_cases(item, item.config)), None)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each of several cases."""
    try:
        cases = _cases(metafunc.definition, metafunc.config)
    except ValueError as error:
        name = metafunc.definition.nodeid
        raise pytest.Collector.CollectError(f"{name}: {error}") from error
    if len(cases) > 1 or (cases and cases[0].faulty):
        from echelon.laboratory.rank_cases import case_ids

        metafunc.fixturenames.append(_CASE)
        metafunc.parametrize(_CASE, cases, ids=case_ids(cases), indirect=True)


@pytest.fixture(name=_CASE)
def _rank_case(request: pytest.FixtureRequest) -> object:
    """The ``RankCase`` of a test that has several."""
    return request.param


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """The ``echelon.World`` of the rank that runs the test."""
    __tracebackhide__ = True
    from echelon.errors import StateError
    from echelon.laboratory.rank_test import FutureWorld

    case = _case(request.node)
    if case is None:
        raise StateError(
            f"{request.node.name} uses the fixture 'world' and runs on no ranks: mark it with "
            "@pytest.mark.ranks(4)"
        )
    return FutureWorld(case)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a test on its ranks; leave one that has none to pytest."""
    __tracebackhide__ = True
    case = _case(pyfuncitem)
    if case is None:
        return None
    from echelon.laboratory.rank_test import run_function

    names = pyfuncitem._fixtureinfo.argnames
    run_function(pyfuncitem, case, {name: pyfuncitem.funcargs[name] for name in names})
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Let unittest run the method of a ``TestCase`` on its ranks, which pytest does not call."""
    __tracebackhide__ = True
    cls = getattr(item, "cls", None)
    unittest = sys.modules.get("unittest")  # which whoever has a TestCase has imported
    is_case = unittest and isinstance(cls, type) and issubclass(cls, unittest.TestCase)
    if isinstance(item, pytest.Function) and is_case and (cases := _cases(item, item.config)):
        from echelon.laboratory.rank_test import run_method

        item.obj = run_method(item, cases, item.obj)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show on which rank a test failed."""
    report = yield
    # Whatever imports this has run tests on ranks; other sessions need not import it, and torch.
    rank_test = sys.modules.get("echelon.laboratory.rank_test")
    if rank_test is not None and call.when == "call" and call.excinfo is not None:
        outcomes = item.stash.get(rank_test.OUTCOMES, None)
        if outcomes is not None and call.excinfo.value is outcomes.error:
            outcomes.describe(item, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Remember whose ranks a debugger shows that opens now, because a test has failed."""
    if node.config.getoption("usepdb", False):
        node.config.stash[_FAILED] = node


def pytest_enter_pdb(config: pytest.Config, pdb: Any) -> None:
    """Let the debugger that ``--pdb`` opens show all ranks of the test."""
    rank_test = sys.modules.get("echelon.laboratory.rank_test")
    node = config.stash.get(_FAILED, None)
    if rank_test is None or node is None:
        return
    del config.stash[_FAILED]
    outcomes = node.stash.get(rank_test.OUTCOMES, None)
    if outcomes is not None and outcomes.error is not None:
        from echelon.laboratory.pytest_debugger import show_ended_ranks

        show_ended_ranks(pdb, outcomes)


def pytest_leave_pdb(config: pytest.Config) -> None:
    """Separate again what ranks print, after the debugger has put back pytest's streams."""
    rank_test = sys.modules.get("echelon.laboratory.rank_test")
    if rank_test is not None and (streams := config.stash.get(rank_test.STREAMS, None)):
        streams.resume()
