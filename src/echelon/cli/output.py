"""What commands print and refuse: texts that may be others', which a terminal must not obey."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from echelon.errors.message_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text


_REFUSAL: type[Exception] = typer.BadParameter.__mro__[2]  # of click, which typer carries


def say(text: object, *, err: bool = False) -> None:
    """Print a text; all commands print by this, or cells of a table by ``cell``."""
    typer.echo(printable(str(text)), err=err)


def cell(text: object) -> Text:
    """The cell of a table, in which nothing is markup or a sign for the terminal."""
    from rich.text import Text

    return Text(printable(str(text)))


@contextmanager
def printable_errors() -> Iterator[None]:
    """Let what a command raises about its arguments, files and folders be printable."""
    try:
        yield
    except Exception as error:
        if isinstance(error, _REFUSAL):
            error.message = printable(error.message)  # type: ignore[attr-defined]
        raise


@contextmanager
def refusing(*errors: type[Exception], hint: str | None = None) -> Iterator[None]:
    """Let these errors end a command as wrong usage of it; also a decorator of a whole command.

    Args:
        hint: the option or argument that is wrong, where it is known.
    """
    try:
        yield
    except errors as error:
        raise typer.BadParameter(str(error), param_hint=hint) from error


@contextmanager
def refusing_places() -> Iterator[None]:
    """Let a file that cannot be written end a command as wrong usage of it."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(
            f"{error.filename} cannot be written: {error.strerror}; name a file in a folder that "
            "is there"
        ) from error


__all__ = ["cell", "printable_errors", "refusing", "refusing_places", "say"]
