"""One rank of a test in a process of its own, which runs pytest and leaves the report.

The rank gets what ``process_test`` sends: where the test stands, and the values of its fixtures.
Its pytest imports the file of the test, explains asserts and shows failures as that of the caller
does, without the plugins and files of the user. What it prints, logs and raises it leaves in files,
which also outlive its death.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import sys
import unittest
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

import pytest
from _pytest.config import default_plugins, essential_plugins
from _pytest.fixtures import FuncFixtureInfo

from echelon.comm.threads.process_state import restore_in_process, state_for_process
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError, UnsupportedError
from echelon.laboratory.rank_outcomes import EndKind, RankExited, RankOutcome, leave_out_echelon
from echelon.launch import function_pickle
from echelon.launch.rank_output import rank_prefix
from echelon.launch.written_rows import MarkedRows
from echelon.process.atomic_files import replace_file
from echelon.process.replacement import Replacement

# The pytest of a rank has these, and what it cannot be without. That of the caller decides on
# skips, prints, keeps files, and opens a debugger.
_PLUGINS = {"assertion", "capture", "logging", "monkeypatch", "python", "reports", "unittest"}
_WITHOUT = sorted(set(default_plugins) - set(essential_plugins) - _PLUGINS)


class Stand(NamedTuple):
    """A fixture that a rank makes itself: ``world``, or one of pytest's own, by its name."""

    fixture: str


class FilesOfRank(NamedTuple):
    """The files that a rank leaves."""

    out: Path
    err: Path
    log: Path
    end: Path

    @classmethod
    def of(cls, folder: str, rank: int) -> FilesOfRank:
        """Those of one rank in the folder of its test."""
        return cls(*(Path(folder) / f"{name}-{rank}" for name in cls._fields))


@final
@dataclass(frozen=True)
class StartOfRank:
    """State of the process of pytest that a rank takes over: a fixture may have changed it."""

    of_process: dict[str, Any]
    filters: tuple[Any, ...]  # of warnings
    log_level: int

    @classmethod
    def here(cls) -> StartOfRank:
        """That of this process now."""
        return cls(state_for_process(), tuple(warnings.filters), logging.getLogger().level)

    def restore(self) -> None:
        """Put it into this process."""
        restore_in_process(self.of_process)
        warnings.resetwarnings()
        warnings.filters[:] = self.filters  # type: ignore[index]
        logging.getLogger().setLevel(self.log_level)


@final
@dataclass(frozen=True)
class SentValues:
    """What a rank calls the test with.

    Attributes:
        values: of fixtures and parameters by name; a ``Stand`` for what is made here.
        attributes: of the instance of the test class and of the class, as fixtures have set them.
        unsent: names of other attributes of the class, which cannot be sent.
    """

    values: dict[str, Any]
    attributes: dict[str, Any]
    unsent: tuple[str, ...]


@final
@dataclass(frozen=True)
class ProcessRank:
    """The body of a test, for processes: a function of their world.

    Attributes:
        path: the file of the test.
        nodes: the classes around the test and the test itself: how pytest calls each, and its name.
        arguments: of pytest.
        options: of pytest, by the names that it has for them.
        rewritten: modules whose asserts explain themselves.
        folder: where files are left.
        is_shown: whether output goes to the screen, each line with its rank.
        start: a ``StartOfRank`` as bytes.
        sent: ``SentValues`` as bytes, which may need the module of the test.
    """

    path: Path
    nodes: tuple[tuple[type[pytest.Class | pytest.Function], str], ...]
    arguments: tuple[str, ...]
    options: dict[str, Any]
    rewritten: tuple[str, ...]
    folder: str
    is_shown: bool
    start: bytes
    sent: bytes

    def __call__(self, world: World) -> str | None:
        """Run the test on this rank; the name of the type of what it returned."""
        files = FilesOfRank.of(self.folder, world.rank)
        config = self._configure(files)
        _no_debugger.put_in()
        test = _Test(self, world)
        config.pluginmanager.register(test)
        with _output(world.rank, None if self.is_shown else files):
            try:
                function_pickle.loads(self.start).restore()
                session = pytest.Session.from_config(config)
                config.hook.pytest_sessionstart(session=session)
                session.items = [test.item(session)]
                config.hook.pytest_runtestloop(session=session)
                if test.error is not None:
                    raise test.error
            except BaseException as error:
                leave_out_echelon(error, self.path)
                report = test.report or _report(error, self.path)
                _write_end(files.end, config, RankOutcome.of_error(error, self.path), report)
                if isinstance(error, SystemExit):
                    raise RankExited(world.rank, error.code) from error
                raise
        _write_end(files.end, config, RankOutcome(EndKind.FINISHED), None)
        return None if test.result is None else type(test.result).__name__

    def _configure(self, files: FilesOfRank) -> pytest.Config:
        """The configuration of pytest for this process; ``start`` has the variables again."""
        os.environ.pop("PYTEST_PLUGINS", None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        arguments = [*f"-c {os.devnull} --noconftest -s".split(), *self.arguments]
        arguments += [f"-pno:{name}" for name in _WITHOUT]
        config = pytest.Config.fromdictargs(self.options | {"log_file": str(files.log)}, arguments)
        pytest.register_assert_rewrite(
            *(name for name in self.rewritten if name not in sys.modules)
        )
        config._do_configure()
        return config


@final
class _Test:
    """The test in the pytest of this rank, and a plugin that learns how it has ended.

    Attributes:
        result: what it returned.
        error: what it raised.
        report: pytest's, of that.
    """

    def __init__(self, rank: ProcessRank, world: World) -> None:
        self._rank, self._world = rank, world
        self.result: Any = None
        self.error: BaseException | None = None
        self.report: pytest.TestReport | None = None

    def item(self, session: pytest.Session) -> pytest.Item:
        """The test as an item of pytest, which sets up no fixtures.

        Raises:
            ArgumentError: the module has no such test here.
        """
        node: Any = pytest.Module.from_parent(session, path=self._rank.path)
        names = [name for _, name in self._rank.nodes]
        if (
            functools.reduce(lambda owner, name: getattr(owner, name, None), names, node.obj)
            is None
        ):
            raise ArgumentError(
                f"{'.'.join(names)} is not found in the module {node.obj.__name__}, where ranks "
                "that are processes look for it: define the test there by name, or use "
                "world='threads'"
            )
        for kind, name in self._rank.nodes:
            options = {}
            if issubclass(kind, pytest.Function):
                options["fixtureinfo"] = FuncFixtureInfo((), (), [], {})
            node = kind.from_parent(node, name=name, **options)
        node.runtest = functools.partial(self._call, node)
        return node  # type: ignore[no-any-return]

    def _call(self, item: Any) -> None:
        """Call the function with its instance and its arguments."""
        try:
            sent: SentValues = function_pickle.loads(self._rank.sent)
            values = {name: self._value(item, value) for name, value in sent.values.items()}
            if item.instance is not None:
                if missing := [name for name in sent.unsent if not hasattr(item.cls, name)]:
                    raise StateError(
                        f"self.{missing[0]} was set by setup_class or a fixture and cannot be sent "
                        "to ranks that are processes: make it in the test, or use world='threads'"
                    )
                vars(item.instance).update(sent.attributes)
            if isinstance(item.instance, unittest.TestCase):
                vars(item.instance).update(world=self._world)  # its methods take no arguments
            self.result = item.obj(**values)
        except BaseException as error:
            leave_out_echelon(error, self._rank.path)
            raise

    def _value(self, item: Any, value: Any) -> Any:
        if not isinstance(value, Stand):
            return value
        if value.fixture == "world":
            return self._world
        return item._request.getfixturevalue(value.fixture)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the first failure."""
        report = yield
        if call.excinfo is not None and self.error is None:
            self.error, self.report = call.excinfo.value, report
        return report


def _refuse_breakpoint(*args: object, **options: object) -> NoReturn:
    raise UnsupportedError(
        "breakpoint() is in a test on ranks that are processes, which no terminal reaches: run it "
        "with --echelon-world=threads"
    )


_no_debugger = Replacement(sys, "breakpointhook", _refuse_breakpoint)


@contextmanager
def _output(rank: int, files: FilesOfRank | None) -> Iterator[None]:
    """Let all that this process writes go into its files, or to the screen with its rank."""
    if files is None:
        streams: Any = [
            MarkedRows(stream, rank_prefix(rank)) for stream in (sys.stdout, sys.stderr)
        ]
        sys.stdout, sys.stderr = streams
        try:
            yield
        finally:
            for stream in streams:
                stream.end()
        return
    for number, path in ((1, files.out), (2, files.err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
    yield


def _unbuffered(number: int) -> io.TextIOWrapper:
    """A text stream that writes at once: a rank may die at any time."""
    raw: Any = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _report(error: BaseException, path: Path) -> pytest.TestReport | None:
    """The report of what no test has raised, such as its file; None for an error of ours."""
    if error.__traceback__ is None:
        return None
    info = pytest.ExceptionInfo.from_exception(error)
    info.traceback = info.traceback.cut(path=path)
    return pytest.TestReport("", ("", 0, ""), {}, "failed", info.getrepr(style="short"), "call")


def _write_end(
    path: Path, config: pytest.Config, end: RankOutcome, report: pytest.TestReport | None
) -> None:
    """Leave how this rank ended, whole or not at all."""
    data = report and config.hook.pytest_report_to_serializable(config=config, report=report)
    content = {"kind": end.kind.name, "name": end.name, "message": end.message, "place": end.place}
    replace_file(path, json.dumps(content | {"report": data}).encode(), sync=False)
