"""A manifest that contradicts itself is refused with what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from echelon.checkpoint.format import Manifest
from echelon.errors import ArgumentError, CheckpointCorrupt
from tests.checkpoint.manifests import EXAMPLE, edited

DATA = EXAMPLE.dump()
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


def test_the_constructor_refuses_what_contradicts_itself() -> None:
    with pytest.raises(ArgumentError, match="bytes 64 to 100"):
        replace(EXAMPLE, files=(replace(EXAMPLE.files[0], nbytes=100), EXAMPLE.files[1]))
    with pytest.raises(ArgumentError, match="'model/bias': its pieces cover 3 of 2"):
        broken = replace(EXAMPLE.tensors[BIAS], shape=(2,))
        replace(EXAMPLE, tensors={**EXAMPLE.tensors, BIAS: broken})
    with pytest.raises(ArgumentError, match="is listed as 'other'"):
        replace(EXAMPLE, tensors={"other": EXAMPLE.tensors[WEIGHT]})
