"""What commands print: text that may be somebody else's, which a terminal must not obey."""

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


__all__ = ["cell", "printable_errors", "say"]
