"""``echelon`` on the command line: start a script on many ranks, draw a run, check a machine.

Torch is imported only in a command that needs it, so that help and wrong options answer at once.

``run_command``           ``echelon run``: processes or simulated ranks of this machine
``script_errors``         what a user's script raises in a command
``running_jobs``          ``ps`` and ``look``
``race_command``          ``race``
``compare_command``       ``compare``
``replay_options``        ``replay``, whose work is in ``replay_command``
``plan_arguments``        ``plan``, whose work is in ``plan_command``
``script_check_command``  ``plan --check``
``what_if_command``       ``plan --scale`` and ``--mtbf``
``schedule_command``      ``schedule``
``schedule_check``        ``schedule check``
``checkpoint_commands``   ``checkpoint list``, ``verify``, ``convert`` and ``compare``
``doctor``                ``doctor``
``output``                what all of them print and refuse
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from echelon.cli.checkpoint_commands import app as checkpoints_app
from echelon.cli.output import printable_errors, refusing, refusing_places, say
from echelon.cli.plan_arguments import plan_with
from echelon.cli.race_command import race
from echelon.cli.replay_options import OptionsUntilProgram, replay_with
from echelon.cli.run_command import World, WorldKind, run_script
from echelon.errors import ArgumentError, UnsupportedError
from echelon.version import __version__

__all__ = ["app", "main"]


class CommandsOfTwoWords(typer.core.TyperGroup):
    """Finds the command ``schedule check``, which is no form of ``schedule NAME``.

    No schedule has the name of such a command; ``tests/cli/test_schedule_check.py`` checks it. The
    function of a command returns the exit code; None is 0.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take two words as the name of a command where there is one of that name."""
        two_words = " ".join(args[:2])
        if len(args) > 1 and two_words in self.commands:
            args = [two_words, *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it refuses may have come from a file of somebody else."""
        with printable_errors():
            code = super().invoke(ctx)
        raise typer.Exit(code or 0)


app = typer.Typer(
    cls=CommandsOfTwoWords,
    help="Train one PyTorch model on many ranks.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.add_typer(checkpoints_app, name="checkpoint")
# Options end at the program; what follows is the program's, dashes included.
app.command("replay", cls=OptionsUntilProgram, context_settings={"allow_interspersed_args": False})(
    replay_with
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"echelon {__version__}")
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


# Options end at the script; what follows is the script's, dashes included.
app.command("run", context_settings={"allow_interspersed_args": False})(run_script)
app.command("race", context_settings={"allow_interspersed_args": False})(race)


@app.command("report")
@refusing(ArgumentError)
def _report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/gpt.")],
    other: Annotated[
        Path | None, typer.Argument(help="Another run, to compare the first one with.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to write the page that compares two runs.")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            help="Send the run to this tracker instead: tensorboard, wandb, mlflow or trackio, "
            "each also with =PLACE; may be given several times."
        ),
    ] = None,
) -> None:
    """Draw the page of a run from its metrics.jsonl, or compare two runs, or send one to a tracker.

    Prints where the page is: report.html in FOLDER, or compared-with-FOLDER.html in OTHER. The run
    may still go on.
    """
    from echelon.observe.report import write_comparison, write_report
    from echelon.observe.trackers.tracking import send_run

    if to:
        if other is not None:
            raise typer.BadParameter("send each run by a command of its own", param_hint="--to")
        say(f"{', '.join(to)}: {send_run(folder, *to)} steps of {folder}")
        return
    if output is not None and other is None:
        raise typer.BadParameter("it is for the page of two runs", param_hint="--output")
    with refusing(ArgumentError, hint="FOLDER"), refusing_places():
        page = write_report(folder) if other is None else write_comparison(folder, other, output)
    say(page.resolve())


@app.command("schedule")
@refusing(ArgumentError)
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
        float | None,
        typer.Option(min=0, help="The most microbatches alive on a rank; 1F1B has --ranks."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Options of the schedule: factor=1, k=2, fused=1.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the actions of each rank here.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the simulated timeline here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with both and numbers.")] = None,
) -> int:
    """Compare pipeline schedules for a size, or draw one.

    Without NAME all schedules are simulated and one is recommended; --csv, --svg and --html then
    write the recommended one. PyTorch reads the same CSV.
    """
    from echelon.cli import schedule_command

    return schedule_command.show(
        name,
        ranks,
        microbatches,
        chunks=chunks,
        costs=costs,
        hop=hop,
        memory_cap=memory_cap,
        options=option or [],
        files={"csv": csv, "svg": svg, "html": html},
    )


app.command("plan")(plan_with)


@app.command("compare")
@refusing(ArgumentError, UnsupportedError)
def _compare(
    script: Annotated[
        str, typer.Argument(help="Defines make_model, batches, loss_fn, optimizer, and train.")
    ],
    plan: Annotated[
        list[str] | None,
        typer.Option(help="Compare this plan, such as pp=2,shard=2; may be given several times."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many ranks train() runs on. Default: 2.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="How many steps are compared.")] = 3,
    world: World = WorldKind.THREADS,
    clip: Annotated[
        float | None, typer.Option(help="Clip gradients to this norm: on one process, in a plan.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Of plans with pp > 1. Default: 2 for each stage.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the results.")] = None,
) -> int:
    """Train on ranks and on one process, and say where they first differ, and why.

    SCRIPT is run once, under another name than __main__. Without --plan its train(world, model,
    batches, optimizer) is compared, or its plan. Leaves with 1 if something is not the same.
    """
    from echelon.cli import compare_command

    options: dict[str, Any] = {"ranks": ranks, "steps": steps, "world": world.value, "clip": clip}
    return compare_command.show(script, plan or [], microbatches, html, **options)


@app.command("ps")
def _ps() -> int:
    """Show the jobs of this host, and of every rank: step, memory, what it does, and last call."""
    from echelon.cli import running_jobs

    return running_jobs.show_jobs()


@app.command("look")
def _look(
    run: Annotated[int, typer.Argument(help="The job of echelon ps, or the pid of a rank.")],
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Also ask every rank for its Python stack.")
    ] = False,
) -> int:
    """Show one running job: who waits for whom, in which call, and with --stacks where."""
    from echelon.cli import running_jobs

    return running_jobs.show_job(run, with_stacks=stacks)


@app.command("schedule check")
@refusing(ArgumentError)
def _schedule_check(
    file: Annotated[str, typer.Argument(help="A CSV or printed lists; - is the standard input.")],
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="Judge under this rule, also several times: blocking, eager, pair-queue, "
            "rank-queue. Default: the first three."
        ),
    ] = None,
    batched: Annotated[
        bool, typer.Option("--batched", help="Sends and receives in a row are one batch.")
    ] = False,
) -> int:
    """Say whether a pipeline schedule that anybody wrote is legal, and who waits for whom.

    FILE has the actions of each rank: PyTorch's CSV, with or without sends and receives, or lists
    as they are printed. Exit code 0: legal under each rule. 1: not legal. 2: FILE cannot be read.
    """
    from echelon.cli import schedule_check

    return schedule_check.show(file, rule, batched=batched)


# The names of functions must not be those of the modules beside this file.
@app.command("doctor")
def _doctor() -> int:
    """Check this machine: what echelon can use, and what is missing."""
    from echelon.cli.doctor import examine

    return examine()


def main() -> None:
    """Run the command line."""
    app()
