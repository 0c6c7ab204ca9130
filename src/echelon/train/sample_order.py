"""The order of the samples of a job: a pure function of a seed, the epoch and the position."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from echelon.checks import flag, integer
from echelon.errors import ArgumentError

_Positions = NDArray[np.uint64]

_ROUNDS = 16  # with 12, some orders of 7 samples are still rarer than others


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Which samples make up each batch of each epoch.

    Attributes:
        num_samples: the number of samples of the data set.
        batch_size: the number of samples of a step on all ranks together.
        seed: the seed of the order, which differs from epoch to epoch.
        shuffle: whether to shuffle.
        drop_last: whether the last batch of an epoch is left out if it is not full.
        version: the version of ``shuffled``; an order of another version must not be continued.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    version: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        numbers = {
            "num_samples": integer("num_samples", self.num_samples, low=1),
            "batch_size": integer("batch_size", self.batch_size, low=1),
            "seed": integer("seed", self.seed, high=2**64 - 1),
        }
        for name, value in numbers.items():  # Python's integers also where NumPy's were given
            object.__setattr__(self, name, value)
        flag("shuffle", self.shuffle)
        flag("drop_last", self.drop_last)
        if not self.end:
            raise ArgumentError(
                f"{self.num_samples} samples make no batch of {self.batch_size}: give a smaller "
                "batch_size, or drop_last=False"
            )

    @property
    def end(self) -> int:
        """How many samples an epoch has."""
        return self.num_samples - (self.num_samples % self.batch_size if self.drop_last else 0)

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has."""
        return -(-self.end // self.batch_size)

    def batches(self, position: int = 0) -> Iterator[range]:
        """The positions of each batch in the rest of an epoch."""
        for start in range(position, self.end, self.batch_size):
            yield range(start, min(start + self.batch_size, self.end))

    def samples(self, epoch: int, positions: Sequence[int]) -> list[int]:
        """The samples at ``positions`` of an epoch."""
        if not self.shuffle:
            return list(positions)
        array = np.array(positions, dtype=np.uint64)
        samples: list[int] = shuffled(array, self.num_samples, self.seed, epoch).tolist()
        return samples


def shuffled(positions: _Positions, num_samples: int, seed: int, epoch: int) -> _Positions:
    """The samples at ``positions`` of the shuffled order of an epoch.

    The samples are put in a grid. A round shifts each column, or each row, by a hash of its number;
    a position that ends outside of the samples goes through all rounds again. Law: over all
    positions it is a permutation of ``range(num_samples)``. No array of that size is made, and the
    order depends on no generator of a library, whose next version may draw other numbers.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002 (generalized Feistel
    and cycle walking). The hash is the last step of SplitMix64: Steele, Lea and Flood, "Fast
    Splittable Pseudorandom Number Generators", 2014.

    Example:
        >>> shuffled(np.arange(8, dtype=np.uint64), 8, seed=0, epoch=0).tolist()
        [1, 6, 4, 7, 3, 2, 0, 5]
    """
    num_rows = math.isqrt(num_samples - 1) + 1
    num_rows += num_rows % 2  # shifts of odd lengths only would never give an odd permutation
    num_columns = -(-num_samples // num_rows)
    rows, columns = np.uint64(num_rows), np.uint64(num_columns)
    digest = hashlib.shake_256(f"{seed} {epoch}".encode()).digest(8 * _ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    samples = positions.copy()
    outside = np.arange(len(samples))
    while outside.size:
        row, column = np.divmod(samples[outside], columns)
        for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _hashed(column ^ row_key) % rows) % rows
            column = (column + _hashed(row ^ column_key) % columns) % columns
        samples[outside] = row * columns + column
        outside = outside[samples[outside] >= num_samples]
    return samples


def _hashed(value: _Positions) -> _Positions:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
