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
and no older step is loaded in its place. Anything that this text does not allow needs a new number.

The other members are exactly these. They are written in this order, and read in any order:

``schema``
    ``3`` if the name of a file has a nonce, else ``2`` if the manifest has the dtype ``"C128"`` in
    it, else ``1``. A reader accepts it in any place. There is no tensor of C128 in schema 1, and no
    nonce in 1 and 2; otherwise the three are the same.
``step``
    the step, from 0 to 999,999,999.
``world``
    an object: what wrote it. ``size`` is the number of ranks that saved, which readers need; the
    rest is for people.
``versions``
    an object of strings: the versions of packages, by name. For people.
``threads``
    an array: how many threads PyTorch had on each rank. Another number gives other sums.
``files``
    an array of objects, by rank. ``name``; ``nbytes``, the length of the file; ``header_nbytes``,
    the number of bytes before the data, that is 8 + the length of the JSON text with its spaces;
    ``header_checksum``, that of these bytes. A rank that wrote nothing has no file. In an object
    store, a name has "-" and a nonce of 16 hex digits before its ".safetensors", which no other
    save has: a late upload of a save that was given up can then replace nothing. Files of ranks
    that the manifest does not name are no part of the step there.
``tensors``
    an object, by name. Each is an object of ``dtype``, a name of safetensors' such as ``"F32"``,
    or ``"C128"``; ``shape``, an array; ``pieces``; and ``ties``, an array of further names of the
    tensor.
``sections``
    an object: what was saved beside tensors. Free JSON; ``echelon.values`` says how Python
    values look in it.

**A piece** is the array ``[file, start, numel, offset, checksum]``: elements ``start`` to
``start + numel`` of the tensor, flattened in row-major order, lie in ``files[file]`` from byte
``offset`` on, little-endian and with nothing between them; ``checksum`` is that of these bytes.
Pieces come in order of ``start`` and cover the tensor exactly once; a tensor without elements has
none. An offset may be any number: nothing is aligned. BOOL is one byte, 0 or 1; C64 is two F32, and
C128 two F64, the real part first. safetensors has no C128, so that the headers of files, which need
not be read, have F64 and a last dim of 2 for it.

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
from dataclasses import dataclass, fields
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
    has_nonce,
    is_tensor_name,
)
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointTooNew
from echelon.values.untrusted_json import Json, brief, read_json, write_json
from echelon.values.value_types import COMPLEX128, is_size

SCHEMA = 3  # the newest
PREFIX_NBYTES = 64  # the first bytes of a manifest, which contain its schema
_MEMORY = 160 * 2**20  # bytes that reading may take beside the file and the pieces
_PREFIX, _CHECKSUM_END = b'{"checksum":"', b'",'  # around the 16 digits
_CONTENT_START = len(_PREFIX) + 16 + len(_CHECKSUM_END)
_PREFIX_RE = re.compile(re.escape(_PREFIX) + rb'[0-9a-f]{16}","schema":([0-9]{1,18}),')
_FILE_MEMBERS = tuple(field.name for field in fields(SavedFile))
_TENSOR_MEMBERS = tuple(field.name for field in fields(SavedTensor) if field.name != "name")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. Law: every manifest keeps the laws of this module's docstring.

    Attributes:
        step: the number of the training step.
        world: what wrote it; ``size`` is the number of ranks that saved.
        versions: of packages, by name.
        threads: how many threads PyTorch had, by rank.
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
        content = write_json(_encoded(self), "the manifest")[1:]
        data = _PREFIX + checksum(content).encode() + _CHECKSUM_END + content
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
        """The manifest that was dumped as ``data``, the whole file at ``path``.

        Raises:
            CheckpointTooNew: it is of a schema that only a newer version knows.
            CheckpointCorrupt: these are not the bytes of a manifest, or it contradicts itself.
                Nothing else, whatever the bytes are.
        """
        _check_bytes(data, path)
        # The schema is checked before the JSON, which this version might not be able to read, and
        # after it, as the member may be anywhere; then it must be an integer that was in use.
        _refuse_newer(newer_schema(data[:PREFIX_NBYTES]), path)
        content = read_json(data, path, memory=_MEMORY, max_records=MAX_PIECES)
        schema = content.get("schema") if isinstance(content, dict) else None
        _refuse_newer(schema, path)
        try:
            if type(schema) is not int or not 1 <= schema <= SCHEMA:
                raise Inconsistent(f"unknown schema {brief(schema)}")
            return _decoded(content, schema)
        except Inconsistent as error:
            what, tensor = error.what, error.tensor
        # Outside of the handler, so that the error does not keep the manifest alive.
        raise CheckpointCorrupt(what, path, tensor=tensor)


def newer_schema(prefix: bytes) -> int | None:
    """The schema of a manifest that a newer version wrote; None for any other file.

    Args:
        prefix: the first ``PREFIX_NBYTES`` of the manifest, or all of it.

    Example:
        >>> newer_schema(b'{"checksum":"0123456789abcdef","schema":7,"unheard":"of"}')
        7
    """
    match = _PREFIX_RE.match(prefix)
    return int(match[1]) if match is not None and int(match[1]) > SCHEMA else None


def _refuse_newer(schema: Json, path: object) -> None:
    """Refuse the schema of a newer version."""
    if is_size(schema) and cast(int, schema) > SCHEMA:
        raise CheckpointTooNew(cast(int, schema), SCHEMA, path)


def _check_bytes(data: bytes, path: object) -> None:
    """Refuse bytes that do not begin as a manifest does, or have another checksum."""
    if len(data) > MAX_MANIFEST_NBYTES:
        raise CheckpointCorrupt(
            f"{len(data)} bytes are no manifest, which has at most {MAX_MANIFEST_NBYTES}", path
        )
    digits = data[len(_PREFIX) : _CONTENT_START - len(_CHECKSUM_END)]
    if data[:_CONTENT_START] != _PREFIX + digits + _CHECKSUM_END:
        raise CheckpointCorrupt("this is no manifest: it does not begin as one", path)
    actual = checksum(memoryview(data)[_CONTENT_START:])
    if digits != actual.encode():
        raise CheckpointCorrupt(
            f"its checksum is {actual} and was {digits.decode(errors='replace')!r}: "
            "it was changed after it was written. Load another step",
            path,
        )


def _schema(manifest: Manifest) -> int:
    """The oldest schema that has what is in the manifest, so that older versions can read it."""
    sections = write_json(dict(manifest.sections), "the manifest")
    dtypes = {tensor.dtype for tensor in manifest.tensors.values()}
    if any(has_nonce(file.name) for file in manifest.files):
        return 3
    return 2 if COMPLEX128 in dtypes or f'"{COMPLEX128}"'.encode() in sections else 1


# A manifest to JSON and back. A record is an object with a member for each of its fields; what is
# in an array or in a record is checked by the constructor of the manifest. Law: ``_decoded`` of
# what was written is the manifest, and what it takes is written again with the same values.


def _encoded(manifest: Manifest) -> dict[str, object]:
    """The members of the JSON object after the checksum."""
    return {
        "schema": _schema(manifest),
        "step": manifest.step,
        "world": dict(manifest.world),
        "versions": dict(manifest.versions),
        "threads": manifest.threads,
        "files": [_members_of(file, _FILE_MEMBERS) for file in manifest.files],
        "tensors": {
            name: _members_of(tensor, _TENSOR_MEMBERS) for name, tensor in manifest.tensors.items()
        },
        "sections": dict(manifest.sections),
    }


def _members_of(record: SavedFile | SavedTensor, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}


def _decoded(content: Json, schema: int) -> Manifest:
    """The manifest of a JSON value."""
    names = ("checksum", "schema", *(field.name for field in fields(Manifest)))
    members = _members(content, "it", names)
    tensors = _dict(members["tensors"], "tensors")
    manifest = Manifest(
        step=members["step"],
        world=_dict(members["world"], "world"),
        versions=_dict(members["versions"], "versions"),
        threads=tuple(_list(members["threads"], "threads")),
        files=tuple(
            SavedFile(**_members(file, "a file", _FILE_MEMBERS))
            for file in _list(members["files"], "files")
        ),
        tensors={name: _tensor(name, content) for name, content in tensors.items()},
        sections=_dict(members["sections"], "sections"),
    )
    if schema < 3 and any(has_nonce(file.name) for file in manifest.files):
        raise Inconsistent(f"there is no file with a nonce in schema {schema}")
    for name, tensor in manifest.tensors.items():
        if schema == 1 and tensor.dtype == COMPLEX128:
            raise Inconsistent(f"there is no {COMPLEX128} in schema 1", name)
    return manifest


def _tensor(name: str, content: Json) -> SavedTensor:
    shown = brief(name)
    if not is_tensor_name(name):
        raise Inconsistent(f"a tensor is named {shown}, which cannot be a name")
    members = _members(content, f"tensor {shown}", _TENSOR_MEMBERS)
    arrays = {key: _list(members[key], f"{key} of {shown}") for key in ("shape", "ties", "pieces")}
    return SavedTensor(
        name=name,
        dtype=members["dtype"],
        shape=tuple(arrays["shape"]),
        pieces=_pieces(name, arrays["pieces"]),
        ties=tuple(arrays["ties"]),
    )


def _pieces(name: str, arrays: list[Any]) -> tuple[SavedPiece, ...]:
    """The pieces of a tensor; ``arrays`` is emptied to halve the memory, for millions of pieces."""
    for array in arrays:
        if type(array) is not list or len(array) != len(SavedPiece._fields):
            raise Inconsistent(f"a piece is {brief(array)}, which is none", name)
    # SavedPiece._make without its check of the length, which takes too long for a million.
    make = partial(tuple.__new__, SavedPiece)
    for i, array in enumerate(arrays):
        arrays[i] = make(array)  # so that each array is freed at once
    pieces = tuple(arrays)
    arrays.clear()
    return pieces


def _members(content: Json, what: str, names: tuple[str, ...]) -> dict[str, Any]:
    """An object that has exactly the members ``names``."""
    members = _dict(content, what)
    if members.keys() != set(names):
        raise Inconsistent(
            f"{what} has the members {', '.join(map(repr, members)):.200}; "
            f"it must have {', '.join(names)}"
        )
    return members


def _dict(value: Json, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise Inconsistent(f"{what} is {brief(value)}; it must be an object")
    return value


def _list(value: Json, what: str) -> list[Any]:
    if type(value) is not list:
        raise Inconsistent(f"{what} is {brief(value)}; it must be an array")
    return value
