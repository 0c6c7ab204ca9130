"""The facts that all ranks of a world must have in common, such as versions and options.

Facts are plain values with names. They are sent as JSON, which runs no code when it is read, and
are compared as text. Each kind of world distributes them in its own way when it starts: shared
memory by its rank table, gloo and NCCL by the store where the ranks meet. ``agree`` compares facts
over a group that exists.
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
    """The facts of this process, and the options with which it starts a world.

    The number of threads is one of them because it changes the bits of matrix products.
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
    """Encode facts: by name, with each value as JSON text. Members of dicts get dotted names.

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
    """The first field whose values differ and the value of each rank; None if ranks agree.

    ``rows`` are the encoded facts of all ranks.
    """
    if len(set(rows)) == 1:
        return None
    return first_difference([json.loads(row) for row in rows])


def compare(rows: Sequence[bytes], ranks: Sequence[int] | None = None) -> None:
    """Raise ``StartMismatch`` if the encoded facts of ``ranks`` (in the job) differ."""
    if (first := difference(rows)) is not None:
        field, values = first
        names = range(len(rows)) if ranks is None else ranks
        raise StartMismatch(field, {names[i]: value for i, value in values.items()})


def agree(group: Group, facts: Mapping[str, Any]) -> None:
    """Raise the same ``StartMismatch`` on all ranks of ``group`` if their facts differ."""
    compare(group.all_gather_bytes(encode(facts), label="facts"), group.ranks)


def gather_json(group: Group, item: Any, label: str) -> list[Any]:
    """The ``item`` of every rank, in rank order, as JSON restores it. All ranks call it."""
    return [
        json.loads(data) for data in group.all_gather_bytes(json.dumps(item).encode(), label=label)
    ]
