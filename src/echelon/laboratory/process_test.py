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
from echelon.laboratory.process_rank import FilesOfRank, ProcessRank, SentValues, StartOfRank
from echelon.laboratory.rank_outcomes import EndKind, RankOutcome, RankOutcomes
from echelon.launch import function_pickle
from echelon.process.operating_system import require_linux

# Of the pytest of the caller, which that of a rank has, too: they say how failures are shown.
_OPTIONS = ("assertmode", "fulltrace", "importmode", "showlocals", "tbstyle", "verbose")
_SETTINGS = (
    "consider_namespace_packages",
    "truncation_limit_chars",
    "truncation_limit_lines",
    "verbosity_assertions",
)

Run = Callable[[Callable[..., Any]], list[Any]]

_RANK = re.compile(r"raised on rank (\d+) of \d+")  # a note of ``run``
_ADVICE = (
    "fixtures are set up once, in the process of pytest: make in the test what only one process "
    "can have, let the fixture return what it is made from, or use world='threads'"
)


def run_in_processes(
    item: pytest.Function,
    instance: Any,
    values: Mapping[str, Any],
    outcomes: RankOutcomes,
    run: Run,
) -> list[Any]:
    """Run a test on ranks that are processes; the names of the types that it returned.

    Args:
        instance: of the test class; None if there is none.
        values: of fixtures and parameters; a ``Stand`` where a rank makes its own.
        run: starts the ranks.

    Raises:
        ArgumentError: the test or a value cannot be sent.
        UnsupportedError: this is no Linux.
    """
    require_linux("tests on ranks that are processes")
    from echelon.launch.processes import start_fork_server

    start_fork_server("echelon.laboratory.process_rank")
    hooks = (getattr(hook, "_must_rewrite", ()) for hook in sys.meta_path)
    arguments, options = _configuration(item.config)
    with tempfile.TemporaryDirectory(prefix="echelon-test-") as folder:
        rank = ProcessRank(
            path=item.path,
            nodes=_nodes(item),
            arguments=arguments,
            options=options,
            rewritten=tuple({item.module.__name__, *(name for names in hooks for name in names)}),
            folder=folder,
            is_shown=item.config.getoption("capture", "no") == "no",
            start=function_pickle.dumps(StartOfRank.here()),
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


def _configuration(config: pytest.Config) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments and the options of the pytest of a rank."""
    arguments = [f"--rootdir={config.rootpath}", "-omarkers=" + "\n".join(config.getini("markers"))]
    arguments += [f"-o{name}={value}" for name in _SETTINGS if (value := config.getini(name))]
    options = {name: config.getoption(name) for name in _OPTIONS}
    plugin: Any = config.pluginmanager.get_plugin("logging-plugin")
    if plugin is None:  # switched off
        return (*arguments, "-pno:logging"), options
    formats = {"log_format": plugin.formatter._fmt, "log_date_format": plugin.formatter.datefmt}
    return tuple(arguments), options | formats


def _nodes(item: pytest.Function) -> tuple[tuple[type[pytest.Class | pytest.Function], str], ...]:
    """The classes around a test and the test itself, as the pytest of a rank makes them."""
    return tuple(
        (
            next(kind for kind in type(node).__mro__ if kind.__module__.startswith("_pytest.")),
            item.originalname if node is item else node.name,
        )
        for node in item.listchain()
        if isinstance(node, pytest.Class | pytest.Function)
    )


def _sent(item: pytest.Function, instance: Any, values: Mapping[str, Any]) -> bytes:
    """The values and the state of the instance as bytes; what they share stays shared."""
    attributes: dict[str, Any] = {}
    unsent: list[str] = []
    if instance is not None:
        of_class = _set_on_class(type(instance))
        unsent = [name for name, value in of_class.items() if _problem(value)]
        hidden = {"_outcome", item.name, item.originalname}
        attributes = {name: value for name, value in of_class.items() if name not in unsent}
        attributes |= {name: value for name, value in vars(instance).items() if name not in hidden}
    try:
        return function_pickle.dumps(SentValues(dict(values), attributes, tuple(unsent)))
    except Exception as error:  # whatever the object at fault raises
        named = {**values, **{f"self.{name}": value for name, value in attributes.items()}}
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


def _read_end(item: pytest.Item, path: Path) -> RankOutcome:
    """How a rank ended, with the failure as its own pytest shows it."""
    end = json.loads(path.read_text())
    report = end.pop("report")
    if report is not None:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=report)
    kind, shown = EndKind[end.pop("kind")], report and report.longrepr
    return RankOutcome(kind, **end, shown=shown)
