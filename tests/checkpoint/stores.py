"""An object store in the memory of this process, and ways for it to fail."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest

from echelon.checkpoint.store_path import StorePath

_numbers = itertools.count()


@pytest.fixture
def store() -> Iterator[str]:
    """The URL of an empty bucket."""
    name = f"bucket{next(_numbers)}"
    yield f"memory://{name}"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def objects(url: str) -> dict[str, bytes]:
    """Everything below a URL, by its path from there."""
    system, key = fsspec.core.url_to_fs(url)
    return {path[len(key) + 1 :]: system.cat_file(path) for path in system.find(key)}


class Killed(BaseException):
    """The process has ended: nothing can be caught."""


@contextmanager
def killed_at(call: int, *, after: bool) -> Iterator[list[int]]:
    """End the process in a call to the store: no later call happens, not even to clean up.

    Args:
        call: number of the call, from 0.
        after: whether the call itself still happens.

    Yields:
        The number of calls, in a list of one.
    """
    counts = [0]
    real = StorePath.call

    def dying(self: StorePath, operation: Callable[[Any, str], Any], *expected: Any) -> Any:
        counts[0] += 1
        if counts[0] <= call or (after and counts[0] == call + 1):
            result = real(self, operation, *expected)
            if counts[0] <= call:
                return result
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StorePath, "call", dying)
        yield counts
