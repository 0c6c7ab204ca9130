"""Runs the body of a test once on each rank."""

from __future__ import annotations

import functools
import inspect
import threading
import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import pytest

from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.laboratory.debugger_host import hosted_by
from echelon.laboratory.process_rank import Stand
from echelon.laboratory.process_test import rank_in_notes, run_in_processes
from echelon.laboratory.pytest_debugger import PytestHost
from echelon.laboratory.rank_cases import RankCase
from echelon.laboratory.rank_outcomes import RankExited, RankOutcomes
from echelon.laboratory.rank_streams import RankStreams
from echelon.laboratory.rank_values import ValuesOfRank
from echelon.launch.run import run
from echelon.testing import run_faulty

OUTCOMES = pytest.StashKey[RankOutcomes]()  # of a test, for its report
STREAMS = pytest.StashKey[RankStreams]()  # of the session, while the ranks of a test run


class RanksNotRunning(StateError, AttributeError):
    """A fixture asks for more of a world than how many ranks it has; ``hasattr`` is False."""


@final
class FutureWorld:
    """The value of the fixture ``world`` before the ranks run: it knows only how many there are.

    Attributes:
        size: the number of ranks.
    """

    def __init__(self, case: RankCase) -> None:
        self.size = case.ranks

    def __getattr__(self, name: str) -> NoReturn:
        __tracebackhide__ = True
        raise RanksNotRunning(
            f"a fixture uses world.{name} before the ranks run: fixtures are set up once, and only "
            "world.size is known then. Use world in the test, or return a function that takes it"
        )


@final
@dataclass(frozen=True)
class TestBody:
    """The body of a test, with what it is called with.

    Attributes:
        function: the function, not bound to an instance.
        instance: the instance of the test class, if there is one.
        values: the values of fixtures and parameters by name.
    """

    __test__ = False  # pytest collects classes whose names begin like this one's

    function: Callable[..., Any]
    instance: Any
    values: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], values: Mapping[str, Any]) -> TestBody:
        """The body of a test, which may be a method."""
        instance = getattr(function, "__self__", None)
        if instance is None or isinstance(instance, type):
            return cls(function, None, values)
        return cls(function.__func__, instance, values)  # type: ignore[attr-defined]

    def on_rank(self, world: World, streams: RankStreams) -> Callable[[], Any]:
        """The body with the values of one rank."""
        replaced: dict[str, Any] = {
            name: world for name, value in self.values.items() if isinstance(value, FutureWorld)
        }
        replaced |= streams.replacing(world.rank, self.values)
        rank = ValuesOfRank()
        values = {
            name: replaced[name] if name in replaced else rank.of(name, value)
            for name, value in self.values.items()
        }
        if self.instance is None:
            return lambda: self.function(**values)
        instance = rank.instance(self.instance)
        if isinstance(instance, unittest.TestCase):
            instance.world = world  # type: ignore[attr-defined]  # its methods take no arguments
            instance._outcome = None  # type: ignore[attr-defined]  # a subTest raises on this rank
        return lambda: self.function(instance, **values)


def run_test(item: pytest.Function, case: RankCase, body: TestBody) -> None:
    """Run the body of a test on all ranks.

    Raises:
        ArgumentError: the body cannot run on ranks.
        BaseException: what the test fails with. See [Note: whose failure].
    """
    __tracebackhide__ = True
    _refuse_function(body.function)
    if item.config.getoption("trace", False):
        raise UnsupportedError(
            "--trace steps through a test in the main thread, and this one runs on ranks: call "
            "breakpoint() in it, or use --pdb"
        )
    outcomes = item.stash[OUTCOMES] = RankOutcomes(case.ranks, item.path)
    in_world = _in_threads if case.world == "threads" else _in_processes
    failure: BaseException | None = None
    results: list[Any] = []
    try:
        results = in_world(item, case, body, outcomes)
    except BaseException as error:
        failure = error
    expected = None if case.faulty is None else case.faulty.fault.ends_in
    if failure is None:
        if expected is not None:
            _fail_without_error(case, expected)
        _warn_of_results(item, results)
        return
    if not outcomes.has_started:
        del item.stash[OUTCOMES]
        raise failure.with_traceback(None)
    outcomes.end_others()
    if expected is not None and isinstance(failure, expected):
        return
    chosen = outcomes.choose(failure, rank_in_notes(failure) if case.world == "processes" else None)
    if not item.config.getoption("fulltrace"):
        outcomes.leave_out_echelon()
    raise chosen


def _in_threads(
    item: pytest.Function, case: RankCase, body: TestBody, outcomes: RankOutcomes
) -> list[Any]:
    """Run a test on simulated ranks; the names of the types that it returned."""
    streams = item.config.stash[STREAMS] = RankStreams(item, case.ranks)

    def on_rank(world: World) -> str | None:
        outcomes.threads[world.rank] = threading.current_thread()
        with streams.of_rank(world.rank):
            try:
                result = body.on_rank(world, streams)()
            except BaseException as error:
                outcomes.fail(world.rank, error)
                if isinstance(error, SystemExit):
                    raise RankExited(world.rank, error.code) from error
                raise
            outcomes.finish(world.rank)
            return None if result is None else type(result).__name__

    host = PytestHost(item.config)
    try:
        with hosted_by(host), streams.routed():
            try:
                return _start(on_rank, case, outcomes)
            finally:
                host.leave(None)  # if the user has stepped to the end
    finally:
        del item.config.stash[STREAMS]


def _in_processes(
    item: pytest.Function, case: RankCase, body: TestBody, outcomes: RankOutcomes
) -> list[Any]:
    """Run a test on processes; the names of the types that it returned."""
    values = {name: _stand(value) for name, value in body.values.items()}
    return run_in_processes(
        item, body.instance, values, outcomes, lambda rank: _start(rank, case, outcomes)
    )


def _stand(value: Any) -> Any:
    """What is sent to a process for a value that it makes itself; otherwise the value."""
    if isinstance(value, FutureWorld):
        return Stand("world")
    if isinstance(value, pytest.LogCaptureFixture):
        return Stand("caplog")
    if isinstance(value, pytest.CaptureFixture):
        return Stand(str(value.request.fixturename))
    return Stand("monkeypatch") if isinstance(value, pytest.MonkeyPatch) else value


def run_function(item: pytest.Function, case: RankCase, values: Mapping[str, Any]) -> None:
    """Run the function of a test on all ranks with the values of fixtures and parameters.

    hypothesis draws each example once, and the ranks run it together.
    """
    __tracebackhide__ = True
    drawing: Any = getattr(item.obj, "hypothesis", None)
    if drawing is None:
        run_test(item, case, TestBody.of(item.obj, values))
        return
    if case.world == "processes":
        raise UnsupportedError(
            f"{item.name} draws examples with hypothesis, each of which would start processes: "
            "use world='threads'"
        )
    drawn_test = drawing.inner_test

    @functools.wraps(drawn_test)
    def on_ranks(*instance: Any, **drawn: Any) -> None:
        __tracebackhide__ = True
        sections = item._report_sections  # of the example before this one
        sections[:] = [section for section in sections if " rank " not in section[1]]
        run_test(item, case, TestBody(drawn_test, next(iter(instance), None), drawn))

    drawing.inner_test = on_ranks
    try:
        item.obj(**values)
    finally:
        drawing.inner_test = drawn_test


def run_method(
    item: pytest.Function, cases: Sequence[RankCase], method: Callable[[], object]
) -> Callable[[], None]:
    """A method of a ``unittest.TestCase`` that runs ``method`` on ranks, one case after another."""

    @functools.wraps(method)
    def on_ranks() -> None:
        __tracebackhide__ = True
        for case in cases:
            run_test(item, case, TestBody.of(method, {}))

    return on_ranks


def _start(on_rank: Callable[[World], Any], case: RankCase, outcomes: RankOutcomes) -> list[Any]:
    """Call a function on all ranks, one of which may misbehave."""
    outcomes.has_started = True
    if case.faulty is None:
        return run(on_rank, case.ranks, case.world, timeout=case.timeout)
    return run_faulty(
        on_rank,
        case.ranks,
        case.faulty.fault,
        rank=case.faulty.rank,
        at=case.faulty.at,
        world=case.world,
        timeout=case.timeout,
    )


def _fail_without_error(case: RankCase, expected: type[Exception]) -> NoReturn:
    """Fail a test that passed although one of its ranks misbehaved."""
    assert case.faulty is not None
    pytest.fail(
        f"rank {case.faulty.rank} {case.faulty.fault} at its call {case.faulty.at}, and the test "
        f"did not raise {expected.__name__}: the rank makes fewer calls, or the error was caught",
        pytrace=False,
    )


def _warn_of_results(item: pytest.Item, results: Sequence[Any]) -> None:
    """Warn as pytest does of a test that returns something: an ``assert`` may have been meant."""
    __tracebackhide__ = True
    kinds = {result for result in results if result is not None}
    if kinds:
        warnings.warn(
            pytest.PytestReturnNotNoneWarning(
                f"Test functions should return None, but {item.nodeid} returned {kinds.pop()} on "
                "a rank.\nDid you mean to use `assert` instead of `return`?"
            ),
            stacklevel=2,
        )


def _refuse_function(function: Callable[..., Any]) -> None:
    __tracebackhide__ = True
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ArgumentError(
            f"{function.__name__} is an async function, which cannot run on ranks: write a plain "
            "function that calls asyncio.run(...)"
        )
