"""What other ranks are told of the exception that ends a rank."""

from __future__ import annotations

from echelon.diagnosis.failure_record import exit_text, origin_of
from echelon.errors.message_text import message_of
from echelon.process.process_end import exit_code_of


def cause_of(error: BaseException) -> str:
    """What a rank did that failed with ``error``, or before it, as it reads after its name.

    Example:
        >>> cause_of(ValueError("boom")), cause_of(KeyboardInterrupt()), cause_of(SystemExit(3))
        ('raised ValueError: boom', 'raised KeyboardInterrupt', 'exited with code 3')
    """
    if isinstance(error, SystemExit):
        return exit_text(exit_code_of(error))
    error = origin_of(error)
    return f"raised {type(error).__name__}: {message_of(error)}".removesuffix(": ")
