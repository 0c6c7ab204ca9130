"""The folder in which a run keeps what its ranks print, and the end of those that nobody needs.

Without ``--log-dir`` a folder lives in the place for temporary files. It goes away with a run that
went well and stays after a failure. A launcher that is killed can do neither, so the next one does
it: a folder of a run that goes on holds a file that its launcher has locked, and the kernel unlocks
it whatever ends the launcher.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import final

_PREFIX = "echelon-run-"
_RUNNING = "running"


@final
class RunFolder:
    """A new folder for the output of one run.

    Args:
        parent: where the user wants it, and then it stays; None: with the temporary files.
    """

    def __init__(self, parent: Path | None) -> None:
        self._stays = parent is not None
        self._lock: int | None = None
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        else:
            _remove_abandoned(Path(tempfile.gettempdir()))
        # Its own folder for each run, so that records of an earlier one are not taken for ours.
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        if parent is None:
            started = self.path / f"{_RUNNING}.part"  # no other launcher sees it unlocked
            self._lock = os.open(started, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # it goes on
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
