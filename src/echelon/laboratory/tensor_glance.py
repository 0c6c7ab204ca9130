"""What is kept of tensors that somebody looks at: all numbers of small ones, few of large ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final
from zlib import crc32

import torch
from rich.text import Text
from torch import Tensor

from echelon.comm.object_bytes import flat_bytes, to_object
from echelon.errors import CommError

_FEW = 8  # numbers, or parts, that a text shows if there are no more
_CUT = 4  # numbers that it shows of more
_LONGEST = 60  # characters of an object
_FIRST = 16  # elements that are kept of each part of a large tensor
_BLOCKS = 256  # ranges of a large tensor whose bits are compared
_FLOAT8 = {dtype for dtype in vars(torch).values() if str(dtype).startswith("torch.float8_")}
_NUMBERS = _FLOAT8 | {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.float16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128),
}
_PIECE = 1 << 15  # elements of which there is a copy in float64


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorGlance:
    """The numbers of a tensor, or of parts for several ranks, at one moment.

    Attributes:
        dtype: of the elements. Dtypes that have no arithmetic are shown as bytes.
        lengths: the number of elements of each part; of one tensor, its number.
        values: all elements if ``is_whole``, otherwise the first of each part. 1D, on the CPU.
        is_whole: whether all elements were kept.
        norm: the square root of the sum of all squares, of floating-point tensors.
        objects: how the objects read whose bytes the parts are; empty of tensors.
    """

    dtype: torch.dtype
    lengths: tuple[int, ...]
    values: Tensor
    is_whole: bool
    norm: float | None
    objects: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Tensor], keep: int) -> TensorGlance:
        """Look at tensors, of which at most ``keep`` elements together are kept whole.

        Args:
            parts: at least one, 1D and of one dtype.
        """
        dtype = parts[0].dtype
        with torch.inference_mode(False), torch.no_grad():
            if dtype not in _NUMBERS:  # of which torch can hardly read an element
                parts = [flat_bytes(part) for part in parts]
            lengths = tuple(part.numel() for part in parts)
            is_whole = sum(lengths) <= keep
            shown = [part if is_whole else part[:_FIRST] for part in parts]
            norm = None
            if parts[0].is_floating_point() or parts[0].is_complex():
                norm = math.hypot(*map(_norm, parts))
            return cls(
                dtype=dtype,
                lengths=lengths,
                values=torch.cat([part.detach().cpu() for part in shown]),
                is_whole=is_whole,
                norm=norm,
            )

    @property
    def numel(self) -> int:
        """The number of elements of all parts."""
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """The size of all parts, in bytes."""
        return self.numel * (self.dtype if self.dtype in _NUMBERS else torch.uint8).itemsize

    def text(self, changed: Sequence[tuple[int, int]] = ()) -> Text:
        """A few numbers, parts divided by bars, and the norm of what is not shown whole.

        Args:
            changed: ranges of elements that are printed bold.

        Example:
            >>> parts = [torch.arange(2), torch.arange(2, 4)]
            >>> TensorGlance.of(parts, keep=100).text().plain
            '[0, 1 | 2, 3]'
        """
        if self.objects:
            return Text(" | ".join(self.objects))
        text = Text("[")
        numbers: list[object] = self.values.tolist()
        num_parts = max(1, sum(length > 0 for length in self.lengths))
        each = self.numel if self.numel <= _FEW else max(1, _CUT // num_parts)
        at, start, num_shown = 0, 0, 0  # in ``values``, and in the tensors
        for i, length in enumerate(self.lengths):
            if i == _FEW and self.numel > _FEW:
                text.append(" | …")
                break
            text.append(" | " if i else "")
            kept = length if self.is_whole else min(length, _FIRST)
            few = min(kept, each)
            for j in range(few):
                bold = any(first <= start + j < last for first, last in changed)
                text.append(", " if j else "")
                text.append(number_text(numbers[at + j]), style="bold green" if bold else "")
            text.append(", …" if few < length else "")
            at, start, num_shown = at + kept, start + length, num_shown + few
        text.append("]")
        if num_shown < self.numel:
            text.append(f" {self.numel:,} elements")
            if self.norm is not None:
                text.append(f", norm {number_text(self.norm)}")
        return text

    def with_objects(self) -> TensorGlance:
        """The same with the objects whose bytes ``all_gather_object`` and its like send."""
        if not self.is_whole:
            return self
        parts = self.values.split(list(self.lengths))
        try:
            texts = [repr(to_object(part, 0)) if len(part) else "" for part in parts]
        except CommError:  # they are a user's own bytes under the same label
            return self
        return replace(self, objects=tuple(f"{text:.{_LONGEST}}" for text in texts))


def _norm(part: Tensor) -> float:
    """In float64, of which there is a copy of a piece at a time."""
    numbers = torch.view_as_real(part.detach()).flatten() if part.is_complex() else part.detach()
    pieces = list(numbers.split(_PIECE))
    if numbers.dtype in _FLOAT8:  # torch converts it to no other dtype by itself
        pieces = [piece.float() for piece in pieces]
    return math.hypot(*(torch.linalg.vector_norm(p, dtype=torch.float64).item() for p in pieces))


def number_text(number: object) -> str:
    """A number with four digits at most; a point marks those that may have a fraction.

    Example:
        >>> [number_text(number) for number in (3, 0.123456, 2.0, float("nan"), True)]
        ['3', '0.1235', '2.', 'nan', 'True']
    """
    if isinstance(number, float):
        text = f"{number:.4g}"
        return text if any(c in text for c in ".en") else f"{text}."
    if isinstance(number, complex):
        return f"{number:.3g}"
    return str(number)


# What has changed --------------------------------------------------------------------------------


@final
class Contents:
    """The bits of tensors at one moment, to be compared with later ones.

    Of tensors with more than ``keep`` elements together it has checksums of blocks, and no copy.
    """

    def __init__(self, parts: Sequence[Tensor], keep: int) -> None:
        self._parts = list(parts)
        self._is_whole = sum(part.numel() for part in parts) <= keep
        self._bits = [self._read(part) for part in self._parts]

    def changes(self) -> list[tuple[int, int]]:
        """The ranges of elements, counted over all parts, that have other bits now.

        Of large tensors they are whole blocks.
        """
        ranges: list[tuple[int, int]] = []
        start = 0
        for part, before in zip(self._parts, self._bits, strict=True):
            length = 1 if self._is_whole else _block_length(part)
            for index, (old, new) in enumerate(zip(before, self._read(part), strict=True)):
                if old == new:
                    continue
                first = start + index * length
                last = min(first + length, start + part.numel())
                if ranges and ranges[-1][1] == first:
                    ranges[-1] = (ranges[-1][0], last)
                else:
                    ranges.append((first, last))
            start += part.numel()
        return ranges

    def _read(self, part: Tensor) -> list[bytes] | list[int]:
        """The bytes of each element, or a checksum of each block."""
        size = part.element_size()
        with torch.no_grad():
            if self._is_whole:
                data = flat_bytes(part).numpy().tobytes()
                return [data[i : i + size] for i in range(0, len(data), size)]
            if not part.numel():
                return []
            blocks = part.detach().split(_block_length(part))
            return [crc32(flat_bytes(block).numpy().data) for block in blocks]


def _block_length(part: Tensor) -> int:
    return -(-part.numel() // _BLOCKS)
