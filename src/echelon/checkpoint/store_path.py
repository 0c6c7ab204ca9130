"""Places in an object store, and the calls to it: each ends in time, with an error of ours.

fsspec talks to the store. A file system is asked for at each call, because none survives a fork;
fsspec keeps one for each process.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, final

from echelon.checkpoint.checksum import Checksum
from echelon.errors import ArgumentError, CheckpointError
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background

Result = TypeVar("Result")

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://[^/].*")
_unanswered: dict[str, threading.Thread] = {}  # calls that were given up, by URL
_CHUNK_NBYTES = 8 << 20  # hashed and then given to fsspec, which sends larger parts


@final
class StorePath:
    """A place in an object store: the folder of a run or of a step, or a file in it.

    The options and credentials of the store are those that fsspec is configured with.

    Args:
        url: with its scheme, such as ``s3://bucket/runs/a``.

    Raises:
        ArgumentError: no package is installed that knows the scheme.

    Example:
        >>> folder = StorePath("memory://runs/a")
        >>> folder / "step-000000010", folder.name, folder.parent
        (StorePath('memory://runs/a/step-000000010'), 'a', StorePath('memory://runs'))
    """

    __slots__ = ("_scheme", "url")
    url: str
    """Without a slash at its end."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise ArgumentError(
                f"directory is {url!r:.80}; give a path, or a URL such as 's3://bucket/runs/a'"
            )
        self._scheme, self.url = match[1], url.rstrip("/")
        _check_scheme(self._scheme)

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """The place above; a bucket is above itself."""
        above = self.url.rpartition("/")[0]
        return StorePath(above) if _URL.fullmatch(above) else self

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"StorePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    # Calls ---------------------------------------------------------------------------------------

    def call(self, operation: Callable[[Any, str], Result], *expected: type[OSError]) -> Result:
        """Call ``operation(file_system, key)``.

        A store that does not answer would hold this rank, and with it all others; so the call runs
        on a thread of its own, which is left behind when time is up.

        Args:
            expected: errors that the caller handles, which are raised as they are.

        Raises:
            CheckpointError: everything else that goes wrong.
        """
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                # A cached listing would not show what other ranks have written.
                file_system, key = _fsspec().url_to_fs(self.url, use_listings_cache=False)
                results.append(operation(file_system, key))
            except BaseException as error:  # raised below
                errors.append(error)

        thread = run_in_background("echelon store", run)
        thread.join(time_limits.STORE_CALL_S)
        if results:
            return results[0]
        if not errors:
            _unanswered[self.url] = thread
            raise CheckpointError(
                f"the store has not answered for {time_limits.STORE_CALL_S:g} s", self
            )
        error = errors[0]
        if isinstance(error, expected) or not isinstance(error, Exception):
            raise error
        raise CheckpointError(
            f"{type(error).__name__}: {str(error) or 'no reason given'}",
            self,
            errno=getattr(error, "errno", None),
        ) from error

    def sizes(self, depth: int = 1) -> dict[str, int]:
        """The bytes of each file below this place, by its path from here; none if there is nothing.

        Args:
            depth: how many folders down to look.
        """

        def entries(file_system: Any, key: str, level: int) -> Iterator[tuple[str, int]]:
            try:
                listing = file_system.ls(key, detail=True)
            except FileNotFoundError:
                return
            for entry in listing:
                name = entry["name"].rstrip("/")
                if entry["type"] != "directory":
                    yield name, entry["size"]
                elif level < depth and name != key:
                    yield from entries(file_system, name, level + 1)

        def find(file_system: Any, key: str) -> dict[str, int]:
            start = len(key := key.rstrip("/")) + 1
            # Not find(): it takes a listing that is refused for an empty one.
            listing = entries(file_system, key, 1)
            return {name[start:]: nbytes for name, nbytes in listing if name[start:]}

        return self.call(find)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of a range of this file."""
        data = self.call(lambda fs, key: fs.cat_file(key, start=start, end=stop), FileNotFoundError)
        return bytes(data)

    def create(self, data: bytes) -> None:
        """Write this file at once, where there is none.

        Raises:
            FileExistsError: there is one.
        """
        self.refuse_unanswered()
        self.call(lambda fs, key: fs.pipe_file(key, data, mode="create"), FileExistsError)

    def overwrite(self, data: bytes) -> None:
        """Write this file at once, in place of the one that may be there."""
        self.refuse_unanswered()
        self.call(lambda fs, key: fs.pipe_file(key, data, mode="overwrite"))

    def remove(self) -> None:
        """Remove this file, if it is there."""
        self.refuse_unanswered()
        with suppress(FileNotFoundError):
            self.call(lambda fs, key: fs.rm_file(key), FileNotFoundError)

    @property
    def is_unanswered(self) -> bool:
        """Whether a call of this process that was given up may still be carried out."""
        thread = _unanswered.get(self.url)
        return thread is not None and thread.is_alive()

    def refuse_unanswered(self) -> None:
        """Refuse to change a file that an earlier call may change later."""
        if self.is_unanswered:
            raise CheckpointError(
                "the store has not answered an earlier call for this object, which may still be "
                "carried out: save another step, or start again",
                self,
            )


@final
class Upload:
    """A file of a store that is written; a context manager, at whose regular end it appears."""

    def __init__(self, path: StorePath) -> None:
        self.path = path
        self.nbytes = 0
        self._file = path.call(lambda fs, key: fs.open(key, "wb"))

    def write(self, data: memoryview) -> str:
        """Append ``data`` and return its checksum."""
        checksum = Checksum()
        for start in range(0, len(data), _CHUNK_NBYTES):
            chunk = data[start : start + _CHUNK_NBYTES]
            checksum.update(chunk)
            self.path.call(partial(self._append, chunk))
            self.nbytes += len(chunk)
        return checksum.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.path.call(lambda fs, key: self._file.close())
        else:
            self.path.call(self._give_up)

    def _append(self, chunk: memoryview, *_: object) -> None:
        self._file.write(chunk)

    def _give_up(self, *_: object) -> None:
        """Discard the parts; a file that is only closed would appear with what it has."""
        try:
            self._file.discard()
        finally:
            self._file.closed = True  # fsspec closes what is collected as garbage


def _fsspec() -> Any:
    import fsspec  # it takes 0.1 s, and most jobs save to a disk

    return fsspec


def _check_scheme(scheme: str) -> None:
    try:
        _fsspec().get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise ArgumentError(f"no store of {scheme}:// can be reached: {error}") from error
