"""The records of a manifest for files and tensors, their names, and their limits.

``format`` specifies them, and ``consistency`` checks them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, cast, final

from echelon.errors import ArgumentError

MANIFEST = "manifest.json"
WRITTEN_BY = ".written-by-"  # and a writer: a file in a run whose steps are not those of ec.save
MAX_MANIFEST_NBYTES = 100_000_000
MAX_HEADER_NBYTES = 100_000_000  # of the JSON of a file's header; as in safetensors
MAX_STEP = 10**9 - 1  # so that names sort as steps do
MAX_PIECES = 1_000_000
_STEP = re.compile(r"step-([0-9]{9})")
_FILE = re.compile(r"rank-([0-9]{5,9})(?:-([0-9a-f]{16}))?\.safetensors")
_MAX_NAME = 1024  # characters
_MAX_KEY = _MAX_NAME + 64  # two numbers of at most 19 digits, and what is around them
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, surrogates


@final
class SavedPiece(NamedTuple):
    """A range of one tensor, in one file; a plain tuple, because there may be millions.

    Attributes:
        file: index into ``Manifest.files``.
        start: first element, in the flattened tensor.
        numel: length, in elements; at least 1.
        offset: first byte, in the file.
        checksum: of its bytes.
    """

    file: int
    start: int
    numel: int
    offset: int
    checksum: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor, and where its elements lie.

    Attributes:
        name: in the plain model.
        dtype: as safetensors names it, such as ``"F32"``; ``DTYPES`` has PyTorch's.
        shape: of the whole tensor.
        pieces: in order of their starts; they cover the tensor exactly once.
        ties: its further names.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]
    ties: tuple[str, ...] = ()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """The file of one rank.

    Attributes:
        name: of the file in the folder of the step.
        nbytes: size of the file.
        header_nbytes: bytes before the data.
        header_checksum: of these bytes.
    """

    name: str
    nbytes: int
    header_nbytes: int
    header_checksum: str


class Replaced(Enum):
    """What is at the name of a step when it is committed."""

    NOTHING = "nothing"
    DAMAGED = "a damaged step"
    WHOLE = "a step that the user has said to overwrite"


# Names ---------------------------------------------------------------------------------------


def step_name(step: int) -> str:
    """The name of the folder of a committed checkpoint.

    Raises:
        ArgumentError: ``step`` is negative or has more than nine digits.

    Example:
        >>> step_name(10)
        'step-000000010'
    """
    if not 0 <= step <= MAX_STEP:
        raise ArgumentError(f"step is {step}; give a whole number from 0 to {MAX_STEP}")
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step of a folder; None for what is not exactly the name of a committed checkpoint.

    Example:
        >>> step_of("step-000000010"), step_of("step-000000010.tmp")
        (10, None)
    """
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def file_name(rank: int, nonce: str | None = None) -> str:
    """The name of the file that one rank writes.

    Args:
        nonce: 16 hex digits that no other save has, where files of two saves may meet.

    Example:
        >>> file_name(3), file_name(3, "0123456789abcdef")
        ('rank-00003.safetensors', 'rank-00003-0123456789abcdef.safetensors')
    """
    if not 0 <= rank < 10**9:
        raise ArgumentError(f"rank is {rank}; give a whole number from 0 to {10**9 - 1}")
    return f"rank-{rank:05d}{'' if nonce is None else f'-{nonce}'}.safetensors"


def rank_of(value: object) -> int | None:
    """The rank whose file has this name, which has no path in it; None for any other name."""
    match = _FILE.fullmatch(value) if type(value) is str else None
    if match is None or file_name(int(match[1]), match[2]) != value:
        return None
    return int(match[1])


def is_file_name(value: object) -> bool:
    """Whether ``value`` is the name of the file of some rank."""
    return rank_of(value) is not None


def has_nonce(name: str) -> bool:
    """Whether the name of a file is that of one save alone."""
    match = _FILE.fullmatch(name)
    return match is not None and match[2] is not None


def is_tensor_name(value: object) -> bool:
    """Whether a tensor can have this name: 1 to 1024 characters, none of them for control."""
    return is_key(value) and len(cast(str, value)) <= _MAX_NAME


def is_key(value: object) -> bool:
    """Whether a range of a tensor can have this key in a file: a name, and perhaps a range."""
    return type(value) is str and 0 < len(value) <= _MAX_KEY and _UNPRINTABLE.search(value) is None
