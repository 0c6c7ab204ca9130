"""The options of ``echelon replay``; torch is imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay_with(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run with an ec.Blackbox.")
    ],
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
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also if the script or a version has changed.")
    ] = False,
    shows_kept: Annotated[bool, typer.Option("--list", help="Show which steps were kept.")] = False,
    keeps: Annotated[
        bool, typer.Option("--keep", help="Keep the newest steps of a running job for good.")
    ] = False,
) -> None:
    """Compute a step of a run again, on simulated ranks of this process, bit for bit.

    The script of the run is executed again, with its arguments. Leaves with 1 if the step does not
    do what it did in the run.
    """
    from echelon.cli import replay_command
    from echelon.errors import ArgumentError, BlackboxError, StateError

    request = replay_command.ReplayRequest(
        run=run, step=step, rank=rank, opens_pdb=opens_pdb, batch_of=batch_of, anyway=anyway
    )
    try:
        if shows_kept or keeps:
            look = replay_command.show_kept if shows_kept else replay_command.keep_newest
            raise typer.Exit(look(run))
        raise typer.Exit(replay_command.show(request))
    except (ArgumentError, BlackboxError, StateError) as error:
        raise typer.BadParameter(str(error)) from error
