"""Real text as bytes: its source, the held-out part, and the share of each rank in a batch."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import echelon as ec

# Folders of the standard library that hold tests, tables or other people's packages.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED |= {"encodings", "pydoc_data", "lib2to3", "unicodedata"}
HELD_OUT = 16  # one file in so many, or the last of so many equal parts
LEAST_BYTES = 10_000


class DataError(ec.ArgumentError):
    """Text that cannot be trained on."""


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, both 1D of uint8.

    Attributes:
        source: where the text is from, in words.
    """

    source: str
    train: Tensor
    held_out: Tensor

    def unigram_entropy(self) -> float:
        """Bits per byte of the held-out text for a model that knows only how frequent bytes are."""
        counts = torch.bincount(self.held_out.long(), minlength=256).double()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * shares.log2()).sum())


@lru_cache(maxsize=2)  # simulated ranks share it
def load_text(path: str | None, device: torch.device) -> Text:
    """The text of a file or of all text files in a folder; without a path, Python's own sources.

    Raises:
        DataError: there is nothing at ``path``, it cannot be read, or it is too short or not text.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            file
            for file in sorted(root.rglob("*.py"))
            if not SKIPPED & set(file.relative_to(root).parts)
        ]
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    else:
        if not str(path).strip():
            raise DataError("--data is empty: give a text file or a folder, or leave it out")
        root, source = Path(path), str(path)
        if not root.exists():
            raise DataError(f"--data {path} does not exist: give a text file or a folder of them")
        files = [f for f in sorted(root.rglob("*")) if f.is_file()] if root.is_dir() else [root]
    contents = [content for content in map(_read, files) if content]
    if root.is_dir():
        contents = [content for content in contents if _is_text(content)]
    elif contents and not _is_text(contents[0]):
        raise DataError(
            f"--data {path} is binary (not UTF-8): give a text file or a folder of them"
        )
    train, held_out = _split(contents)
    if len(train) + len(held_out) < LEAST_BYTES:
        raise DataError(
            f"--data {path or root} holds {len(train) + len(held_out)} bytes of text; "
            f"give at least {LEAST_BYTES}"
        )
    return Text(source, _tensor(train).to(device), _tensor(held_out).to(device))


def batch(
    data: Tensor, context: int, sequences: int, *, seed: int, step: int, rank: int, size: int
) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of one step: tokens and what follows each, both B L.

    A pure function of its arguments. Law: the parts of all ranks, end to end, are the batch that
    ``rank=0, size=1`` gives.

    Args:
        sequences: in the batch of all ranks; a multiple of ``size``.
    """
    last = len(data) - context - 1
    starts = np.random.default_rng((seed, step)).integers(0, last + 1, sequences)
    part = starts[rank * sequences // size : (rank + 1) * sequences // size]
    index = torch.from_numpy(part[:, None] + np.arange(context + 1))
    window = data[index.to(data.device)].long()
    return window[:, :-1], window[:, 1:]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; give a file you may read"
        ) from error


def _split(contents: list[bytes]) -> tuple[bytes, bytes]:
    """Split into training and held-out text: by files, or by position if there are few files."""
    if len(contents) < HELD_OUT:
        whole = b"".join(contents)
        cut = len(whole) - len(whole) // HELD_OUT
        return whole[:cut], whole[cut:]
    train = [content for i, content in enumerate(contents) if i % HELD_OUT != HELD_OUT - 1]
    return b"".join(train), b"".join(contents[HELD_OUT - 1 :: HELD_OUT])


def _is_text(content: bytes) -> bool:
    """Whether the first part is UTF-8 without the bytes that only binaries have."""
    head = content[:65536]
    if b"\0" in head:
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return len(head) == 65536 and error.start > len(head) - 4  # cut inside a character
    return True


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
