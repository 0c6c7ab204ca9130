"""Files of checkpoints with something changed, at random: bytes, and what is in their JSON."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from typing import Any

from echelon.checkpoint.format import Manifest
from echelon.checkpoint.header import Entry, header, read_header
from echelon.errors import CheckpointCorrupt, CheckpointTooNew
from tests.checkpoint.manifests import EXAMPLE, sealed

__all__ = ["HEADER", "KINDS", "MANIFEST", "read_all"]

LIMIT_S = 2.0  # for one file

MANIFEST = EXAMPLE.dump()
ENTRIES: list[Entry] = [("weight", "F32", (2, 3), 24), ("b[0:2]", "BF16", (2,), 4)]
HEADER = header([*ENTRIES, ("empty", "I64", (0, 4), 0), ("number", "F64", (), 8)])

TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"\0", b"\xff", b" "),
    *(b"-", b"0", b"1e999", b"NaN", b"Infinity", b"null", b"true", b"1" * 50, b"1" * 5000, b"."),
    *(b"[" * 300, b'{"a":' * 300, b"10" * 9, b'"a":', b'"dtype"', b"../", b"F32", b"\xc3\xa9"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 8, 63, 64, 2**31, 2**32, 2**53, 2**60, 2**63, 2**64),
    *(10**18, -(10**18), 10**39, 0.0, 1.5, -0.0, 1e300, "", "a", "F32", "F64", "F4", "0" * 16),
    *("x" * 2000, "\0", "\ud800", "é", "../x", "/etc/passwd", "rank-00000.safetensors"),
    *([], {}, [0], [[]], {"a": 1}, [10**18], [0, 0, 0, 0, "0" * 16], [1] * 70, "__metadata__"),
]


def with_bytes_changed(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, removed, doubled, moved, or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        begin = rng.randrange(len(changed) + 1)
        end = min(len(changed), begin + rng.choice([1, 2, 8, 60, 1000]))
        match rng.randrange(6):
            case 0 if begin < len(changed):
                changed[begin] ^= 1 << rng.randrange(8)
            case 1:
                changed[begin:end] = b""
            case 2:
                changed[begin:begin] = changed[begin:end]
            case 3:
                changed[begin:end] = rng.choice(TOKENS)
            case 4:
                changed[begin:begin] = rng.choice(TOKENS)
            case _:
                at = rng.randrange(len(changed) + 1)
                changed[at:at] = data[begin:end]
    return bytes(changed)


def with_values_changed(members: Any, rng: random.Random) -> bytes:
    """The text of JSON with a few of its values changed, removed, doubled or renamed.

    What is put in is a copy: a list in itself, or changed from one text to the next, is no JSON.
    """
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = [place for place in _places(members) if len(place[0])]
        if not places:
            break  # everything was removed
        holder, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
            case 1:
                del holder[key]
            case 2 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(rng.choice([*VALUES, holder[key]])))
            case 2:
                holder[str(rng.choice(VALUES))] = copy.deepcopy(holder[key])
            case _:
                other, at = rng.choice(places)
                holder[key] = copy.deepcopy(other[at]) if at in _keys(other) else 0
    return json.dumps(members, separators=(",", ":")).encode()


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: a list or a dict, and an index or a key."""
    if not isinstance(value, list | dict):
        return []
    own = [(value, key) for key in _keys(value)]
    return own + [place for key in _keys(value) for place in _places(value[key])]


def _manifest(rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return with_bytes_changed(MANIFEST, rng)
    if rng.random() < 0.5:  # behind a right checksum, or nothing else would be looked at
        return sealed(with_bytes_changed(MANIFEST[31:], rng))
    members = json.loads(MANIFEST)
    del members["checksum"]
    return sealed(with_values_changed(members, rng)[1:])


def _header(rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return with_bytes_changed(HEADER, rng)
    text = HEADER[8:]
    if rng.random() < 0.5:
        text = with_bytes_changed(text, rng)
    else:
        text = with_values_changed(json.loads(text), rng)
    return len(text).to_bytes(8, "little") + text


# By what is changed: how to make one, and how to read it.
KINDS: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], object]]] = {
    "manifests": (_manifest, lambda data: Manifest.parse(data, "a/file")),
    "headers": (_header, lambda data: read_header(data, "a/file")),
}


def read_all(kind: str, seed: int, go_on: Callable[[int], bool]) -> tuple[int, int]:
    """Read changed files as long as ``go_on`` says so, given how many there were.

    Returns:
        how many were read, and how many of them were refused.

    Raises:
        AssertionError: one raised something else, or took too long; the file is in the message.
    """
    make, read = KINDS[kind]
    count = refused = 0
    while go_on(count):
        data = make(random.Random(seed + count))
        start_s = time.process_time()
        try:
            read(data)
        except (CheckpointCorrupt, CheckpointTooNew):
            refused += 1
        except BaseException as error:
            raise AssertionError(f"number {seed + count} of {kind}: {data!r}") from error
        assert time.process_time() - start_s <= LIMIT_S, f"number {seed + count} of {kind}"
        count += 1
    return count, refused
