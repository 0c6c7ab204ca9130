"""The manifest: what was dumped is parsed, and anything else is refused with what is wrong."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
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
    step_name,
    step_of,
)
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointTooNew
from tests.checkpoint.manifests import EXAMPLE, edited, manifests, many_pieces, sealed

DATA = EXAMPLE.dump()


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
    members = {"schema": 2, **members} if first else {**members, "schema": 2}
    data = sealed(json.dumps(members, separators=(",", ":")).encode()[1:])
    with pytest.raises(CheckpointTooNew, match=r"schema 2.*up to 1\..*upgrade echelon") as caught:
        Manifest.parse(data, "x")
    assert (caught.value.schema, caught.value.known, caught.value.path) == (2, 1, "x")
    with pytest.raises(CheckpointCorrupt, match="its checksum is"):
        Manifest.parse(data.replace(b"unheard", b"unhearD"), "x")


def test_the_schema_shows_in_the_beginning_of_what_is_written() -> None:
    newer = sealed(DATA[31:].replace(b'"schema":1,', b'"schema":20,'))
    assert newer_schema(newer[:PREFIX_NBYTES]) == 20
    for data in (DATA, b"", newer[1:], newer.replace(b"20,", b"20"), newer.replace(b"20", b"two")):
        assert newer_schema(data[:PREFIX_NBYTES]) is None


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


WEIGHT, BIAS, NONE = "model/weight", "model/bias", "model/none"
ELSEWHERE = ["..", "../x", "/etc/passwd", "a/b", "rank-00000.safetensors/..", "manifest.json"]
ELSEWHERE += ["rank-0.safetensors", "rank-000000.safetensors", "rank-00000.safetensors\n", ""]
ELSEWHERE += ["rank-٠٠٠٠٠.safetensors", "rank-00000.pt", "\0", "rank-00000.safetensors\0"]


def _set(value: Any, *path: str | int) -> Callable[[Any], None]:
    """An edit that puts ``value`` at ``path``."""

    def edit(members: Any) -> None:
        for key in path[:-1]:
            members = members[key]
        members[path[-1]] = value

    return edit


def _piece(index: int, field: int, value: Any) -> Callable[[Any], None]:
    return _set(value, "tensors", WEIGHT, "pieces", index, field)


def _drop(*path: str | int) -> Callable[[Any], None]:
    def edit(members: Any) -> None:
        for key in path[:-1]:
            members = members[key]
        del members[path[-1]]

    return edit


BROKEN: dict[str, tuple[Callable[[Any], None], str]] = {
    "schema 0": (_set(0, "schema"), "unknown schema 0"),
    "schema true": (_set(True, "schema"), "unknown schema True"),
    "schema of 2**60": (_set(2**60, "schema"), "unknown schema 1152921504606846976"),
    "schema text": (_set("1", "schema"), "unknown schema '1'"),
    "no schema": (_drop("schema"), "unknown schema None"),
    "no step": (_drop("step"), "has the members"),
    "one member more": (_set(1, "more"), "has the members"),
    "step true": (_set(True, "step"), "the step is True"),
    "step float": (_set(1.0, "step"), "the step is 1.0"),
    "step negative": (_set(-1, "step"), "the step is -1"),
    "step of ten digits": (_set(10**9, "step"), "the step is 1000000000"),
    "world list": (_set([], "world"), "must be an object"),
    "version number": (_set(2.13, "versions", "torch"), "the version of 'torch' is 2.13"),
    "threads object": (_set({}, "threads"), "must be an array"),
    "threads 0": (_set([0], "threads"), "0 threads"),
    "threads true": (_set([True], "threads"), "True threads"),
    "files object": (_set({}, "files"), "must be an array"),
    "no files": (_set([], "files"), "in file 0 of 0"),
    "files twice": (_set("rank-00000.safetensors", "files", 1, "name"), "files come by rank"),
    "file without length": (_drop("files", 0, "nbytes"), "has the members"),
    "file longer": (_set(1000, "files", 0, "nbytes"), "has 1000 bytes"),
    "file shorter": (_set(100, "files", 0, "nbytes"), "data in bytes 64 to 100"),
    "file of 2**60": (_set(2**60, "files", 0, "nbytes"), "that cannot be"),
    "file length true": (_set(True, "files", 0, "nbytes"), "that cannot be"),
    "header over the file": (_set(1000, "files", 0, "header_nbytes"), "that cannot be"),
    "header too short": (_set(9, "files", 0, "header_nbytes"), "that cannot be"),
    "header of 200 MB": (_set(2 * 10**8, "files", 0, "header_nbytes"), "that cannot be"),
    "header shorter": (_set(60, "files", 0, "header_nbytes"), "byte 60 is the first"),
    "header checksum": (_set("A" * 16, "files", 0, "header_checksum"), "is no checksum"),
    "tensors array": (_set([], "tensors"), "must be an object"),
    "tensor null": (_set(None, "tensors", WEIGHT), "must be an object"),
    "tensor without ties": (_drop("tensors", WEIGHT, "ties"), "has the members"),
    "tensor named empty": (_set({}, "tensors", ""), "cannot be a name"),
    "tensor named NUL": (_set({}, "tensors", "a\0"), "cannot be a name"),
    "tensor named DEL": (_set({}, "tensors", "a\x7f"), "cannot be a name"),
    "tensor named half": (_set({}, "tensors", "\ud800"), "cannot be a name"),
    "tensor named long": (_set({}, "tensors", "x" * 1025), "cannot be a name"),
    "tie is a tensor": (_set([BIAS], "tensors", WEIGHT, "ties"), "two tensors are named"),
    "tie twice": (_set(["t", "t"], "tensors", WEIGHT, "ties"), "two tensors are named"),
    "tie is itself": (_set([WEIGHT], "tensors", WEIGHT, "ties"), "two tensors are named"),
    "tie number": (_set([1], "tensors", WEIGHT, "ties"), "cannot be a name"),
    "tie list": (_set([[]], "tensors", WEIGHT, "ties"), "cannot be a name"),
    "dtype unknown": (_set("F4", "tensors", WEIGHT, "dtype"), "dtype 'F4'"),
    "dtype list": (_set(["F32"], "tensors", WEIGHT, "dtype"), "dtype an array"),
    "dtype wider": (_set("F64", "tensors", WEIGHT, "dtype"), "bytes 64 to 128 of"),
    "dtype narrower": (_set("F16", "tensors", WEIGHT, "dtype"), "where byte 80 is the first"),
    "shape object": (_set({}, "tensors", WEIGHT, "shape"), "must be an array"),
    "shape larger": (_set([4, 4], "tensors", WEIGHT, "shape"), "cover 12 of 16"),
    "shape smaller": (_set([2, 4], "tensors", WEIGHT, "shape"), "cover 12 of 8"),
    "shape negative": (_set([-3, -4], "tensors", WEIGHT, "shape"), "is none"),
    "shape true": (_set([True, 12], "tensors", WEIGHT, "shape"), "is none"),
    "shape float": (_set([12.0], "tensors", WEIGHT, "shape"), "is none"),
    "shape of 1e18": (_set([10**18], "tensors", WEIGHT, "shape"), "too many elements"),
    "shape of 1e18 squared": (_set([10**18] * 2, "tensors", WEIGHT, "shape"), "too many"),
    "shape of 65 dims": (_set([1] * 65, "tensors", WEIGHT, "shape"), "is none"),
    "empty shape of 1e18 squared": (
        _set([0, 10**18, 10**18], "tensors", NONE, "shape"),
        "too many",
    ),
    "pieces object": (_set({}, "tensors", WEIGHT, "pieces"), "must be an array"),
    "no pieces": (_set([], "tensors", WEIGHT, "pieces"), "cover 0 of 12"),
    "piece missing": (_drop("tensors", WEIGHT, "pieces", 0), "cover \\[0:0\\], and the next is"),
    "piece of four": (_drop("tensors", WEIGHT, "pieces", 0, 4), "which is none"),
    "piece null": (_set(None, "tensors", WEIGHT, "pieces", 0), "which is none"),
    "piece of nothing": (
        _set([[0, 0, 0, 64, "0" * 16]], "tensors", NONE, "pieces"),
        "the next is \\[0:0\\]",
    ),
    "piece in another file": (_piece(0, 0, 1), "bytes 64 to 96 of rank-00001"),
    "piece in file 2": (_piece(0, 0, 2), "in file 2 of 2"),
    "piece in file -1": (_piece(0, 0, -1), "a piece has -1"),
    "piece in file true": (_piece(0, 0, True), "a piece has True"),
    "piece overlaps": (_piece(1, 1, 7), "the next is \\[7:11\\]"),
    "piece leaves a hole": (_piece(1, 1, 9), "the next is \\[9:13\\]"),
    "piece too short": (_piece(1, 2, 3), "cover 11 of 12"),
    "piece too long": (_piece(1, 2, 5), "cover 13 of 12"),
    "piece of 1e18": (_piece(1, 2, 10**18), "cover 1000000000000000008 of 12"),
    "piece of 1e19": (_piece(1, 2, 10**19), "a piece has 1" + "0" * 19),
    "piece of float": (_piece(1, 2, 4.0), "a piece has 4.0"),
    "piece of text": (_piece(1, 2, "4"), "a piece has '4'"),
    "piece in the header": (_piece(0, 3, 60), "bytes 60 to 92 of"),
    "piece beyond the file": (_piece(0, 3, 10**18), "bytes 1000000000000000000 to"),
    "piece on another": (_piece(0, 3, 72), "is the first that no other has"),
    "piece checksum short": (_piece(0, 4, "0" * 15), "is no checksum"),
    "piece checksum upper": (_piece(0, 4, "ABCDEF0123456789"), "is no checksum"),
    "piece checksum number": (_piece(0, 4, 5), "5 is no checksum"),
    "sections array": (_set([], "sections"), "must be an object"),
    **{
        f"file {name!r}": (_set(name, "files", 0, "name"), "no name of a file")
        for name in ELSEWHERE
    },
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_manifest_that_breaks_a_law_is_refused_with_what_is_wrong(kind: str) -> None:
    edit, message = BROKEN[kind]
    with pytest.raises(CheckpointCorrupt, match=message):
        Manifest.parse(edited(DATA, edit), "x")


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


def test_the_constructor_refuses_what_contradicts_itself() -> None:
    with pytest.raises(ArgumentError, match="bytes 64 to 100"):
        replace(EXAMPLE, files=(replace(EXAMPLE.files[0], nbytes=100), EXAMPLE.files[1]))
    with pytest.raises(ArgumentError, match="'model/bias': its pieces cover 3 of 2"):
        broken = replace(EXAMPLE.tensors[BIAS], shape=(2,))
        replace(EXAMPLE, tensors={**EXAMPLE.tensors, BIAS: broken})
    with pytest.raises(ArgumentError, match="is listed as 'other'"):
        replace(EXAMPLE, tensors={"other": EXAMPLE.tensors[WEIGHT]})


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


def test_names_of_steps_sort_as_steps_do() -> None:
    steps = [0, 9, 10, 99_999, 10**6, 10**9 - 1]
    names = [step_name(step) for step in steps]
    assert names == sorted(names)
    assert [step_of(name) for name in names] == steps
    for step in (-1, 10**9):
        with pytest.raises(ArgumentError, match=f"step is {step}"):
            step_name(step)


@pytest.mark.parametrize(
    "name",
    [
        *("", "step-", "step-10", "step-0000000010", "step-00000001", "step-00000001x"),
        *("step-000000010.tmp", ".step-000000010", "step-000000010/", "step-000000010\n"),
        *(
            "Step-000000010",
            "step_000000010",
            "step-+00000010",
            "step-٠٠٠٠٠٠٠١٠",
            "../step-000000010",
        ),
    ],
)
def test_only_the_name_of_a_committed_step_is_one(name: str) -> None:
    assert step_of(name) is None


def test_names_of_files_tell_ranks_apart() -> None:
    assert [file_name(rank) for rank in (0, 99_999, 100_000)] == [
        "rank-00000.safetensors",
        "rank-99999.safetensors",
        "rank-100000.safetensors",
    ]
    with pytest.raises(ArgumentError, match="rank is -1"):
        file_name(-1)
