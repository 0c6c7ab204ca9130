"""The files of a checkpoint. This text is their specification: a reader can be written from it.

A checkpoint of step 10 on two ranks is a folder::

    step-000000010/               "step-" and nine digits: a committed checkpoint
      manifest.json               which tensors there are, and where their bytes lie
      rank-00000.safetensors      "rank-", five digits or more, ".safetensors"
      rank-00001.safetensors

A folder of any other name is no checkpoint. Files have the layout of safetensors: eight bytes that
say the length of a JSON text (little-endian), that text with spaces after it, and the data. Any
safetensors reader opens them; but the manifest alone says what is in them, and has the checksums.

**Checksums** are XXH3-64 with seed 0, as 16 lower-case hex digits, most significant first.

**The manifest** is a JSON object without spaces, in ASCII. It begins with::

    {"checksum":"0123456789abcdef","schema":1,

and the checksum is that of all bytes after the first comma. So every byte of the manifest is
covered, and by it every byte of the folder. This beginning, and that a manifest has at most
100,000,000 bytes, is the same in every schema: whoever finds a greater number there has found a
checkpoint of a newer version, which is not damaged. It is neither read nor replaced nor removed,
and no older step is loaded in its place. All that this text does not allow needs another number.

The other members, in this order in what is written here and in any order in what is read, are
exactly:

``schema``
    ``1``. It may stand elsewhere in what is read, too.
``step``
    the step, from 0 to 999,999,999.
``world``
    an object: what wrote it, such as ``size`` and ``backend``. For people.
``versions``
    an object of strings: the versions of packages, by name. For people.
``threads``
    an array: how many threads PyTorch had on each rank. Another number gives other sums.
``files``
    an array of objects, by rank. ``name``; ``nbytes``, the length of the file; ``header_nbytes``,
    the number of bytes before the data, that is 8 + the length of the JSON text with its spaces;
    ``header_checksum``, that of these bytes. A rank that wrote nothing has no file.
``tensors``
    an object, by name. Each is an object of ``dtype``, a name of safetensors' such as ``"F32"``;
    ``shape``, an array; ``pieces``; and ``ties``, an array of further names of the tensor.
``sections``
    an object: what was saved beside tensors. Free JSON; ``echelon.values`` says how Python
    values look in it.

**A piece** is the array ``[file, start, numel, offset, checksum]``: elements ``start`` to
``start + numel`` of the tensor, flattened in row-major order, lie in ``files[file]`` from byte
``offset`` on, little-endian and with nothing between them; ``checksum`` is that of these bytes.
Pieces come in order of ``start`` and cover the tensor exactly once; a tensor without elements has
none. An offset may be any number: nothing is aligned. BOOL is one byte, 0 or 1; C64 is two F32, the
real part first.

**Laws**, which a reader checks before it uses anything. The pieces of a file and its header cover
its bytes exactly once, so that no byte is without a checksum. Names of tensors, ties included, are
unique, of 1 to 1024 characters, none of them a control character or a surrogate. Numbers are whole
and less than 2**60, and so is the number of bytes of a tensor (counting dims of 0 as 1). There are
at most 64 dims to a tensor, and 1,000,000 pieces in all. The JSON has no key twice in one object,
nests at most 256 deep, and has finite numbers only, in at most 40 characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

from echelon.checkpoint.checksum import checksum
from echelon.checkpoint.consistency import Inconsistent, check_manifest
from echelon.checkpoint.records import (
    MANIFEST,
    MAX_MANIFEST_NBYTES,
    MAX_PIECES,
    SavedFile,
    SavedPiece,
    SavedTensor,
    is_tensor_name,
)
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointTooNew
from echelon.values.untrusted_json import Json, brief, read_json, write_json
from echelon.values.value_types import is_size

SCHEMA = 1
BEGINNING_NBYTES = 64  # of a manifest; its schema is in them
_MEMORY = 160 * 2**20  # that reading may take beside the file and the pieces, in bytes
_BEFORE, _AFTER = b'{"checksum":"', b'",'  # around the 16 digits
_BEGIN = len(_BEFORE) + 16 + len(_AFTER)
_BEGINNING = re.compile(re.escape(_BEFORE) + rb'[0-9a-f]{16}","schema":([0-9]{1,18}),')
_MEMBERS = (
    *("checksum", "schema", "step", "world", "versions"),
    *("threads", "files", "tensors", "sections"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. Law: every manifest keeps the laws of this module's text.

    Attributes:
        step: after which it was saved.
        world: what wrote it, for people.
        versions: of packages, by name.
        threads: PyTorch's, of each rank.
        files: by rank.
        tensors: by name.
        sections: what was saved beside tensors.

    Raises:
        ArgumentError: it contradicts itself.
    """

    step: int
    world: Mapping[str, Json]
    versions: Mapping[str, str]
    threads: tuple[int, ...]
    files: tuple[SavedFile, ...]
    tensors: Mapping[str, SavedTensor]
    sections: Mapping[str, Json]

    def __post_init__(self) -> None:
        check_manifest(self.step, self.threads, self.versions, self.files, self.tensors)

    def dump(self) -> bytes:
        """The bytes of ``manifest.json``. Law: ``Manifest.parse`` of them gives an equal manifest.

        Raises:
            ArgumentError: ``world`` or ``sections`` is not plain JSON, or there is too much to be
                read back.
        """
        content = write_json(_fields(self), "the manifest")[1:]
        data = _BEFORE + checksum(content).encode() + _AFTER + content
        try:
            read = Manifest.parse(data, MANIFEST)
        except CheckpointCorrupt as error:
            raise ArgumentError(
                f"this could not be read back: {error}. Give long values as tensors"
            ) from error
        if read != self:
            raise ArgumentError(
                "world and sections must be plain JSON: lists, dicts with keys that are str, "
                "str, int, float, bool and None"
            )
        return data

    @classmethod
    def parse(cls, data: bytes, path: object) -> Manifest:
        """The manifest that was dumped as ``data``.

        Args:
            data: the whole file.
            path: of the file, for the error.

        Raises:
            CheckpointTooNew: it is of a schema that only a newer version knows.
            CheckpointCorrupt: these are not the bytes of a manifest, or it contradicts itself.
                Nothing else, whatever the bytes are.
        """
        _check_bytes(data, path)
        _check_schema(newer_schema(data[:BEGINNING_NBYTES]), path)
        found = read_json(data, path, memory=_MEMORY, max_records=MAX_PIECES)
        _check_schema(found.get("schema") if isinstance(found, dict) else None, path)
        try:
            return _manifest(found)
        except Inconsistent as error:
            what, tensor = error.what, error.tensor
        # Outside of the handler, so that the error does not keep the manifest alive.
        raise CheckpointCorrupt(what, path, tensor=tensor)


def newer_schema(beginning: bytes) -> int | None:
    """The schema of a manifest that a newer version has written; None if it is none.

    Args:
        beginning: of the manifest, ``BEGINNING_NBYTES`` of it or all.

    Example:
        >>> newer_schema(b'{"checksum":"0123456789abcdef","schema":7,"unheard":"of"}')
        7
    """
    found = _BEGINNING.match(beginning)
    return int(found[1]) if found is not None and int(found[1]) > SCHEMA else None


def _check_schema(schema: Json, path: object) -> None:
    """Refuse what a newer version has written, before anything else is asked of it."""
    if is_size(schema) and cast(int, schema) > SCHEMA:
        raise CheckpointTooNew(cast(int, schema), SCHEMA, path)


def _check_bytes(data: bytes, path: object) -> None:
    """Refuse what does not begin as a manifest, or has another checksum."""
    if len(data) > MAX_MANIFEST_NBYTES:
        raise CheckpointCorrupt(
            f"{len(data)} bytes are no manifest, which has at most {MAX_MANIFEST_NBYTES}", path
        )
    digits = data[len(_BEFORE) : _BEGIN - len(_AFTER)]
    if data[:_BEGIN] != _BEFORE + digits + _AFTER:
        raise CheckpointCorrupt("this is no manifest: it does not begin as one", path)
    found = checksum(memoryview(data)[_BEGIN:])
    if digits != found.encode():
        raise CheckpointCorrupt(
            f"its checksum is {found} and was {digits.decode(errors='replace')!r}: "
            "it was changed after it was written. Load another step",
            path,
        )


def _fields(manifest: Manifest) -> dict[str, object]:
    """The members of the JSON object after the checksum."""
    return {
        "schema": SCHEMA,
        "step": manifest.step,
        "world": dict(manifest.world),
        "versions": dict(manifest.versions),
        "threads": manifest.threads,
        "files": [
            {
                "name": file.name,
                "nbytes": file.nbytes,
                "header_nbytes": file.header_nbytes,
                "header_checksum": file.header_checksum,
            }
            for file in manifest.files
        ],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "pieces": tensor.pieces,
                "ties": tensor.ties,
            }
            for name, tensor in manifest.tensors.items()
        },
        "sections": dict(manifest.sections),
    }


def _manifest(found: Json) -> Manifest:
    """The manifest of a JSON value; its constructor checks what is in the lists."""
    schema = found.get("schema") if isinstance(found, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise Inconsistent(f"its schema is {brief(schema)}, which there never was")
    _, _, step, world, versions, threads, files, tensors, sections = _members(found, "it", _MEMBERS)
    return Manifest(
        step=cast(int, step),
        world=_dict(world, "world"),
        versions=cast(dict[str, str], _dict(versions, "versions")),
        threads=cast(tuple[int, ...], tuple(_list(threads, "threads"))),
        files=tuple(_file(file) for file in _list(files, "files")),
        tensors={name: _tensor(name, one) for name, one in _dict(tensors, "tensors").items()},
        sections=_dict(sections, "sections"),
    )


def _file(found: Json) -> SavedFile:
    names = ("name", "nbytes", "header_nbytes", "header_checksum")
    name, nbytes, header_nbytes, header_checksum = _members(found, "a file", names)
    return SavedFile(
        name=cast(str, name),
        nbytes=cast(int, nbytes),
        header_nbytes=cast(int, header_nbytes),
        header_checksum=cast(str, header_checksum),
    )


def _tensor(name: str, found: Json) -> SavedTensor:
    if not is_tensor_name(name):
        raise Inconsistent(f"a tensor is named {brief(name)}, which cannot be a name")
    names = ("dtype", "shape", "pieces", "ties")
    dtype, shape, pieces, ties = _members(found, f"tensor {brief(name)}", names)
    return SavedTensor(
        name=name,
        dtype=cast(str, dtype),
        shape=cast(tuple[int, ...], tuple(_list(shape, f"shape of {brief(name)}"))),
        pieces=_pieces(name, _list(pieces, f"pieces of {brief(name)}")),
        ties=cast(tuple[str, ...], tuple(_list(ties, f"ties of {brief(name)}"))),
    )


def _pieces(name: str, found: list[Json]) -> tuple[SavedPiece, ...]:
    for piece in found:
        if type(piece) is not list or len(piece) != len(SavedPiece._fields):
            raise Inconsistent(f"a piece is {brief(piece)}, which is none", name)
    # SavedPiece._make, but for its check of the length: there may be a million.
    make = partial(tuple.__new__, SavedPiece)
    in_place = cast(list[Any], found)  # so that each array goes at once
    for i, piece in enumerate(in_place):
        in_place[i] = make(piece)
    pieces = tuple(in_place)
    in_place.clear()
    return pieces


def _members(found: Json, what: str, names: tuple[str, ...]) -> list[Json]:
    """The values of an object that has exactly these members."""
    members = _dict(found, what)
    if members.keys() != set(names):
        raise Inconsistent(
            f"{what} has the members {', '.join(map(repr, members)):.200}; "
            f"it must have {', '.join(names)}"
        )
    return [members[name] for name in names]


def _dict(found: Json, what: str) -> dict[str, Json]:
    if type(found) is not dict:
        raise Inconsistent(f"{what} is {brief(found)}; it must be an object")
    return found


def _list(found: Json, what: str) -> list[Json]:
    if type(found) is not list:
        raise Inconsistent(f"{what} is {brief(found)}; it must be an array")
    return found
