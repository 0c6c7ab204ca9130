"""What ranks print: the folder that keeps it, and the screen that shows it while they run.

Without ``--log-dir`` a folder lives in the place for temporary files. It goes away with a run that
went well and stays after a failure. A launcher that is killed can do neither, so the next one does
it: a folder of a run that goes on holds a file that its launcher has locked, and the kernel unlocks
it whatever ends the launcher.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol, TextIO, final

from echelon.errors import ArgumentError
from echelon.launch.written_rows import (
    AsWritten,
    FinishedRows,
    MarkedRows,
    OpenRows,
    is_terminal,
)
from echelon.process.file_lock import lock_file

HOLD_S = 15.0  # how long a traceback of rank 0 is held back: it may be the end of the run


def rank_prefix(rank: int) -> str:
    """What stands before each line that a rank printed, where all are shown."""
    return f"[rank {rank}] "


@final
class Screen:
    """Copies what ranks of the current attempt write to files onto the standard streams.

    Args:
        log_dir: of the run.
        live: rank 0 writes to our standard output itself.
        tee: number of ranks, all of which are shown, each line with its rank; None: rank 0 alone.
    """

    def __init__(self, log_dir: Path, live: bool, tee: int | None = None) -> None:
        self._log_dir, self._live, self._tee = log_dir, live, tee
        self._attempt = 0
        terminals = [to for to in (sys.stderr, sys.stdout) if is_terminal(to)]
        self._open_rows = OpenRows(terminals[0] if terminals else None)
        self._tails = self._open_tails()

    def show(self) -> None:
        """Copy what is new."""
        for tail in self._tails:
            tail.show()

    def close_attempt(self, failed: bool) -> None:
        """Copy the rest of this attempt, and go on with the next one."""
        for tail in self._tails:
            tail.close(failed)
        self._attempt += 1
        self._tails = self._open_tails()

    def _open_tails(self) -> list[_Tail]:
        streams = [("stderr", sys.stderr), *([] if self._live else [("stdout", sys.stdout)])]
        folder = f"*/attempt_{self._attempt}"
        if self._tee is None:
            return [
                _Tail(
                    self._log_dir,
                    f"{folder}/0/{name}.log",
                    AsWritten(to) if is_terminal(to) else FinishedRows(to),
                )
                for name, to in streams
            ]
        return [
            _Tail(
                self._log_dir,
                f"{folder}/{rank}/{name}.log",
                MarkedRows(to, rank_prefix(rank), self._open_rows),
            )
            for rank in range(self._tee)
            for name, to in streams
        ]


# What a rank prints at its end, from its first line on; the end of the run tells it once. Torch
# puts the rank before each line where there is a default group.
_CRASH = re.compile(
    r"^(?:\[rank\d+\]: )?(?:  [+|] )*(?:Exception Group )?Traceback \(most recent call last\)"
    r"|^Fatal Python error: |^terminate called "
    r"|(?<=[\]\r])Traceback \(most recent call last\)",  # behind a progress bar
    re.M,
)
# A warning of torch where no name server answers; the address that it has connected to is a number.
_NOISE = re.compile(r"^\[W.*socket\.cpp.*hostname of the client socket cannot.*\n", re.M)
_MAX_NOISE = 1 << 16  # characters


def has_output(log: Path) -> bool:
    """Whether a rank has written more into its log than warnings that say nothing."""
    with log.open(errors="replace") as file:
        text = file.read(_MAX_NOISE)
    return len(text) == _MAX_NOISE or bool(_NOISE.sub("", text))


class _Rows(Protocol):
    """Where the text of a rank goes."""

    def write(self, text: str) -> None: ...
    def end(self) -> None: ...
    def flush(self) -> None: ...


class _Tail:
    """Copies a file onto a stream, as it grows.

    A traceback may be the end of the run, whose cause is told at the end by its first line; so
    it is held back for a moment, and dropped if the run has failed.
    """

    def __init__(self, log_dir: Path, pattern: str, stream: _Rows) -> None:
        self._log_dir, self._pattern, self._stream = log_dir, pattern, stream
        self._file: TextIO | None = None
        self._held = ""
        self._held_since = 0.0

    def show(self) -> None:
        """Copy what is new, up to a traceback."""
        text = _NOISE.sub("", self._held + self._read())
        crash = _CRASH.search(text)
        noise = text.rfind("\n[W") + 1 or (0 if text.startswith("[W") else -1)
        if crash is None and noise >= 0 and "\n" not in text[noise:]:  # it may be one of those
            shown, self._held = text[:noise], text[noise:]
        elif crash is None:
            shown, self._held = text, ""
        else:
            start = crash.start()
            if not self._held:
                self._held_since = time.monotonic()
            shown, self._held = text[:start], text[start:]
            if time.monotonic() - self._held_since > HOLD_S:
                shown, self._held = text, ""
        self._write(shown)

    def close(self, failed: bool) -> None:
        """Copy the rest; what is held back only if the run has not failed."""
        self.show()
        if not failed:
            self._write(self._held)
        self._stream.end()
        self._stream.flush()
        if self._file is not None:
            self._file.close()

    def _read(self) -> str:
        """What the file has got since the last time; it may not exist yet."""
        if self._file is None:
            files = list(self._log_dir.glob(self._pattern))
            if not files:
                return ""
            self._file = open(  # noqa: SIM115 (closed by close)
                files[0], encoding="utf-8", errors="replace", newline=""
            )
        return self._file.read()

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()


_PREFIX = "echelon-run-"
_RUNNING = "running"


@final
class RunFolder:
    """A new folder for the output of one run.

    Args:
        parent: where the user wants it, and then it stays; None: with the temporary files.

    Raises:
        ArgumentError: none can be made there.
    """

    def __init__(self, parent: Path | None) -> None:
        self._stays = parent is not None
        self._lock: int | None = None
        if parent is None:
            _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = _new_folder(Path(tempfile.gettempdir()) if parent is None else parent)
        if parent is None:
            started = self.path / f"{_RUNNING}.part"  # no other launcher sees it unlocked
            self._lock = os.open(started, os.O_CREAT | os.O_RDWR, 0o600)
            lock_file(self._lock)
            started.rename(self.path / _RUNNING)

    def keep(self) -> Path:
        """End the run and leave its folder; where that is."""
        (self.path / _RUNNING).unlink(missing_ok=True)
        self._unlock()
        return self.path

    def drop(self) -> None:
        """End the run; its folder goes, unless the user chose where it is."""
        if not self._stays:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _new_folder(parent: Path) -> Path:
    """A folder of its own for a run, so that records of an earlier one are not taken for ours."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise ArgumentError(
            f"{str(parent)!r} cannot hold the output of the ranks: {error.strerror}; give a folder "
            "in which you may write"
        ) from error


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of runs whose launcher was killed."""
    for folder in parent.glob(f"{_PREFIX}*/"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _RUNNING, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # kept after a failure, or just starting, or just removed by its launcher
        try:
            lock_file(lock)
        except OSError:
            continue  # it goes on
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
