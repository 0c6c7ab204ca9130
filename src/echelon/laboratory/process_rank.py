"""One rank of a test in a process of its own: it imports the test, runs it, and leaves its report.

The rank gets what ``process_test`` sends: where the test stands, and the values of its fixtures. It
imports the file of the test as pytest does, with explanations of asserts. What it prints, logs and
raises it leaves in files, which also outlive its death.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, final

import pytest
from _pytest.config import _prepareconfig
from _pytest.logging import LogCaptureHandler

from echelon.comm.world import World
from echelon.errors import StateError, UnsupportedError
from echelon.laboratory.rank_outcomes import EndKind, RankEnd, RankExited, leave_out_echelon
from echelon.laboratory.rank_streams import CaplogOfRank, CapsysOfRank
from echelon.launch import function_pickle
from echelon.launch.rank_output import rank_prefix
from echelon.launch.written_rows import MarkedRows
from echelon.process.atomic_files import replace_file
from echelon.process.replacement import Replacement

_VARIABLES_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


class Stand(NamedTuple):
    """What a fixture of pytest becomes on a rank, where its own value cannot be sent.

    Attributes:
        fixture: ``"world"``, ``"capsys"``, ``"caplog"`` or ``"monkeypatch"``.
        binary: whether it has bytes instead of text.
    """

    fixture: str
    binary: bool = False


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
class TestSource:
    """Where a process finds the function of a test.

    Attributes:
        module: the name of the module.
        path: its file.
        names: of the classes, and then of the function in them.
        rewritten: modules whose asserts explain themselves.
    """

    __test__ = False  # pytest collects classes whose names begin like this one's

    module: str
    path: str
    names: tuple[str, ...]
    rewritten: tuple[str, ...]

    def load(self) -> tuple[Callable[..., Any], type | None]:
        """The function, and the class that it is a method of."""
        owner: Any = None
        function = self._import()
        for name in self.names:
            owner, function = function, getattr(function, name)
        return function, owner if isinstance(owner, type) else None

    def _import(self) -> Any:
        if self.module in sys.modules:
            return sys.modules[self.module]
        try:
            spec = importlib.util.find_spec(self.module)
        except ModuleNotFoundError:
            spec = None
        if spec is not None and spec.origin == self.path:
            return importlib.import_module(self.module)
        return self._import_file()

    def _import_file(self) -> ModuleType:
        """Import what no name on ``sys.path`` leads to, as pytest does with ``importlib``."""
        hooks = [hook for hook in sys.meta_path if type(hook).__name__ == "AssertionRewritingHook"]
        loader: Any = hooks[0] if hooks else None
        spec = importlib.util.spec_from_file_location(self.module, self.path, loader=loader)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module


@final
@dataclass(frozen=True)
class ReportStyle:
    """The options of pytest that say how a failure is shown."""

    verbosity: int
    asserts: str
    style: str
    showlocals: bool
    fulltrace: bool

    def configure(self, root: str) -> pytest.Config:
        """A configuration of pytest for this process, without plugins and files of the user."""
        before = dict(os.environ)
        for name in _VARIABLES_OF_PYTEST:
            os.environ.pop(name, None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        arguments = (
            f"-c {os.devnull} --noconftest -p no:cacheprovider -p no:faulthandler -s".split()
        )
        arguments += [f"--rootdir={root}", f"--assert={self.asserts}"]
        arguments += [f"--verbosity={self.verbosity}"]
        try:
            return _prepareconfig(arguments)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def show(self, error: BaseException, function: Any, path: str) -> Any:
        """How pytest shows an error that a test has raised; None for one from outside the test."""
        if error.__traceback__ is None:
            return None
        style: Any = "long" if self.style == "auto" else self.style
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", 1) - 1

        def of_test(excinfo: pytest.ExceptionInfo[BaseException]) -> Any:
            entries = excinfo.traceback.cut(path=path, firstlineno=line).filter(excinfo)
            entries = entries.filter(lambda entry: "__unittest" not in entry.frame.f_globals)
            if self.style != "auto" or len(entries) < 3:
                return entries
            inner = (entry.with_repr_style("short") for entry in entries[1:-1])
            return type(entries)((entries[0], *inner, entries[-1]))

        if isinstance(error, pytest.fail.Exception) and not error.pytrace:
            style = "value"
        return pytest.ExceptionInfo.from_exception(error).getrepr(
            funcargs=True,
            showlocals=self.showlocals,
            style="long" if self.fulltrace else style,
            tbfilter=False if self.fulltrace else of_test,
            truncate_locals=self.verbosity < 2,
        )


@final
@dataclass(frozen=True)
class SentValues:
    """What a rank calls the test with.

    Attributes:
        values: of fixtures and parameters by name; a ``Stand`` for what is made here.
        attributes: of the instance of the test class; None where there is none.
        of_class: attributes of the class that a fixture may have set.
        unsent: names of other attributes of the class, which cannot be sent.
    """

    values: dict[str, Any]
    attributes: dict[str, Any] | None
    of_class: dict[str, Any]
    unsent: tuple[str, ...]


@final
@dataclass(frozen=True)
class ProcessRank:
    """The body of a test, for processes: a function of their world.

    Attributes:
        source: where the test is.
        report: how failures are shown.
        root: the root folder of the session.
        folder: where files are left.
        is_shown: whether output goes to the screen, each line with its rank.
        log_format: the formats of records and of their times; None without a log.
        state: a ``CallerState`` as bytes.
        sent: ``SentValues`` as bytes, which may need the module of the test.
    """

    source: TestSource
    report: ReportStyle
    root: str
    folder: str
    is_shown: bool
    log_format: tuple[str | None, str | None] | None
    state: bytes
    sent: bytes

    def __call__(self, world: World) -> str | None:
        """Run the test on this rank; the name of the type of what it returned."""
        files = FilesOfRank.of(self.folder, world.rank)
        config = self.report.configure(self.root)
        pytest.register_assert_rewrite(
            *(name for name in self.source.rewritten if name not in sys.modules)
        )
        _no_debugger.put_in()
        function: Any = None
        with _output(world.rank, None if self.is_shown else files), self._log(files):
            try:
                function_pickle.loads(self.state).restore()
                function, owner = self.source.load()
                with _explaining(config):
                    result = self._bound(function, owner, world, files)()
            except BaseException as error:
                leave_out_echelon(error, Path(self.source.path))
                end = RankEnd.of_error(error, Path(self.source.path))
                shown = self.report.show(error, function, self.source.path)
                _write_end(files.end, config, end, shown)
                if isinstance(error, SystemExit):
                    raise RankExited(world.rank, error.code) from error
                raise
        _write_end(files.end, config, RankEnd(EndKind.FINISHED), None)
        return None if result is None else type(result).__name__

    def _bound(
        self, function: Callable[..., Any], owner: type | None, world: World, files: FilesOfRank
    ) -> Callable[[], Any]:
        """The function with its instance and its arguments."""
        sent: SentValues = function_pickle.loads(self.sent)
        buffers = (_FileBuffer(files.out), _FileBuffer(files.err))
        caplog = next(
            (h for h in logging.getLogger().handlers if type(h) is LogCaptureHandler), None
        )

        def value(value: Any) -> Any:
            if not isinstance(value, Stand):
                return value
            if value.fixture == "capsys":
                return CapsysOfRank(buffers, value.binary, nullcontext)
            if value.fixture == "caplog":
                assert caplog is not None
                return CaplogOfRank(caplog)
            return world if value.fixture == "world" else pytest.MonkeyPatch()

        values = {name: value(sent_value) for name, sent_value in sent.values.items()}
        if sent.attributes is None or owner is None:
            return lambda: function(**values)
        if missing := [name for name in sent.unsent if not hasattr(owner, name)]:
            raise StateError(
                f"self.{missing[0]} was set by setup_class or a fixture and cannot be sent to "
                "ranks that are processes: make it in the test, or use world='threads'"
            )
        instance: Any = object.__new__(owner)
        instance.__dict__.update(sent.of_class | sent.attributes)
        if isinstance(instance, unittest.TestCase):
            instance.__dict__.update(world=world, _outcome=None)
        return lambda: function(instance, **values)

    @contextmanager
    def _log(self, files: FilesOfRank) -> Iterator[None]:
        """Write records into the file of this rank, and keep them for ``caplog``."""
        if self.log_format is None:
            yield
            return
        to_file = logging.FileHandler(files.log)
        for handler in (to_file, LogCaptureHandler()):
            handler.setFormatter(logging.Formatter(*self.log_format))
            logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            to_file.close()


@final
class _FileBuffer:
    """What this rank has written into a file of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> bytes:
        """What was written since the last time; the file is written from its end on."""
        taken = self._path.read_bytes()
        os.truncate(self._path, 0)
        return taken


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


@contextmanager
def _explaining(config: pytest.Config) -> Iterator[None]:
    """Explain comparisons in asserts, as pytest does while it runs a test."""
    from _pytest.assertion import pytest_runtest_protocol

    class _Item:
        """What is asked of a test here."""

        def __init__(self) -> None:
            self.config, self.ihook = config, config.hook

    item: Any = _Item()
    explaining: Any = pytest_runtest_protocol(item)
    next(explaining)
    try:
        yield
    finally:
        explaining.close()


def _write_end(path: Path, config: pytest.Config, end: RankEnd, shown: Any) -> None:
    """Leave how this rank ended, whole or not at all."""
    report = None
    if shown is not None:
        report = config.hook.pytest_report_to_serializable(
            config=config,
            report=pytest.TestReport("", ("", 0, ""), {}, "failed", shown, "call"),
        )
    content: dict[str, Any] = {"kind": end.kind.name, "name": end.name, "message": end.message}
    content |= {"place": end.place, "report": report}
    replace_file(path, json.dumps(content).encode(), sync=False)
