"""The commands of ``echelon checkpoint``, as typer shows them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="List, verify, convert and compare what ec.save() wrote.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class FormName(StrEnum):
    """What to convert to."""

    ECHELON = "echelon"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"


Folder = Annotated[
    Path, typer.Argument(exists=True, file_okay=False, help="The folder of a run, or of a step.")
]


@app.command("ls")
def _ls(folder: Folder) -> None:
    """List the steps of a run."""
    from echelon.cli import checkpoint_text

    _run(lambda: checkpoint_text.list_steps(folder))


@app.command("verify")
def _verify(folder: Folder) -> None:
    """Compare every byte of each step with its checksum."""
    from echelon.cli import checkpoint_text

    _run(lambda: checkpoint_text.verify_steps(folder))


@app.command("convert")
def _convert(
    source: Annotated[
        Path,
        typer.Argument(
            exists=True, help="A run, a step, .safetensors, a folder of them, a DCP, or a .pt file."
        ),
    ],
    target: Annotated[Path, typer.Argument(help="What to write; its ending may say the form.")],
    to: Annotated[FormName | None, typer.Option(help="The form, if the ending does not.")] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Of the source, or of the target; newest, and 0.")
    ] = None,
    section: Annotated[str | None, typer.Option(help="Which model, if there are several.")] = None,
    weights_only: Annotated[bool, typer.Option(help="No optimizer and no values.")] = False,
    shard_mib: Annotated[
        int | None, typer.Option(min=1, help="Safetensors in shards of so many MiB, and an index.")
    ] = None,
    trust_pickle: Annotated[
        bool, typer.Option(help="Read a DCP: its metadata are a pickle, which can run any code.")
    ] = False,
) -> None:
    """Write a state in another form; what was written is read again and compared."""
    from echelon.checkpoint.convert.convert import ConvertOptions, Form
    from echelon.cli import checkpoint_text

    options = ConvertOptions(
        to=None if to is None else Form(to.value),
        step=step,
        section=section,
        weights_only=weights_only,
        shard_nbytes=None if shard_mib is None else shard_mib << 20,
        trust_pickle=trust_pickle,
    )
    _run(lambda: checkpoint_text.convert_state(source, target, options))


@app.command("diff")
def _diff(one: Folder, other: Folder) -> None:
    """Say how two steps differ; of a run, the newest."""
    from echelon.cli import checkpoint_text

    _run(lambda: checkpoint_text.compare_steps(one, other))


def _run(command: Callable[[], int]) -> None:
    """Run a command; what cannot be done is a sentence and exit code 2."""
    from echelon.errors import ArgumentError, CheckpointError
    from echelon.errors.message_text import printable

    try:
        code = command()
    except (ArgumentError, CheckpointError, OSError) as error:
        typer.echo(printable(f"echelon checkpoint: {error}"), err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)
