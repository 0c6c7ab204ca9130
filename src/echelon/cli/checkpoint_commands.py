"""``echelon checkpoint``: list, verify, convert and compare what was saved.

Modules that need torch are imported where they are used, so that help and wrong options answer at
once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.output import cell, say
from echelon.errors import (
    ArgumentError,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointTooNew,
)

if TYPE_CHECKING:
    from rich.console import Console

    from echelon.checkpoint.step_storage import Place

_MAX_ROWS = 40  # differences or names that are printed

app = typer.Typer(
    help="List, verify, convert and compare what ec.save() wrote.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class FormName(StrEnum):
    """The forms of a checkpoint that ``convert`` writes."""

    ECHELON = "echelon"
    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"


Folder = Annotated[
    str, typer.Argument(help="The folder of a run, or of a step; or its URL in an object store.")
]


@contextmanager
def _told() -> Iterator[None]:
    """Print an error as a sentence, and end with exit code 2."""
    try:
        yield
    except (ArgumentError, CheckpointError, OSError) as error:
        say(f"echelon checkpoint: {error}", err=True)
        raise typer.Exit(2) from error


@app.command("ls")
@_told()
def _ls(folder: Folder) -> int:
    """List the steps of a run."""
    from rich import box
    from rich.table import Table

    from echelon.checkpoint.convert.convert import steps_at
    from echelon.checkpoint.saved_step import SavedStep
    from echelon.page import bytes_text

    table = Table(box=box.MARKDOWN)
    for name in ("step", "ranks", "tensors", "size", "torch", "holds"):
        table.add_column(name, overflow="fold")
    code = 0
    for path in steps_at(_place(folder)):
        try:
            with SavedStep(path) as step:
                manifest = step.manifest
                row = (
                    str(manifest.step),
                    str(manifest.world["size"]),
                    f"{len(manifest.tensors):,}",
                    bytes_text(sum(file.nbytes for file in manifest.files)),
                    manifest.versions.get("torch", ""),
                    ", ".join(sorted(step.sections)),
                )
        except (CheckpointCorrupt, CheckpointTooNew) as error:
            row = (path.name, "", "", "", "", _unread(error))
            code = 1
        table.add_row(*map(cell, row))  # somebody else may have written the files
    _console().print(table)
    return code


@app.command("verify")
@_told()
def _verify(folder: Folder) -> int:
    """Compare every byte of each step with its checksum."""
    from echelon.checkpoint.convert.convert import steps_at
    from echelon.checkpoint.saved_step import SavedStep

    code = 0
    for path in steps_at(_place(folder)):
        try:
            with SavedStep(path) as step:
                step.verify()
            say(f"{path.name}: whole")
        except (CheckpointCorrupt, CheckpointTooNew) as error:
            say(f"{path.name}: {_unread(error)}")
            code = 1
    return code


@app.command("convert")
@_told()
def _convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A run or a step, also in an object store; .safetensors, a folder of them, a DCP, "
            "or a .pt file."
        ),
    ],
    target: Annotated[
        str, typer.Argument(help="The path or URL to write; its suffix may give the form.")
    ],
    to: Annotated[FormName | None, typer.Option(help="The form, if the suffix gives none.")] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="The step: of the source (default: the newest) or target (0)."),
    ] = None,
    section: Annotated[str | None, typer.Option(help="The model, if there are several.")] = None,
    weights_only: Annotated[bool, typer.Option(help="Leave out optimizer and values.")] = False,
    shard_mib: Annotated[
        int | None, typer.Option(min=1, help="Write safetensors in shards of so many MiB.")
    ] = None,
    trust_pickle: Annotated[
        bool, typer.Option(help="Read a DCP: its metadata are a pickle, which can run any code.")
    ] = False,
) -> None:
    """Write a state in another form; what was written is read again and compared."""
    from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
    from echelon.checkpoint.place import place_of

    options = ConvertOptions(
        to=None if to is None else Form(to.value),
        step=step,
        section=section,
        weights_only=weights_only,
        shard_nbytes=None if shard_mib is None else shard_mib << 20,
        trust_pickle=trust_pickle,
    )
    done = convert(_place(source, is_folder=False), place_of(target), options)
    for path in done.written:
        say(f"wrote {path}")
    if done.left_out:
        more = len(done.left_out) - _MAX_ROWS
        names = ", ".join(done.left_out[:_MAX_ROWS]) + (f" and {more} more" if more > 0 else "")
        say(f"left out: {names}")


@app.command("diff")
@_told()
def _diff(first: Folder, second: Folder) -> int:
    """Say how two steps differ; for the folder of a run, its newest step."""
    from echelon.checkpoint.convert.convert import step_at
    from echelon.checkpoint.saved_step import SavedStep, differences

    with ExitStack() as stack:
        places = [_place(first), _place(second)]
        steps = [stack.enter_context(SavedStep(step_at(place))) for place in places]
        for step in steps:
            step.verify()
        rows = list(differences(*steps))
    for name, what in rows[:_MAX_ROWS]:
        say(f"{name}: {what}")
    if len(rows) > _MAX_ROWS:
        say(f"and {len(rows) - _MAX_ROWS} more")
    if not rows:
        say("the same")
    return 1 if rows else 0


def _unread(error: CheckpointCorrupt | CheckpointTooNew) -> str:
    """Why a step cannot be read."""
    return f"{'damaged' if isinstance(error, CheckpointCorrupt) else 'not known here'}: {error}"


def _place(text: str, *, is_folder: bool = True) -> Place:
    """What a user names, which is there; a store is asked later."""
    from echelon.checkpoint.place import place_of

    place = place_of(text)
    if isinstance(place, Path) and not place.exists():
        raise typer.BadParameter(f"{'Folder' if is_folder else 'Path'} {text!r} does not exist.")
    if isinstance(place, Path) and is_folder and not place.is_dir():
        raise typer.BadParameter(
            f"{text!r} is a file, and not the folder of a run or of a step: make one of it by "
            "'echelon checkpoint convert FILE FOLDER'."
        )
    return place


def _console() -> Console:
    from rich.console import Console

    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
