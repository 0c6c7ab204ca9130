"""The manifest: what was dumped is parsed, and anything else is refused with what is wrong."""

import json
import struct
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given

from echelon.checkpoint.checksum import checksum
from echelon.checkpoint.format import PREFIX_NBYTES, Manifest, newer_schema
from echelon.checkpoint.header import header
from echelon.checkpoint.records import (
    SavedFile,
    SavedPiece,
    SavedTensor,
    file_name,
)
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointTooNew
from tests.checkpoint.manifests import EXAMPLE, edited, manifests, many_pieces, sealed

DATA = EXAMPLE.dump()


@pytest.mark.slow
@given(manifests())
def test_a_manifest_is_parsed_as_it_was_dumped(manifest: Manifest) -> None:
    data = manifest.dump()
    assert Manifest.parse(data, "x") == manifest
    assert list(Manifest.parse(data, "x").tensors) == list(manifest.tensors)
    assert Manifest.parse(data, "x").dump() == data


def test_a_manifest_begins_with_the_checksum_of_all_that_follows() -> None:
    assert DATA[:13] == b'{"checksum":"'
    assert DATA[13:29].decode() == xxhash.xxh3_64_hexdigest(DATA[31:])
    assert DATA[29:31] == b'",'
    assert b" " not in DATA


def test_every_flipped_bit_of_a_manifest_is_found() -> None:
    for i in range(len(DATA) * 8):
        flipped = bytearray(DATA)
        flipped[i // 8] ^= 1 << i % 8
        with pytest.raises(CheckpointCorrupt):
            Manifest.parse(bytes(flipped), "x")


def test_a_manifest_that_was_cut_or_extended_is_found() -> None:
    for data in [*(DATA[:i] for i in range(len(DATA))), DATA + b" ", DATA + DATA, b" " + DATA]:
        with pytest.raises(CheckpointCorrupt):
            Manifest.parse(data, "x")


def test_the_error_names_the_file_and_the_tensor() -> None:
    def edit(members: Any) -> None:
        members["tensors"]["model/bias"]["dtype"] = "F99"

    with pytest.raises(CheckpointCorrupt, match="F99") as caught:
        Manifest.parse(edited(DATA, edit), "run/step-000000010/manifest.json")
    assert caught.value.tensor == "model/bias"
    assert caught.value.path == "run/step-000000010/manifest.json"


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_a_newer_schema_is_told_from_damage_and_asks_for_an_upgrade(first: bool) -> None:
    members: dict[str, Any] = {"unheard": {"of": [[1, 2, 3, 4, 5]] * 100}}
    members = {"schema": 4, **members} if first else {**members, "schema": 4}
    data = sealed(json.dumps(members, separators=(",", ":")).encode()[1:])
    with pytest.raises(CheckpointTooNew, match=r"schema 4.*up to 3\..*upgrade echelon") as caught:
        Manifest.parse(data, "x")
    assert (caught.value.schema, caught.value.known, caught.value.path) == (4, 3, "x")
    with pytest.raises(CheckpointCorrupt, match="its checksum is"):
        Manifest.parse(data.replace(b"unheard", b"unhearD"), "x")


def test_the_schema_shows_in_the_beginning_of_what_is_written() -> None:
    newer = sealed(DATA[31:].replace(b'"schema":1,', b'"schema":20,'))
    assert newer_schema(newer[:PREFIX_NBYTES]) == 20
    for data in (DATA, b"", newer[1:], newer.replace(b"20,", b"20"), newer.replace(b"20", b"two")):
        assert newer_schema(data[:PREFIX_NBYTES]) is None


def test_only_a_manifest_with_complex128_has_a_schema_that_older_versions_do_not_read() -> None:
    def edit(members: Any, schema: int) -> None:  # 12 numbers of 4 bytes become 3 of 16
        weight = members["tensors"]["model/weight"]
        weight.update(dtype="C128", shape=[3])
        weight["pieces"][0][2] = weight["pieces"][1][1] = 2
        weight["pieces"][1][2] = 1
        members["schema"] = schema

    assert b'"schema":1,' in DATA
    manifest = Manifest.parse(edited(DATA, partial(edit, schema=2)), "x")
    assert b'"schema":2,' in manifest.dump()
    assert Manifest.parse(manifest.dump(), "x") == manifest
    with pytest.raises(CheckpointCorrupt, match=r"there is no C128 in schema 1") as caught:
        Manifest.parse(edited(DATA, partial(edit, schema=1)), "x")
    assert caught.value.tensor == "model/weight"
    number = {"value": {"kind": "value", "value": ["C128"]}}
    assert b'"schema":2,' in replace(Manifest.parse(DATA, "x"), sections=number).dump()


def test_a_piece_takes_at_most_420_bytes_while_it_is_read() -> None:
    num_tensors, num_pieces = 10, 1000
    data = many_pieces(num_tensors, num_pieces).dump()
    tracemalloc.start()
    try:
        Manifest.parse(data, "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 420 * num_tensors * num_pieces


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no JSON"),
        (b"}", "no JSON"),
        (b'"schema":1', "no JSON"),
        (b'"schema":1}}', "no JSON"),
        (b'"schema":1,"schema":1}', "the key 'schema' is there twice"),
        (b'"checksum":"","schema":1}', "the key 'checksum' is there twice"),
        (b'"schema":NaN}', "NaN is no number"),
        (b'"schema":1e999}', "1e999.* is no float"),
        (b'"schema":-Infinity}', "-Infinity is no number"),
        (b'"schema":%s}' % (b"1" * 5000), "number of more than 40 characters"),
        (b'"schema":"\xff"}', "no UTF-8 at byte 41"),
        (b'"schema":%s1%s}' % (b"[" * 300, b"]" * 300), "more than 256 deep"),
    ],
)
def test_content_that_is_no_strict_json_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=message):
        Manifest.parse(sealed(content), "x")


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1: 2}, float("nan"), {1, 2}, 2**200, b"x", 2 + 1j, [(1,)]],
    ids=str,
)
def test_what_would_not_come_back_from_the_manifest_is_not_dumped(value: Any) -> None:
    for field in ("world", "sections"):
        with pytest.raises(ArgumentError):
            replace(EXAMPLE, **{field: {"x": value}}).dump()


def test_sections_that_nest_too_deeply_or_in_a_circle_are_not_dumped() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    circle: Any = []
    circle.append(circle)
    for value in (deep, circle):
        with pytest.raises(ArgumentError):
            replace(EXAMPLE, sections={"x": value}).dump()


def test_a_reader_that_knows_the_specification_only_reads_what_was_saved() -> None:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    files, saved, pieces = [], [], []
    for rank, (start, stop) in enumerate([(0, 5), (5, 12)]):
        part = weight.flatten()[start:stop].numpy().tobytes()
        head = header([(f"weight[{start}:{stop}]", "F32", (stop - start,), len(part))])
        files.append(head + part)
        saved.append(
            SavedFile(
                name=file_name(rank),
                nbytes=len(head) + len(part),
                header_nbytes=len(head),
                header_checksum=checksum(head),
            )
        )
        pieces.append(
            SavedPiece(
                file=rank,
                start=start,
                numel=stop - start,
                offset=len(head),
                checksum=checksum(part),
            )
        )
    tensor = SavedTensor(name="weight", dtype="F32", shape=(3, 4), pieces=tuple(pieces))
    facts: dict[str, Any] = {"world": {}, "versions": {}, "threads": (1, 1), "sections": {}}
    manifest = Manifest(step=1, files=tuple(saved), tensors={"weight": tensor}, **facts).dump()

    assert xxhash.xxh3_64(manifest[31:]).hexdigest() == json.loads(manifest)["checksum"]
    values: list[float] = []
    for file, start, numel, offset, digits in json.loads(manifest)["tensors"]["weight"]["pieces"]:
        assert start == len(values)
        data = files[file][offset : offset + numel * 4]
        assert xxhash.xxh3_64(data).hexdigest() == digits
        values += struct.unpack(f"<{numel}f", data)
    assert torch.equal(torch.tensor(values).view(3, 4), weight)
