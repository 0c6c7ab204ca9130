"""``echelon`` on the command line: start a script on many ranks, draw a run, check a machine.

Torch is imported only in a command that needs it, so that help and wrong options answer at once.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.checkpoint_commands import app as checkpoints_app
from echelon.launch.program import Launch, Program
from echelon.process import time_limits
from echelon.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    help="Train one PyTorch model on many ranks.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.add_typer(checkpoints_app, name="checkpoint")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"echelon {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train one PyTorch model on many ranks."""


class WorldKind(StrEnum):
    """The kinds of ranks of ``echelon run``."""

    PROCESSES = "processes"
    THREADS = "threads"


Ranks = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many ranks to start; without it, those of a --plan among ARGUMENTS."
    ),
]
World = Annotated[
    WorldKind,
    typer.Option(help="Processes of this host, or simulated ranks: threads of one process."),
]
LogDir = Annotated[
    Path | None,
    typer.Option(help="Keep what the processes print here; otherwise only after a failure."),
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="How often all ranks start again after a failure.")
]
Grace = Annotated[
    float | None,
    typer.Option(
        min=0, help="Seconds to save and leave after a signal, before ranks are killed. Default: 5."
    ),
]
Timeout = Annotated[
    float | None, typer.Option(min=0.001, help="Seconds that a rank waits for others in one call.")
]


Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
]
Tee = Annotated[
    bool, typer.Option("--tee", help="Show what all ranks print, each line with its rank.")
]


# Options end at the script; what follows is the script's, dashes included.
@app.command("run", context_settings={"allow_interspersed_args": False})
def _run(
    script: Annotated[str, typer.Argument(help="A Python script; with -m, the name of a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="For the script.")
    ] = None,
    ranks: Ranks = None,
    world: World = WorldKind.PROCESSES,
    log_dir: LogDir = None,
    max_restarts: MaxRestarts = 0,
    grace: Grace = None,
    timeout: Timeout = None,
    module: Module = False,
    tee: Tee = False,
    show_command: Annotated[
        bool, typer.Option("--print", help="Show the command that does it and start nothing.")
    ] = False,
) -> None:
    """Run SCRIPT on many ranks of this machine.

    The script gets its world from echelon.init(). Processes are started and ended by torch's
    agent, and what rank 0 prints is shown; --tee shows what all print. Simulated ranks all print to
    the same place.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the ranks. A script with ec.StopSignals saves on
    SIGTERM and SIGUSR1 and leaves with exit code 75; this command then leaves with 75, too, and
    the same command resumes the job. Ctrl-C (SIGINT) ends the ranks without saving, unless the
    script catches it.
    """
    ranks = _num_ranks(ranks, arguments or [])
    program = Program(script, is_module=module)
    if (problem := program.problem()) is not None:
        raise typer.BadParameter(problem, param_hint="SCRIPT")
    if world is WorldKind.THREADS:
        _refuse_for_threads(
            {
                "--print": show_command,
                "--log-dir": log_dir is not None,
                "--max-restarts": max_restarts > 0,
                "--grace": grace is not None,
            }
        )
        from echelon.launch.simulated_job import run_threads

        raise typer.Exit(run_threads(program, arguments or [], ranks, timeout, tee=tee))
    from echelon.launch import local_job

    launch = Launch(
        program=program,
        arguments=tuple(arguments or ()),
        ranks=ranks,
        log_dir=log_dir,
        max_restarts=max_restarts,
        grace=time_limits.SAVE_S if grace is None else grace,
        timeout=timeout,
        tee=tee,
    )
    if show_command:
        typer.echo(launch.shown())
        return
    raise typer.Exit(local_job.run_processes(launch))


def _refuse_for_threads(given: dict[str, bool]) -> None:
    """Refuse an option that was given and is only for processes."""
    for option, was_given in given.items():
        if was_given:
            raise typer.BadParameter(
                "simulated ranks are threads of this process and need no agent: "
                "use it with --world processes",
                param_hint=option,
            )


def _num_ranks(ranks: int | None, arguments: list[str]) -> int:
    """The number of ranks to start, from --ranks or from a plan among the script's arguments."""
    from echelon.errors import ArgumentError
    from echelon.plan.axes import axes_of

    plans = [after for name, after in pairwise(arguments) if name == "--plan"]
    prefix = "--plan="
    plans += [text.removeprefix(prefix) for text in arguments if text.startswith(prefix)]
    if not plans:
        if ranks is None:
            raise typer.BadParameter(
                "say how many, or give the script a --plan such as pp=2,shard=2",
                param_hint="--ranks",
            )
        return ranks
    try:
        planned = prod(axes_of(plans[-1]).values())
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--plan") from error
    if ranks is not None and ranks != planned:
        raise typer.BadParameter(
            f"it is {ranks}, and --plan {plans[-1]} is for {planned}: leave --ranks out, or change "
            "one of them",
            param_hint="--ranks",
        )
    return planned


@app.command("report")
def _report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/gpt.")],
) -> None:
    """Draw report.html again from a run's metrics.jsonl."""
    from echelon.errors import ArgumentError
    from echelon.observe.report import write_report

    try:
        page = write_report(folder)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="FOLDER") from error
    if page is None:
        raise typer.Exit(1)
    typer.echo(page)


@app.command("schedule")
def _schedule(
    name: Annotated[
        str | None, typer.Argument(help="The schedule to draw; without it, a table of all.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks.")] = ...,  # type: ignore[assignment]
    microbatches: Annotated[int, typer.Option(help="How many parts of the batch.")] = ...,  # type: ignore[assignment]
    chunks: Annotated[
        str | None, typer.Option(help="Stages per rank: a number, or for the table several: 1,2,4.")
    ] = None,
    costs: Annotated[
        str, typer.Option(help="Times of one microbatch on a rank's whole share of the model.")
    ] = "F=1,B=2",
    hop: Annotated[float, typer.Option(help="Time of a message, in the unit of the costs.")] = 0.0,
    memory_cap: Annotated[
        float | None, typer.Option(help="The most microbatches alive on a rank; 1F1B has --ranks.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Options of the schedule: factor=1, k=2, fused=1.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the actions of each rank here.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the simulated timeline here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with both and numbers.")] = None,
) -> None:
    """Compare pipeline schedules for a size, or draw one.

    Without NAME all schedules are simulated and one is recommended; --csv, --svg and --html then
    write the recommended one. PyTorch reads the same CSV.
    """
    from echelon.cli import schedule_command
    from echelon.errors import ArgumentError

    request = schedule_command.ScheduleRequest(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        costs=costs,
        hop=hop,
        memory_cap=memory_cap,
        options=tuple(option or ()),
        files={"csv": csv, "svg": svg, "html": html},
    )
    try:
        raise typer.Exit(schedule_command.show(request))
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error


# The names of functions must not be those of the modules beside this file.
@app.command("doctor")
def _doctor() -> None:
    """Check this machine: what echelon can use, and what is missing."""
    from echelon.cli.doctor import examine

    raise typer.Exit(examine())


def main() -> None:
    """Run the command line."""
    app()
