"""Locks on open files, which end with the process that holds them, whatever ends it."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import msvcrt

    def lock_file(descriptor: int) -> None:
        """Lock an open file for this process.

        Raises:
            BlockingIOError: another process holds the lock, or this one through another descriptor.
        """
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:  # as Windows calls it
            raise BlockingIOError(error.errno, error.strerror) from error

    def unlock_file(descriptor: int) -> None:
        """Release the lock; closing the file does, too, when no fork has it open."""
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def lock_file(descriptor: int) -> None:
        """Lock an open file for this process.

        Raises:
            BlockingIOError: another process holds the lock, or this one through another descriptor.
        """
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock_file(descriptor: int) -> None:
        """Release the lock; closing the file does, too, when no fork has it open."""
        fcntl.flock(descriptor, fcntl.LOCK_UN)
