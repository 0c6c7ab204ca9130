"""Manifests for tests: one to read, and all that hypothesis can think of."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from typing import Any

from hypothesis import strategies as st

from echelon.checkpoint.checksum import checksum
from echelon.checkpoint.format import Manifest
from echelon.checkpoint.records import SavedFile, SavedPiece, SavedTensor, file_name
from echelon.values.untrusted_json import Json
from echelon.values.value_types import DTYPES

__all__ = ["EXAMPLE", "JSON", "NAMES", "edited", "manifests", "many_pieces", "sealed"]

ZEROS = "0" * 16
NAMES = st.text(
    st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=8
)  # neither control characters nor surrogates
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def sealed(content: bytes) -> bytes:
    """A manifest with this content, without the brace that begins it, under a right checksum."""
    return b'{"checksum":"%s",%s' % (checksum(content).encode(), content)


def edited(data: bytes, edit: Callable[[Any], None]) -> bytes:
    """A manifest with a change in its JSON, under a right checksum."""
    members = json.loads(data)
    del members["checksum"]
    edit(members)
    return sealed(json.dumps(members, separators=(",", ":")).encode()[1:])


def _laid_out(
    tensors: list[tuple[str, str, tuple[int, ...], tuple[str, ...], list[tuple[int, int]]]],
    num_files: int,
    **facts: Any,
) -> Manifest:
    """A manifest of tensors whose pieces, each a length and a file, lie end to end in the files."""
    ends = [64] * num_files
    saved = {}
    for name, dtype, shape, ties, cut in tensors:
        pieces, start = [], 0
        for numel, file in cut:
            pieces.append(
                SavedPiece(file=file, start=start, numel=numel, offset=ends[file], checksum=ZEROS)
            )
            start += numel
            ends[file] += numel * DTYPES[dtype].itemsize
        saved[name] = SavedTensor(
            name=name, dtype=dtype, shape=shape, pieces=tuple(pieces), ties=ties
        )
    files = tuple(
        SavedFile(name=file_name(i), nbytes=end, header_nbytes=64, header_checksum=ZEROS)
        for i, end in enumerate(ends)
    )
    return Manifest(files=files, tensors=saved, **facts)


def _facts() -> dict[str, Any]:
    sections: dict[str, Json] = {"epoch": {"kind": "value", "value": 3}}
    versions = {"torch": "2.13.0"}
    return {
        "step": 10,
        "world": {"size": 2},
        "versions": versions,
        "threads": (1, 1),
        "sections": sections,
    }


EXAMPLE = _laid_out(
    [
        ("model/weight", "F32", (3, 4), ("model/tied",), [(8, 0), (4, 1)]),
        ("model/bias", "BF16", (3,), (), [(3, 1)]),
        ("model/none", "I64", (0, 2), (), []),
        ("model/count", "I64", (), (), [(1, 0)]),
    ],
    2,
    **_facts(),
)


def many_pieces(num_tensors: int, num_pieces: int, num_files: int = 8) -> Manifest:
    """A manifest of tensors that are each cut into so many pieces, over the files in turn."""
    cut = [(1000, i % num_files) for i in range(num_pieces)]
    shape = (num_pieces, 1000)
    names = [f"model.layers.{i}.weight" for i in range(num_tensors)]
    return _laid_out([(name, "F32", shape, (), cut) for name in names], num_files, **_facts())


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest of a few small tensors."""
    num_files = draw(st.integers(1, 3))
    names = draw(st.lists(NAMES, unique=True, max_size=5))
    tensors = []
    while names:
        name = names.pop()
        ties = tuple(names.pop() for _ in range(draw(st.integers(0, min(1, len(names))))))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        left, cut = prod(shape), []
        while left:
            numel = draw(st.integers(1, left))
            cut.append((numel, draw(st.integers(0, num_files - 1))))
            left -= numel
        tensors.append((name, draw(st.sampled_from(sorted(DTYPES))), shape, ties, cut))
    return _laid_out(
        tensors,
        num_files,
        step=draw(st.integers(0, 10**9 - 1)),
        world=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=2)),
        versions=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2)),
        threads=tuple(draw(st.lists(st.integers(1, 64), max_size=3))),
        sections=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=2)),
    )
