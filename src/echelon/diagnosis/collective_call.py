"""What a collective call is, how it reads, and how ranks compare theirs in eight bytes."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

import torch

from echelon.errors.message_text import text_bytes
from echelon.process.notebook import place_name


class CallSignature(NamedTuple):
    """One communication call, as far as all ranks of a group must agree on it.

    Attributes:
        op: name of the method, ``"all_reduce"``.
        dtype: element type, or None where the call has none.
        shape: shape of the tensor that the call is about; empty where ranks may differ in it.
        reduce: reduction, ``"sum"``, or None.
        root: source or destination rank in the group, of a message the peer; or None.
        label: what is communicated, in the user's words, of a message its tag; part of the
            agreement.
        parts: lengths of the parts of the tensor, where ranks have unequal ones; else empty.
    """

    op: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    reduce: str | None = None
    root: int | None = None
    label: str | None = None
    parts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the tensor that the call is about."""
        if self.dtype is None:
            return 0
        numel = 1
        for length in self.shape:
            numel *= length
        return numel * self.dtype.itemsize

    def __str__(self) -> str:
        text = self.op if self.reduce is None else f"{self.op}({self.reduce})"
        if self.dtype is not None:
            text += f" {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        elif self.shape:  # of a subgroup: its members
            text += f" {list(self.shape)}"
        if self.parts:
            text += f" in parts of {list(self.parts)}"
        is_message = self.op in ("send", "recv")  # whose root is a peer, and whose label a tag
        if self.root is not None:
            text += f" {'peer' if is_message else 'root'}={self.root}"
        if self.label is not None:
            text += f" {self.label}" if is_message else f" of {self.label!r}"
        return text


@lru_cache(maxsize=8192)
def signature_of(
    op: str,
    dtype: torch.dtype | None,
    shape: tuple[int, ...],
    reduce: str | None = None,
    root: int | None = None,
    label: str | None = None,
    parts: tuple[int, ...] = (),
) -> CallSignature:
    """The signature with these facts; one object, because programs repeat their calls."""
    return CallSignature(op, dtype, tuple(shape), reduce, root, label, parts)


@lru_cache(maxsize=8192)
def fingerprint(call: CallSignature) -> int:
    """64 bits that differ when two calls differ; the same in every process."""
    return int.from_bytes(hashlib.blake2b(text_bytes(str(call)), digest_size=8).digest(), "little")


class CallSite(NamedTuple):
    """A line of user code, and the class of an exception that is being handled there."""

    file: str
    line: int
    function: str
    handled: str = ""

    def __str__(self) -> str:
        place = f"{place_name(self.file)}:{self.line} in {self.function}"
        return f"{place} (while handling {self.handled})" if self.handled else place


@dataclass(slots=True)
class CollectiveCall:
    """One issued call, with all that a report of it needs.

    Attributes:
        signature: what the ranks must agree on.
        place: the line of user code.
        position: its number among the calls of this kind in the group, from 0.
        group: name of the group.
        rank: this rank in the job.
        blocking: the caller waits at once, so the backend may run it on the caller's thread.
    """

    signature: CallSignature
    place: CallSite
    position: int
    group: str
    rank: int
    blocking: bool

    def __str__(self) -> str:
        return f"{self.signature} (#{self.position} of group {self.group!r}) at {self.place}"


# Frames of this library, of torch (autograd calls our hooks) and of Python's own modules (as where
# a context manager leaves) are not the user's.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMUNICATION = os.path.join(_PACKAGE, "comm") + os.sep
_NOT_THE_USERS = (
    _PACKAGE,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
    "<frozen ",
)


@lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    """Whether the code of a file is the user's. Cached, because every call asks for its frames."""
    # Torch marks functions as deprecated by wrapping them in one of ``typing_extensions``.
    return not file.startswith(_NOT_THE_USERS) and os.path.basename(file) != "typing_extensions.py"


def caller(depth: int = 1) -> CallSite:
    """The innermost line of user code that led here, ``depth`` frames up or more."""
    handled = sys.exc_info()[0]  # which the other ranks may not have, and so issue other calls
    try:
        frame = sys._getframe(depth)
    except ValueError:  # torch has called a method of ours, and no Python is around it
        frame = sys._getframe(1)
    while not _is_users(frame.f_code.co_filename):
        if frame.f_back is None:  # a thread of ours or of torch: the line that issues the call
            frame = sys._getframe(1)
            while frame.f_code.co_filename.startswith(_COMMUNICATION) and frame.f_back is not None:
                frame = frame.f_back
            break
        frame = frame.f_back
    # To make an object for each place takes longer than to find it. The hash of a code is slow, so
    # places are found by its address, which the code itself keeps.
    code, line = frame.f_code, frame.f_lineno
    known = _sites.get((id(code), line, handled))
    if known is not None and known[0] is code:
        return known[1]
    if len(_sites) >= _MOST_SITES:
        _sites.clear()
    name = "" if handled is None else handled.__name__
    site = CallSite(code.co_filename, line, code.co_name, name)
    _sites[id(code), line, handled] = code, site
    return site


_sites: dict[tuple[int, int, type[BaseException] | None], tuple[CodeType, CallSite]] = {}
_MOST_SITES = 4096
