"""Checks of the arguments of public calls.

Each function refuses a value by an ``ArgumentError`` that names the argument and the value, and
says what to give instead. Those that read numbers return them as Python's own. This module imports
no torch, so that schedules need none.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from echelon.errors import ArgumentError, RankError

# How gradients of several ranks become one: their mean, their sum, or their sum over a number.
Reduction = Literal["mean", "sum"] | float

# Larger sizes overflow the addresses of a process once they are multiplied by an element's size.
MOST = 2**48
LARGEST = sys.float_info.max

# The text that says what to give, by the name of the class.
_GIVE = {
    "Channel": "one of echelon.pipeline.Channel",
    "Console": "a rich.console.Console",
    "Device": 'a Device, such as Device.preset("H100")',
    "Fault": "one of ec.testing.FAULTS, or ec.testing.slow(seconds)",
    "Group": "a Group, such as world.group",
    "HostMemory": "a HostMemory(...)",
    "MixedPrecision": "a MixedPrecision(...)",
    "Module": "a torch.nn.Module",
    "Optimizer": "a torch.optim.Optimizer",
    "Plan": "an ec.Plan, such as ec.Plan(dp=2)",
    "Rule": "a rule of ec.units",
    "RunInfo": "an ec.observe.RunInfo(...)",
    "Tensor": "a torch.Tensor",
    "Timeline": "the timeline of a simulation or measurement",
    "World": "the World that main() got",
    "device": "a torch.device",
    "dtype": "a torch.dtype",
    "str": "a text",
}


def integer(name: str, value: object, low: int = 0, high: int = MOST) -> int:
    """``value`` as an int, if it is a whole number with ``low <= value <= high``.

    Example:
        >>> integer("ranks", 4, low=1)
        4
        >>> integer("ranks", 0, low=1)
        Traceback (most recent call last):
        echelon.errors.ArgumentError: ranks is 0; give a whole number >= 1
    """
    try:
        index = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a tensor of several elements raises a ValueError
        index = None
    if index is None or index < low:
        raise ArgumentError(f"{name} is {value!r:.80}; give a whole number >= {low}")
    if index > high:
        raise ArgumentError(f"{name} is {value!r:.80}; give a whole number <= {high}")
    return index


def is_count(text: str) -> bool:
    """Whether a text is a whole number in digits, of so few that ``int`` reads them.

    Example:
        >>> is_count("4096"), is_count("4 k"), is_count("9" * 5000)
        (True, False, False)
    """
    return text.isascii() and text.isdigit() and len(text) <= len(str(MOST))


def integers(name: str, values: object) -> list[int]:
    """``values`` as a list of whole numbers >= 0."""
    if isinstance(values, str) or not isinstance(values, Sequence | range):
        raise ArgumentError(f"{name} is {values!r:.80}; give a list of whole numbers")
    return [integer(f"{name}[{i}]", value) for i, value in enumerate(values)]


def numbers(name: str, values: object, length: int) -> list[float]:
    """``values`` as a list of so many numbers >= 0; a single one counts for each.

    Example:
        >>> numbers("cap", 2, 3)
        [2.0, 2.0, 2.0]
    """
    if _number(values) is not None:
        return [number(name, values, 0.0)] * length
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ArgumentError(f"{name} is {values!r:.80}; give a number, or a list of {length}")
    if len(values) != length:
        raise ArgumentError(f"{name} has {len(values)} numbers; give {length}, or one for all")
    return [number(f"{name}[{i}]", value, 0.0) for i, value in enumerate(values)]


def number(name: str, value: object, low: float, high: float = LARGEST) -> float:
    """``value`` as a float, if it is a number with ``low <= value <= high``."""
    parsed = _number(value)
    if parsed is None or not low <= parsed <= high:
        raise ArgumentError(_limits(name, value, f"of at least {low:g}", high))
    return parsed


def positive(name: str, value: object, high: float = LARGEST) -> float:
    """``value`` as a float, if it is a number with ``0 < value <= high``.

    Example:
        >>> positive("timeout", 0)
        Traceback (most recent call last):
        echelon.errors.ArgumentError: timeout is 0; it must be a number > 0
    """
    parsed = _number(value)
    if parsed is None or not 0 < parsed <= high:
        raise ArgumentError(_limits(name, value, "> 0", high))
    return parsed


def _number(value: object) -> float | None:
    """``value`` as a float; None if it is not a number."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if known else None  # type: ignore[arg-type]
    except OverflowError:  # an int beyond all floats
        return math.nan


def _limits(name: str, value: object, low: str, high: float) -> str:
    up_to = "" if high >= LARGEST else f", up to {high:.10g}"
    return f"{name} is {value!r:.80}; it must be a number {low}{up_to}"


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Refuse a ``value`` that is not one of ``allowed``."""
    if not any(value is item or (type(value) is type(item) and value == item) for item in allowed):
        raise ArgumentError(f"{name} is {value!r:.80}; use one of {', '.join(map(repr, allowed))}")


def floating(name: str, value: object) -> None:
    """Refuse a value that is neither a floating point dtype nor None."""
    # The attribute is True for such a dtype; a tensor has a method of that name.
    if value is not None and getattr(value, "is_floating_point", None) is not True:
        raise ArgumentError(
            f"{name} is {value!r:.80}; give a floating point dtype such as torch.bfloat16"
        )


def instance(name: str, value: object, kind: type, *, or_none: bool = False) -> None:
    """Refuse a value that is not a ``kind``; with ``or_none``, None is accepted too.

    Example:
        >>> instance("name", 3, str)
        Traceback (most recent call last):
        echelon.errors.ArgumentError: name is 3; give a text
    """
    if not (isinstance(value, kind) or (or_none and value is None)):
        raise ArgumentError(f"{name} is {value!r:.80}; give {_GIVE[kind.__name__]}")


def function(name: str, value: object, of: str, *, or_none: bool = False) -> None:
    """Refuse a value that is not a function of ``of``; with ``or_none``, None is accepted too."""
    if not (callable(value) or (or_none and value is None)):
        raise ArgumentError(f"{name} is {value!r:.80}; give a function of {of}")


def flag(name: str, value: object) -> None:
    """Refuse a value that is neither True nor False."""
    one_of(name, value, (True, False))


def mapping(name: str, value: object) -> None:
    """Refuse a value that is not a mapping with texts as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ArgumentError(f"{name} is {value!r:.80}; give values by name, as in a dict")


def path(name: str, value: object) -> None:
    """Refuse a value that is not the path of a file or folder."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(f"{name} is {value!r:.80}; give a path")


def rank(name: str, value: object, size: int) -> None:
    """Refuse a value that is not a rank of a group of ``size``; raises ``RankError``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise RankError(name, value, size)


def reduction(value: object) -> None:
    """Refuse a value that is not a ``Reduction``."""
    if isinstance(value, str) and value in ("mean", "sum"):
        return
    parsed = _number(value)
    if parsed is None or not 0 < parsed <= LARGEST:
        raise ArgumentError(
            f"reduction is {value!r:.80}; use 'mean', 'sum' or the number > 0 that divides the sum"
        )
