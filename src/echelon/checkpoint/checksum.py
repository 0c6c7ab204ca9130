"""The checksum of saved bytes: XXH3-64, as 16 hex digits.

It detects accidents, such as a flipped bit or a block of another file. It is no signature: whoever
can write the files can write the checksums, too.

Source: Y. Collet, "xxHash fast digest algorithm", specification 0.2.0, section XXH3.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import xxhash

_DIGITS = re.compile(r"[0-9a-f]*")
_NUM_DIGITS = 16


def checksum(data: bytes | memoryview) -> str:
    """The checksum of ``data``, which is read in place.

    Example:
        >>> checksum(b"")
        '2d06800538d394c2'
    """
    return xxhash.xxh3_64_hexdigest(data)


def is_checksum(value: object) -> bool:
    """Whether ``value`` has the form of a checksum: 16 lower-case hex digits."""
    return are_checksums([value])


def are_checksums(values: Collection[object]) -> bool:
    """Whether all of ``values`` have the form of a checksum; fast for many."""
    texts = [value for value in values if type(value) is str]
    return (
        len(texts) == len(values)
        and set(map(len, texts)) <= {_NUM_DIGITS}
        and _DIGITS.fullmatch("".join(texts)) is not None
    )


# The checksum of bytes that come in parts: ``update`` adds some, which are read in place, and
# ``hexdigest`` gives that of all so far.
Checksum = xxhash.xxh3_64
