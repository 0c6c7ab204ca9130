"""``echelon schedule``: a table of the schedules for a size, or the drawing of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def show(
    name: str | None,
    ranks: int,
    microbatches: int,
    *,
    chunks: str | None,
    costs: str,
    hop: float,
    memory_cap: float | None,
    options: Sequence[str],
    files: Mapping[str, Path | None],
) -> int:
    """Print the table or the drawing and write the files; returns 1 without a recommendation."""
    times = {part: float(_number(text, "--costs")) for part, text in _pairs(costs)} | {"hop": hop}
    if name is not None:
        simulation = _named(name, ranks, microbatches, chunks, times, options)
        if memory_cap is not None and max(simulation.peak) > memory_cap:
            raise ArgumentError(
                f"{name} keeps {max(simulation.peak):g} microbatches alive on a rank, more than "
                f"--memory-cap {memory_cap:g}"
            )
        _print_drawing(simulation)
    else:
        if options:
            raise ArgumentError("--option belongs to one schedule; give its NAME too")
        numbers = [_whole(text, "--chunks") for text in (chunks or "1,2,4").split(",")]
        choice = choose(ranks, microbatches, chunks=numbers, costs=times, memory_cap=memory_cap)
        _print_table(f"{ranks} ranks, {microbatches} microbatches", choice)
        if choice.recommended is None:
            return 1
        simulation = choice.recommended.simulation
    write_files(files, partial(_file, simulation), simulation.schedule.name)
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
            path.write_text(drawn(form), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(
                f"--{form} is {path}, which cannot be written: {error.strerror}; give a file in a "
                "folder that is there"
            ) from error
        say(f"{what} is in {path}", err=True)  # what a program reads stays JSON


def _named(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: str | None,
    times: Mapping[str, float],
    options: Sequence[str],
) -> Simulation:
    """Simulate the schedule of this name."""
    family = FAMILIES.get(name)
    usual = (family.chunks or 2) if family is not None else 1
    num_chunks = usual if chunks is None else _whole(chunks, "--chunks")
    values: dict[str, int | bool] = {}
    for option, text in (pair for pairs in options for pair in _pairs(pairs)):
        number = _whole(text, "--option")
        values[option] = bool(number) if option == "fused" else number
    chosen = schedule(name, ranks * num_chunks, microbatches, ranks, **values)
    by_stage = {part: time / (1 if part == "hop" else num_chunks) for part, time in times.items()}
    return simulate(chosen, by_stage)


def _print_drawing(simulation: Simulation) -> None:
    try:
        say(to_text(simulation.timeline))
    except ArgumentError:  # it is too wide for a terminal; the lists without times fit
        say(str(simulation.schedule))
    peaks = ", ".join(f"{peak:g}" for peak in simulation.peak)
    say(
        f"time {simulation.makespan:.4g}, bubble {simulation.span_bubble:.2%} "
        f"(own {simulation.own_bubble:.2%}), peak by rank: {peaks}"
    )


def _print_table(title: str, choice: Choice) -> None:
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
