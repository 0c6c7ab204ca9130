"""``echelon run``: start a script on many ranks of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.checks import integer
from echelon.cli.output import refusing, say
from echelon.errors import ArgumentError, UnsupportedError
from echelon.launch.program import MOST_RANKS, Launch, Program
from echelon.process import time_limits
from echelon.process.operating_system import require_linux


class RulesName(StrEnum):
    """The rules of simulated ranks that can be asked for."""

    NCCL = "nccl"


class WorldKind(StrEnum):
    """The kinds of ranks of ``echelon run``."""

    PROCESSES = "processes"
    THREADS = "threads"


Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        "-n",
        min=1,
        max=MOST_RANKS,
        help="How many ranks to start; without it, those of a --plan among ARGUMENTS.",
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
        min=0,
        max=threading.TIMEOUT_MAX,
        help="Seconds to save and leave after a signal, before ranks are killed. Default: 5.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=threading.TIMEOUT_MAX,
        help="Seconds that a rank waits for others in one call.",
    ),
]


Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
]
Tee = Annotated[
    bool, typer.Option("--tee", help="Show what all ranks print, each line with its rank.")
]
Step = Annotated[
    bool,
    typer.Option(
        "--step",
        help="Hold simulated ranks after each collective, show what moved, and ask how to go on.",
    ),
]


Rules = Annotated[
    RulesName | None,
    typer.Option(
        help="Let simulated ranks wait for one another as over NCCL, to find hangs that only NCCL "
        "has: messages match by their order, first uses block, one queue serves a rank."
    ),
]


ShowCommand = Annotated[
    bool, typer.Option("--print", help="Show the command that does it and start nothing.")
]


def run_script(
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
    step: Step = False,
    rules: Rules = None,
    show_command: ShowCommand = False,
) -> int:
    """Run SCRIPT on many ranks of this machine.

    The script gets its world from echelon.init(). Processes are started and ended by torch's
    agent, and what rank 0 prints is shown; --tee shows what all print. Simulated ranks print to one
    place and take turns: each uses all cores until it waits for others.

    SIGTERM, SIGINT and SIGUSR1 are passed on to the ranks. A script with ec.StopSignals saves on
    SIGTERM and SIGUSR1 and leaves with exit code 75, and so does this command, which then resumes
    the job. Ctrl-C (SIGINT) ends the ranks without saving, unless the script catches it.
    """
    ranks = _num_ranks(ranks, arguments or [])
    program = Program(script, is_module=module)
    if (problem := program.problem()) is not None:
        raise typer.BadParameter(problem, param_hint="SCRIPT")
    of_processes = {
        "--print": show_command,
        "--log-dir": log_dir is not None,
        "--max-restarts": max_restarts > 0,
        "--grace": grace is not None,
    }
    of_threads = {"--step": step, "--rules": rules is not None}
    _refuse_for(world, of_processes, of_threads)
    if world is WorldKind.THREADS:
        from echelon.launch.simulated_job import run_threads

        run = partial(run_threads, tee=tee, rules=rules and rules.value)
        run_ranks = _step_through if step else None
        return run(program, arguments or [], ranks, timeout, run_ranks=run_ranks)
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
        say(launch.shown())
        return 0
    from echelon.launch import local_job
    from echelon.launch.rank_output import RunFolder

    with refusing(ArgumentError, hint="--log-dir"):
        folder = RunFolder(log_dir)
    return local_job.run_processes(launch, folder)


def _step_through(fn: Callable[..., Any], ranks: int, **options: Any) -> None:
    from echelon.laboratory.step_through import step_through

    step_through(fn, ranks, **options).interact()


def _refuse_for(
    world: WorldKind, of_processes: dict[str, bool], of_threads: dict[str, bool]
) -> None:
    """Refuse ranks that this system has not, and options that are for the other kind of ranks."""
    if world is WorldKind.PROCESSES:
        with refusing(UnsupportedError, hint="--world"):
            require_linux("worlds of processes")
    given, sentences = of_threads, dict.fromkeys(of_threads, "it is for --world threads")
    sentences["--step"] = "it holds simulated ranks: use it with --world threads"
    if world is WorldKind.THREADS:
        given = of_processes
        sentences = dict.fromkeys(
            of_processes,
            "simulated ranks are threads of this process and need no agent: "
            "use it with --world processes",
        )
    for option, was_given in given.items():
        if was_given:
            raise typer.BadParameter(sentences[option], param_hint=option)


def _num_ranks(ranks: int | None, arguments: list[str]) -> int:
    """The number of ranks to start, from --ranks or from a plan among the script's arguments."""
    from echelon.plans.axes import axes_of, plan_argument

    text = plan_argument(arguments)
    if text is None:
        if ranks is None:
            raise typer.BadParameter(
                "say how many, or give the script a --plan such as pp=2,shard=2",
                param_hint="--ranks",
            )
        return ranks
    with refusing(ArgumentError, hint="--plan"):
        planned = integer("ranks", prod(axes_of(text).values()), low=1, high=MOST_RANKS)
    if ranks is not None and ranks != planned:
        raise typer.BadParameter(
            f"it is {ranks}, and --plan {text} is for {planned}: leave --ranks out, or change "
            "one of them",
            param_hint="--ranks",
        )
    return planned
