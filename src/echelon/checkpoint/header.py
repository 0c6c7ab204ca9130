"""The header of a safetensors file, which lists the tensors that its data are, end to end.

::

    | length of the JSON, 8 bytes | JSON, and spaces up to a multiple of 64 bytes | data ...
    {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

Source: the format of safetensors, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, cast

from echelon.checkpoint.records import MAX_HEADER_NBYTES, is_key
from echelon.errors import ArgumentError, CheckpointCorrupt
from echelon.values.untrusted_json import Json, brief, read_json, write_json
from echelon.values.value_types import FILE_DTYPES, is_size, nbytes_of, tensor_problem

_ALIGN = 64  # the data begin in a line of the cache
_LENGTH_NBYTES = 8
_MEMORY = 160 * 2**20  # bytes that reading may take
# What safetensors allows beside tensors. Some readers ask which framework wrote the file.
_METADATA = "__metadata__"
_WRITTEN_METADATA = {"format": "pt"}
_ENDS_LIKE_A_RANGE = re.compile(r".*\[[0-9]+:[0-9]+\]", re.DOTALL)


class Entry(NamedTuple):
    """One tensor in a file; ``dtype`` is one of ``FILE_DTYPES``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def key_of(name: str, shape: Sequence[int], start: int, numel: int) -> str:
    """The key of a range of a tensor: the name of the tensor if the range is all of it.

    Law: different ranges have different keys, whatever the names are. So a name that ends like a
    range, or is ``__metadata__``, is always followed by its range.

    Args:
        start: first element, in the flattened tensor.
        numel: length, in elements.

    Example:
        >>> key_of("weight", (2, 3), 0, 6), key_of("weight", (2, 3), 2, 4)
        ('weight', 'weight[2:6]')
    """
    if numel == prod(shape) and name != _METADATA and not _ENDS_LIKE_A_RANGE.fullmatch(name):
        return name
    return f"{name}[{start}:{start + numel}]"


def header(entries: Sequence[Entry]) -> bytes:
    """The header of a file that has these tensors end to end, in this order.

    Raises:
        ArgumentError: a key comes twice, is reserved or cannot be a name, a number of bytes is not
            that of the shape, or it would be too long to be read.

    Example:
        >>> len(header([Entry("bias", "F32", (3,), 12)]))
        128
    """
    members: dict[str, object] = {_METADATA: _WRITTEN_METADATA}
    end = 0
    for key, dtype, shape, nbytes in entries:
        if not is_key(key) or key == _METADATA:
            raise ArgumentError(
                f"a tensor in a file of a checkpoint cannot be named {brief(key)}: a name has 1 to "
                f"1024 characters, none of them a control character, and is not {_METADATA}"
            )
        if key in members:
            raise ArgumentError(f"two tensors in a file of a checkpoint are named {brief(key)}")
        if dtype not in FILE_DTYPES or nbytes != nbytes_of(dtype, shape):
            raise ArgumentError(f"{key!r:.80}: {nbytes} bytes are no {dtype} of shape {shape}")
        members[key] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": (end, end + nbytes),
        }
        end += nbytes
    text = write_json(members, "the header of a file")
    text += b" " * (-(_LENGTH_NBYTES + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER_NBYTES:
        raise ArgumentError(
            f"the header of a file of {len(entries)} tensors has {len(text)} bytes, and no reader "
            f"takes more than {MAX_HEADER_NBYTES}: save fewer tensors on one rank"
        )
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text


def header_nbytes(data: bytes, path: object) -> int:
    """The number of bytes of a header, from the first 8 bytes of the file or more.

    Raises:
        CheckpointCorrupt: no header has this length.
    """
    length = int.from_bytes(data[:_LENGTH_NBYTES], "little")
    if len(data) < _LENGTH_NBYTES or not 2 <= length <= MAX_HEADER_NBYTES:
        raise CheckpointCorrupt(
            f"this is no safetensors file: its header would have {length} bytes", path
        )
    return _LENGTH_NBYTES + length


def read_header(data: bytes, path: object) -> list[Entry]:
    """The tensors of a file from any source, in the order of their data.

    It is stricter than safetensors, so that no file makes it take much memory. The caller compares
    the size of the file with that of the header and all entries.

    Args:
        data: the first bytes of the file, with the whole header.

    Raises:
        CheckpointCorrupt: this is no header; or its tensors overlap, leave bytes out, or cannot
            exist. Nothing else, whatever the bytes are.
    """
    end = header_nbytes(data, path)
    if len(data) < end:
        raise CheckpointCorrupt(f"it ends in its header, after {len(data)} of {end} bytes", path)
    text = memoryview(data)[_LENGTH_NBYTES:end]  # not a copy
    if text[0] != ord("{"):
        raise CheckpointCorrupt("its header does not begin as one", path)
    members = cast(dict[str, Json], read_json(text, path, memory=_MEMORY))
    metadata = members.pop(_METADATA, {})
    if type(metadata) is not dict or any(type(item) is not str for item in metadata.values()):
        raise CheckpointCorrupt(f"its {_METADATA} are {brief(metadata)}, and not strings", path)
    placed = sorted(_placed(members, path), key=lambda item: item[0])
    end = 0
    for (begin, stop), entry in placed:
        if begin != end:
            how = "overlaps the one before it" if begin < end else "leaves bytes out before it"
            raise CheckpointCorrupt(f"it {how}: {begin} to {stop}", path, tensor=entry.key)
        end = stop
    return [entry for _, entry in placed]


def _placed(members: dict[str, Json], path: object) -> Iterator[tuple[tuple[int, int], Entry]]:
    """Begin and end of each tensor in the data, with its entry."""
    for key, member in members.items():
        if not is_key(key):
            raise CheckpointCorrupt(f"a tensor is named {brief(key)}", path)
        if type(member) is not dict or member.keys() != {"dtype", "shape", "data_offsets"}:
            raise CheckpointCorrupt(f"its entry is {brief(member)}", path, tensor=key)
        dtype, shape, offsets = member["dtype"], member["shape"], member["data_offsets"]
        if type(shape) is not list:
            raise CheckpointCorrupt(f"its shape is {brief(shape)}", path, tensor=key)
        problem = tensor_problem(dtype, shape, FILE_DTYPES)
        if problem is not None:
            raise CheckpointCorrupt(problem, path, tensor=key)
        if type(offsets) is not list or len(offsets) != 2 or not all(map(is_size, offsets)):
            raise CheckpointCorrupt(f"its place is {brief(offsets)}", path, tensor=key)
        begin, stop = cast(list[int], offsets)
        name, dims = cast(str, dtype), tuple(cast(list[int], shape))
        if stop - begin != nbytes_of(name, dims):
            raise CheckpointCorrupt(
                f"its place is {begin} to {stop}, and it has {nbytes_of(name, dims)} bytes",
                path,
                tensor=key,
            )
        yield (begin, stop), Entry(key, name, dims, stop - begin)
