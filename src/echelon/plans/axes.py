"""The axes of a plan as text, such as ``pp=2,shard=2``. Knows no torch, so that a start is fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from echelon.checks import is_count
from echelon.errors import ArgumentError

AXES = ("pp", "dp", "shard")


def axes_of(text: str) -> dict[str, int]:
    """The lengths in a text, which must have each axis at most once.

    Example:
        >>> axes_of("pp=2,shard=4")
        {'pp': 2, 'shard': 4}
    """
    lengths: dict[str, int] = {}
    for item in text.split(","):
        name, _, length = (part.strip() for part in item.partition("="))
        if name not in AXES or name in lengths or not is_count(length):
            raise ArgumentError(
                f"plan is {text!r:.80}, with {item!r:.40}: give each of {', '.join(AXES)} at most "
                "once with a number of ranks, such as pp=2,shard=2"
            )
        if int(length) < 1:
            raise ArgumentError(f"plan is {text!r:.80}, with {item!r:.40}: give a number >= 1")
        lengths[name] = int(length)
    return lengths


def plan_argument(arguments: Sequence[str]) -> str | None:
    """The text of the last ``--plan`` among the arguments of a script; None without one.

    Example:
        >>> plan_argument(["--steps", "3", "--plan", "pp=2"])
        'pp=2'
    """
    texts = [after for name, after in pairwise(arguments) if name == "--plan"]
    texts += [text.removeprefix("--plan=") for text in arguments if text.startswith("--plan=")]
    return texts[-1] if texts else None


def text_of(axes: Mapping[str, int]) -> str:
    """The text of lengths, without axes of length 1.

    Example:
        >>> text_of({"pp": 2, "dp": 1, "shard": 2}), text_of({"pp": 1})
        ('pp=2,shard=2', 'dp=1')
    """
    return ",".join(f"{name}={length}" for name, length in axes.items() if length > 1) or "dp=1"
