"""``echelon schedule``: a table of the schedules for a size, or the drawing of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from echelon.cli.output import say
from echelon.errors import ArgumentError
from echelon.pipeline.schedules.choose import Choice, ChoiceRow, choose
from echelon.pipeline.schedules.families import FAMILIES, schedule
from echelon.pipeline.schedules.render import to_page, to_svg, to_text
from echelon.pipeline.schedules.simulate import Simulation, simulate


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """The arguments of the command line, as they were written.

    Attributes:
        name: the name of a schedule; None for the table of all.
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        chunks: a number, or several with commas between them.
        costs: pairs such as ``F=1`` with commas between them.
        hop: the time of a message.
        memory_cap: the most microbatches that may be alive on a rank.
        options: the options of the schedule, each as ``k=2``.
        files: the paths of the files to write, by format.
    """

    name: str | None
    ranks: int
    microbatches: int
    chunks: str | None
    costs: str
    hop: float
    memory_cap: float | None
    options: tuple[str, ...]
    files: Mapping[str, Path | None]


def show(request: ScheduleRequest) -> int:
    """Print the table or the drawing and write the files; returns 1 without a recommendation."""
    costs = {name: float(_number(text, "--costs")) for name, text in _pairs(request.costs)}
    costs["hop"] = request.hop
    if request.name is not None:
        simulation = _named(request, costs)
    else:
        if request.options:
            raise ArgumentError("--option belongs to one schedule; give its NAME too")
        chunks = [_whole(text, "--chunks") for text in (request.chunks or "1,2,4").split(",")]
        choice = choose(
            request.ranks,
            request.microbatches,
            chunks=chunks,
            costs=costs,
            memory_cap=request.memory_cap,
        )
        _print_table(request, choice)
        if choice.recommended is None:
            return 1
        simulation = choice.recommended.simulation
    write_files(request.files, partial(_file, simulation), simulation.schedule.name)
    return 0


def write_files(files: Mapping[str, Path | None], drawn: Callable[[str], str], what: str) -> None:
    """Write the files that were asked for.

    Args:
        files: their paths, by format.
        drawn: gives the text of a format.
        what: is in them, for the user.
    """
    for form, path in files.items():
        if path is None:
            continue
        try:
            path.write_text(drawn(form))
        except OSError as error:
            raise ArgumentError(
                f"--{form} is {path}, which cannot be written: {error.strerror}; give a file in a "
                "folder that is there"
            ) from error
        say(f"{what} is in {path}", err=True)  # what a program reads stays JSON


def _named(request: ScheduleRequest, costs: dict[str, float]) -> Simulation:
    """Simulate the schedule with the requested name, and draw it."""
    assert request.name is not None
    family = FAMILIES.get(request.name)
    usual = (family.chunks or 2) if family is not None else 1
    chunks = usual if request.chunks is None else _whole(request.chunks, "--chunks")
    options: dict[str, int | bool] = {}
    for name, text in (pair for option in request.options for pair in _pairs(option)):
        number = _whole(text, "--option")
        options[name] = bool(number) if name == "fused" else number
    chosen = schedule(
        request.name, request.ranks * chunks, request.microbatches, request.ranks, **options
    )
    by_stage = {name: cost / (1 if name == "hop" else chunks) for name, cost in costs.items()}
    simulation = simulate(chosen, by_stage)
    if request.memory_cap is not None and max(simulation.peak) > request.memory_cap:
        raise ArgumentError(
            f"{request.name} keeps {max(simulation.peak):g} microbatches alive on a rank, more "
            f"than --memory-cap {request.memory_cap:g}"
        )
    try:
        say(to_text(simulation.timeline))
    except ArgumentError:  # it is too wide for a terminal; the lists without times fit
        say(str(chosen))
    peaks = ", ".join(f"{peak:g}" for peak in simulation.peak)
    say(
        f"time {simulation.makespan:.4g}, bubble {simulation.span_bubble:.2%} "
        f"(own {simulation.own_bubble:.2%}), peak by rank: {peaks}"
    )
    return simulation


def _print_table(request: ScheduleRequest, choice: Choice) -> None:
    title = f"{request.ranks} ranks, {request.microbatches} microbatches"
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("")
    table.add_column("schedule", no_wrap=True)
    for column in ("time", "bubble", "own bubble", "peak", "messages"):
        table.add_column(column, justify="right")
    for row in choice.rows:
        table.add_row(*_cells(row, choice), style=None if row.fits else "dim")
    console = Console()
    console.print(table)
    console.print(choice.reason, markup=False, highlight=False)


def _cells(row: ChoiceRow, choice: Choice) -> list[str]:
    simulation = row.simulation
    mark = "→" if row is choice.recommended else "" if row.fits else "over the cap"
    return [
        mark,
        str(row),
        f"{simulation.makespan:.4g}",
        f"{simulation.span_bubble:.2%}",
        f"{simulation.own_bubble:.2%}",
        f"{row.peak:g}",
        str(row.messages),
    ]


def _file(simulation: Simulation, form: str) -> str:
    if form == "csv":
        return simulation.schedule.to_csv()
    if form == "svg":
        return to_svg({"simulated": simulation.timeline})
    return to_page(simulation)


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for pair in text.split(","):
        name, equals, value = pair.strip().partition("=")
        if not (name and equals and value):
            raise ArgumentError(f"{text!r} is not written as NAME=NUMBER with commas between")
        pairs.append((name, value))
    return pairs


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"{where} has {text!r}; give a number") from None


def _whole(text: str, where: str) -> int:
    if not text.strip().isdecimal():
        raise ArgumentError(f"{where} has {text!r}; give a whole number")
    return int(text)
