"""What all ranks of a world must have in common, and whether they do.

Facts are plain values with names. They travel as JSON, which does nothing when it is read, and are
compared as text. Whoever starts a world brings them to all ranks in its own way: shared memory on
its board, gloo and NCCL in the store where ranks meet, and a world that exists with ``agree``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from echelon.comm.agreement import first_difference
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StartMismatch


def start_facts(**options: Any) -> dict[str, Any]:
    """What this process brings to a world, and the options that it starts it with.

    The number of threads counts because it changes the bits of matrix products.
    """
    return {
        "version of echelon": _version("echelon"),
        "version of torch": str(torch.__version__),
        "version of Python": ".".join(map(str, sys.version_info[:3])),
        "version of NumPy": _version("numpy"),
        "number of torch threads": torch.get_num_threads(),
        **{f"option {name}": value for name, value in options.items()},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def encode(facts: Mapping[str, Any]) -> bytes:
    """Facts as they travel: by name, each value as JSON text; what a dict holds gets a name too.

    Raises:
        ArgumentError: JSON has no word for a value.

    Example:
        >>> encode({"steps": 3, "model": {"width": 8, "bias": None}})
        b'{"steps": "3", "model.width": "8", "model.bias": "null"}'
    """
    return json.dumps(dict(_fields("", facts))).encode()


def _fields(prefix: str, facts: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _fields(f"{name}.", value)
            continue
        try:
            yield name, json.dumps(value, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(
                f"{name} is {value!r:.80}, which JSON has no word for ({error}): give numbers, "
                "strings, True, False, None, and lists and dicts of them"
            ) from error


def difference(rows: Sequence[bytes]) -> tuple[str, dict[int, str]] | None:
    """The first field that differs and what each rank has, by rank; None if ranks agree.

    Args:
        rows: what ``encode`` gave on each rank.
    """
    if len(set(rows)) == 1:
        return None
    return first_difference([json.loads(row) for row in rows])


def compare(rows: Sequence[bytes], ranks: Sequence[int] | None = None) -> None:
    """Refuse ranks that differ.

    Args:
        rows: what ``encode`` gave on each rank.
        ranks: their numbers in the job; None: from 0.

    Raises:
        StartMismatch: names the first field that differs, and what each rank has.
    """
    if (found := difference(rows)) is not None:
        field, values = found
        names = range(len(rows)) if ranks is None else ranks
        raise StartMismatch(field, {names[i]: value for i, value in values.items()})


def agree(group: Group, facts: Mapping[str, Any]) -> None:
    """Compare facts over a group. All its ranks call it.

    Raises:
        ArgumentError: JSON has no word for a value.
        StartMismatch: on every rank, the first field that differs.
    """
    compare(group.all_gather_bytes(encode(facts), label="facts"), group.ranks)


def gather_json(group: Group, item: Any, label: str) -> list[Any]:
    """The ``item`` of every rank, in rank order, as JSON gives it back. All ranks call it."""
    return [
        json.loads(data) for data in group.all_gather_bytes(json.dumps(item).encode(), label=label)
    ]
