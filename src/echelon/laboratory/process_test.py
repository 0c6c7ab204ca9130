"""Runs a test on ranks that are processes: sends it to them, and collects what they leave."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import ArgumentError
from echelon.laboratory.caller_state import CallerState
from echelon.laboratory.process_rank import (
    FilesOfRank,
    ProcessRank,
    ReportStyle,
    SentValues,
    TestSource,
)
from echelon.laboratory.rank_outcomes import EndKind, RankEnd, RankOutcomes
from echelon.launch import function_pickle
from echelon.process.operating_system import require_linux

Run = Callable[[Callable[..., Any]], list[Any]]

_RANK = re.compile(r"raised on rank (\d+) of \d+")  # a note of ``run``
_ADVICE = (
    "fixtures are set up once, in the process of pytest: make in the test what only one process "
    "can have, let the fixture return what it is made from, or use world='threads'"
)


def run_in_processes(
    item: pytest.Function,
    function: Callable[..., Any],
    instance: Any,
    values: Mapping[str, Any],
    outcomes: RankOutcomes,
    run: Run,
) -> list[Any]:
    """Run a test on ranks that are processes; the names of the types that it returned.

    Args:
        values: of fixtures and parameters; a ``Stand`` where a rank makes its own.
        run: starts the ranks.

    Raises:
        ArgumentError: the test or a value cannot be sent.
        UnsupportedError: this is no Linux.
    """
    require_linux("tests on ranks that are processes")
    from echelon.launch.processes import start_fork_server

    start_fork_server("echelon.laboratory.process_rank")
    with tempfile.TemporaryDirectory(prefix="echelon-test-") as folder:
        rank = ProcessRank(
            source=_source(item, function),
            report=_report_style(item.config),
            root=str(item.config.rootpath),
            folder=folder,
            is_shown=item.config.getoption("capture", "no") == "no",
            log_format=_log_format(item.config),
            state=function_pickle.dumps(CallerState.take()),
            sent=_sent(item, instance, values),
        )
        try:
            return run(rank)
        finally:
            for number in range(outcomes.size):
                _collect(item, FilesOfRank.of(folder, number), number, outcomes)


def rank_in_notes(error: BaseException) -> int | None:
    """The rank that ``run`` has noted on an error of a process; None if it has noted none."""
    notes = (_RANK.match(note) for note in getattr(error, "__notes__", []))
    return next((int(match[1]) for match in notes if match), None)


def _source(item: pytest.Function, function: Callable[..., Any]) -> TestSource:
    names = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    names.append(item.originalname)
    resolved: Any = item.module
    for name in names:
        resolved = getattr(resolved, name, None)
    code = getattr(getattr(resolved, "__func__", resolved), "__code__", None)
    if code is None or code is not getattr(function, "__code__", None):
        raise ArgumentError(
            f"{'.'.join(names)} is not found in the module {item.module.__name__}, where ranks "
            "that are processes look for it: define the test there by name, or use world='threads'"
        )
    hooks = (getattr(hook, "_must_rewrite", ()) for hook in sys.meta_path)
    rewritten = {item.module.__name__, *(name for marked in hooks for name in marked)}
    return TestSource(item.module.__name__, str(item.path), tuple(names), tuple(sorted(rewritten)))


def _report_style(config: pytest.Config) -> ReportStyle:
    return ReportStyle(
        verbosity=config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
        asserts=config.getoption("assertmode"),
        style=config.getoption("tbstyle"),
        showlocals=config.getoption("showlocals"),
        fulltrace=config.getoption("fulltrace"),
    )


def _log_format(config: pytest.Config) -> tuple[str | None, str | None] | None:
    plugin: Any = config.pluginmanager.get_plugin("logging-plugin")
    if plugin is None:  # switched off
        return None
    return plugin.formatter._fmt, plugin.formatter.datefmt


def _sent(item: pytest.Function, instance: Any, values: Mapping[str, Any]) -> bytes:
    """The values and the state of the instance as bytes; what they share stays shared."""
    attributes: dict[str, Any] | None = None
    of_class: dict[str, Any] = {}
    unsent: list[str] = []
    if instance is not None:
        hidden = {"_outcome", item.name, item.originalname}
        attributes = {name: value for name, value in vars(instance).items() if name not in hidden}
        for name, value in _set_on_class(type(instance)).items():
            if _problem(value):
                unsent.append(name)
            else:
                of_class[name] = value
    try:
        return function_pickle.dumps(SentValues(dict(values), attributes, of_class, tuple(unsent)))
    except Exception as error:  # whatever the object at fault raises
        named = {**values, **{f"self.{n}": v for n, v in (attributes or {}).items()}}
        culprits = {name: problem for name, value in named.items() if (problem := _problem(value))}
        name, problem = next(iter(culprits.items()), (item.name, str(error)))
        raise ArgumentError(
            f"{name!r} of {item.name} cannot be sent to ranks that are processes ({problem}): "
            f"{_ADVICE}"
        ) from None  # the sentence has what it says


def _set_on_class(cls: type) -> dict[str, Any]:
    """The data attributes of a test class, some of which ``setup_class`` may have set."""
    attributes: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ not in {"builtins", "unittest.case"}:
            attributes |= vars(base)
    return {
        name: value
        for name, value in attributes.items()
        if not name.startswith(("__", "_abc_", "pytestmark"))
        and not callable(value)
        and not hasattr(value, "__get__")
    }


def _problem(value: Any) -> str:
    """Why a value cannot be sent; empty if it can."""
    try:
        function_pickle.dumps(value)
    except Exception as error:  # whatever an object in it raises
        return str(error)
    return ""


def _collect(item: pytest.Item, files: FilesOfRank, rank: int, outcomes: RankOutcomes) -> None:
    """Take over what a rank has left: its output, and how it ended."""
    for name, path in (("stdout", files.out), ("stderr", files.err), ("log", files.log)):
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            item.add_report_section("call", f"{name} rank {rank}", text)
    if files.end.exists():
        outcomes.ends[rank] = _read_end(item, files.end)


def _read_end(item: pytest.Item, path: Path) -> RankEnd:
    content = json.loads(path.read_text())
    shown: Any = None
    if content["report"] is not None:
        report = item.config.hook.pytest_report_from_serializable(
            config=item.config, data=content["report"]
        )
        shown = report.longrepr
    return RankEnd(
        EndKind[content["kind"]],
        content["name"],
        content["message"],
        content["place"],
        shown=shown,
    )
