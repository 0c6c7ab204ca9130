"""The options of ``echelon replay``; torch is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from echelon.cli.output import refusing
from echelon.errors import ArgumentError, BlackboxError, StateError


class OptionsUntilProgram(typer.core.TyperCommand):
    """Takes options before and after RUN; from PROGRAM on, all words are the program's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put RUN behind the options, so that options end at PROGRAM."""
        run = self._arguments(ctx, args)
        if run:
            before, after = args[: len(args) - len(run)], args[len(args) - len(run) + 1 :]
            program = self._arguments(ctx, [*before, *after])
            options = after[: len(after) - len(program)]
            args = [*before, *options, run[0], *program]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def _arguments(self, ctx: Any, args: list[str]) -> list[str]:
        """The words from the first on that is neither an option nor the value of one."""
        values, *_ = self.make_parser(ctx).parse_args(list(args))
        words = values["run"], values["program"], *(values["arguments"] or ())
        return [word for word in words if isinstance(word, str)]


Module = Annotated[
    bool, typer.Option("-m", "--module", help="PROGRAM is a module, as in python -m.")
]
Function = Annotated[
    str, typer.Option(help="The function of PROGRAM that it gives to ec.run, if it does.")
]
Anyway = Annotated[
    bool,
    typer.Option("--anyway", help="Also if the script, its arguments or a version has changed."),
]


@refusing(ArgumentError, BlackboxError, StateError)
def replay_with(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run with an ec.Blackbox.")
    ],
    program: Annotated[
        str | None,
        typer.Argument(help="The script of the run; with -m, the name of a module."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="For the program.")
    ] = None,
    module: Module = False,
    function: Function = "",
    step: Annotated[
        int | None, typer.Option(min=1, help="Default: the last one that all ranks have begun.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Show what this rank prints and raises.")
    ] = None,
    opens_pdb: Annotated[
        bool, typer.Option("--pdb", help="Open the debugger where the rank ended.")
    ] = False,
    batch_of: Annotated[
        int | None, typer.Option(min=1, help="Give the step the batch of another kept step.")
    ] = None,
    anyway: Anyway = False,
    shows_kept: Annotated[bool, typer.Option("--list", help="Show which steps were kept.")] = False,
    keeps: Annotated[
        bool, typer.Option("--keep", help="Keep the newest steps of a running job for good.")
    ] = False,
) -> int:
    """Compute a step of a run again, on simulated ranks of this process, bit for bit.

    PROGRAM is executed with ARGUMENTS; nothing that RUN names is. Options stand before PROGRAM.
    Leaves with 1 if the step does not do what it did in the run.
    """
    from echelon.cli import replay_command
    from echelon.laboratory.replayed_program import NamedProgram
    from echelon.launch.program import Program

    if shows_kept or keeps:
        return replay_command.show_kept(run) if shows_kept else replay_command.keep_newest(run)
    named = None
    if program is not None:
        words = tuple(arguments or ())
        named = NamedProgram(program=Program(program, module), function=function, arguments=words)
    return replay_command.show(
        run,
        named,
        step=step,
        rank=rank,
        opens_pdb=opens_pdb,
        batch_of=batch_of,
        anyway=anyway,
    )
