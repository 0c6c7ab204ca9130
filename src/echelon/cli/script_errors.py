"""What a user's script raises in a command, shown without the frames of this library and torch."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from echelon.cli.output import say
from echelon.diagnosis.stacks import is_user_file
from echelon.errors import ArgumentError, UnsupportedError


@contextmanager
def telling_errors_of_script() -> Iterator[None]:
    """End a command with exit code 1 and the user's frames, where the block raises.

    Raises:
        ArgumentError, UnsupportedError: the command refuses what it was given.
    """
    try:
        yield
    except (ArgumentError, UnsupportedError, typer.Exit):
        raise
    except Exception as error:
        say(user_traceback(error).rstrip(), err=True)
        raise typer.Exit(1) from error


def user_traceback(error: BaseException) -> str:
    """An exception as Python prints it, with the user's frames, or all where there are none."""
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    while link is not None:
        if frames := [frame for frame in link.stack if _is_of_user(frame)]:
            link.stack = traceback.StackSummary.from_list(frames)
        link = link.__cause__ or link.__context__
    if isinstance(error, SyntaxError) and not any(map(_is_of_user, shown.stack)):
        return "".join(shown.format_exception_only())  # as of a script that Python cannot read
    return "".join(shown.format())


def _is_of_user(frame: traceback.FrameSummary) -> bool:
    return is_user_file(frame.filename)
