"""Files that somebody made to do harm: each must be refused soon, and without much memory."""

from __future__ import annotations

import functools
import gc
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from echelon.errors import CheckpointCorrupt, CheckpointTooNew
from tests.bomb import Bomb
from tests.checkpoint.manifests import EXAMPLE, edited, sealed

__all__ = ["MOST", "Cost", "contents", "cost_of", "headers", "manifests", "must_be_refused"]

MOST = 100_000_000  # bytes that a manifest or a header may have
LIMIT_S = 2.0  # to refuse one
LIMIT_NBYTES = 200_000_000  # of memory beside the file
ROOM = 100  # for what is around them


def _filled(before: bytes, item: bytes, after: bytes, nbytes: int) -> bytes:
    """As many items as fit between two texts."""
    num_items = (nbytes - ROOM - len(before) - len(after)) // len(item)
    return before + item * num_items + after


def contents(most: int) -> dict[str, Callable[[], bytes]]:
    """What follows the brace that begins a JSON object, in a manifest or in a header."""
    return {
        "lists 1e5 deep": lambda: b'"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
        "objects 1e5 deep": lambda: b'"a":' + b'{"a":' * 10**5 + b"0" + b"}" * 10**5 + b"}",
        "lists that never end": lambda: _filled(b'"a":', b"[", b"", most),
        "many lists": lambda: _filled(b'"a":[0', b",[]", b"]}", most),
        "many objects": lambda: _filled(b'"a":[0', b",{}", b"]}", most),
        "many small objects": lambda: _filled(b'"a":[0', b',{"a":0}', b"]}", most),
        "many numbers": lambda: _filled(b'"a":[0', b",0", b"]}", most),
        "many larger numbers": lambda: _filled(b'"a":[0', b",1000", b"]}", most),
        "nearly as many numbers as can be read": lambda: _filled(
            b'"a":[0', b",1000", b"]}", 17_000_000
        ),
        "many floats": lambda: _filled(b'"a":[0', b",0.1", b"]}", most),
        "many strings": lambda: _filled(b'"a":[0', b',"ab"', b"]}", most),
        "many members": lambda: _filled(b'"a":0', b',"a":0', b"}", most),
        "nearly as many lists as can be read": lambda: _filled(b'"a":[0', b",[]", b"]}", 2_600_000),
        "nearly as many objects as can be read": lambda: _filled(
            b'"a":[0', b',{"a":0}', b"]}", 2_700_000
        ),
        "nearly as many strings as can be read": lambda: _filled(
            b'"a":[0', b',"ab"', b"]}", 9_900_000
        ),
        "a key many times": lambda: _filled(b'"a":0', b',"a":0', b"}", 4_000_000),
        "a long string": lambda: _filled(b'"a":"', b"a", b'"}', most),
        "a long string of marks": lambda: _filled(b'"a":"', b",[", b'"}', most),
        "a string of escapes": lambda: _filled(b'"a":"', b"\\u1234", b'"}', most),
        "a string that is wide at its end": lambda: _filled(
            b'"a":"', b"a", b'\\ud83d\\ude00"}', most
        ),
        "a long key": lambda: _filled(b'"', b"a", b'":{}}', most),
        "quotes": lambda: _filled(b"", b'"', b"}", most),
        "backslashes": lambda: _filled(b'"a":"', b"\\", b'"}', most),
        "spaces": lambda: _filled(b'"a":', b" ", b"", most),
        "spaces between digits": lambda: _filled(b'"a":', b"1 ", b"", most),
        "a number of 5000 digits": lambda: b'"a":' + b"1" * 5000 + b"}",
        "a long number": lambda: _filled(b'"a":', b"1", b"}", most),
        "a long float": lambda: _filled(b'"a":0.', b"1", b"}", most),
        "a number of 1e999": lambda: b'"a":1e999}',
        "NaN": lambda: b'"a":NaN}',
        "infinity": lambda: b'"a":-Infinity}',
        "bytes that are no UTF-8": lambda: _filled(b'"a":"', b"\xff", b'"}', most),
        "NUL": lambda: _filled(b"", b"\0", b"}", most),
    }


def _files(canary: Path, most: int) -> dict[str, Callable[[], bytes]]:
    """What is no file of a checkpoint at all."""
    return {
        "nothing": lambda: b"",
        "a pickle": lambda: pickle.dumps(Bomb(canary)),
        "a pickle of text": lambda: pickle.dumps(Bomb(canary), 0),
        "zeros": lambda: bytes(most),
        "more than 100 MB": lambda: bytes(MOST + 1),
        "an archive": lambda: b"PK\x03\x04" + pickle.dumps(Bomb(canary)),
    }


def manifests(canary: Path, most: int = MOST) -> dict[str, Callable[[], bytes]]:
    """Manifests that must be refused; all but the last ones have a right checksum."""
    data = EXAMPLE.dump()

    def with_piece(*piece: Any) -> Callable[[], bytes]:
        def edit(members: Any) -> None:
            members["tensors"]["model/weight"]["pieces"] = [piece, piece]

        return lambda: edited(data, edit)

    def with_field(path: tuple[Any, ...], value: Any) -> Callable[[], bytes]:
        def edit(members: Any) -> None:
            functools.reduce(lambda at, key: at[key], path[:-1], members)[path[-1]] = value

        return lambda: edited(data, edit)

    def with_pieces(num_pieces: int) -> bytes:
        pieces = b",".join(b'[0,%d,1,%d,"%016x"]' % (i, 64 + 4 * i, i) for i in range(num_pieces))
        whole = edited(data, lambda members: members["tensors"]["model/weight"].update(pieces=[]))
        before, _, after = whole[31:].partition(b'"pieces":[]')
        return sealed(before + b'"pieces":[%s]' % pieces + after)

    name = ("files", 0, "name")
    return {
        **{kind: lambda make=make: sealed(make()) for kind, make in contents(most).items()},
        "a file in another folder": with_field(name, "../rank-00000.safetensors"),
        "a file with an absolute path": with_field(name, "/etc/passwd"),
        "a file that is the manifest": with_field(name, "manifest.json"),
        "a tensor of 1e18 elements": with_field(("tensors", "model/weight", "shape"), [10**18]),
        "a file of 1e18 bytes": with_field(("files", 0, "nbytes"), 10**18),
        "a header of 1e18 bytes": with_field(("files", 0, "header_nbytes"), 10**18),
        "pieces that overlap": with_piece(0, 0, 8, 64, "0" * 16),
        "pieces of 1e18 elements": with_piece(0, 0, 10**18, 64, "0" * 16),
        "pieces at 1e18": with_piece(0, 0, 8, 10**18, "0" * 16),
        "pieces of NaN": with_piece(0, 0, float("nan"), 64, "0" * 16),
        "schema 4": with_field(("schema",), 4),
        "schema 1e19": with_field(("schema",), 10**19),
        "many pieces too many": lambda: with_pieces(most // 300),
        "another checksum": lambda: data[:13] + b"0" * 16 + data[29:],
        **_files(canary, most),
    }


def headers(canary: Path, most: int = MOST) -> dict[str, Callable[[], bytes]]:
    """Beginnings of safetensors files that must be refused."""

    def with_length(make: Callable[[], bytes]) -> bytes:
        text = b"{" + make()
        return len(text).to_bytes(8, "little") + text

    many = b',"%07d":{"dtype":"F32","shape":[],"data_offsets":[4,8]}'
    return {
        **{kind: lambda make=make: with_length(make) for kind, make in contents(most).items()},
        "many tensors in one place": lambda: with_length(
            lambda: (
                b'"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}'
                + b"".join(many % i for i in range(most // 1000))
                + b"}"
            )
        ),
        "a header of 100 MB that is not there": lambda: (10**8).to_bytes(8, "little") + b"{}",
        "a header of 2**63 bytes": lambda: (2**63).to_bytes(8, "little") + b"{}",
        **_files(canary, most),
    }


def must_be_refused(read: Callable[[bytes, str], object], data: bytes) -> None:
    """Have ``data`` refused within the limits."""

    def attempt() -> None:
        with pytest.raises((CheckpointCorrupt, CheckpointTooNew)) as caught:
            read(data, "a/file")
        assert len(str(caught.value)) < 1000

    # The shortest of three times, because others have the processor, too.
    costs = [cost_of(attempt)]
    while costs[-1].cpu_s > LIMIT_S and len(costs) < 3:
        costs.append(cost_of(attempt))
    assert min(cost.cpu_s for cost in costs) <= LIMIT_S
    assert max(cost.nbytes for cost in costs) <= LIMIT_NBYTES


class Cost(NamedTuple):
    """What a call took.

    Attributes:
        cpu_s: of all threads.
        nbytes: the most memory that it took at once, beside what there was.
    """

    cpu_s: float
    nbytes: int


def cost_of(call: Callable[[], object]) -> Cost:
    """What ``call`` takes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _memory("VmRSS")
    start_s = time.process_time()
    call()
    return Cost(time.process_time() - start_s, _memory("VmHWM") - before)


def _memory(what: str) -> int:
    """A figure of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(row.split()[1]) for row in status.splitlines() if row.startswith(what))
