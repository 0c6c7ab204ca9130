"""Have the disk begin with a file that is still being written, so that the end waits less for it.

Without it the kernel keeps what was written until ``fsync``, and the disk has nothing to do
meanwhile. On the disk of docs/design/checkpoint.md, two ranks that write 128 MiB each take a third
longer then.
"""

from __future__ import annotations

import ctypes

_SYNC_FILE_RANGE_WRITE = 2  # begin to write, and do not wait

_begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
if _begin is not None:
    _begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def begin_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the kernel begin to write a range of a file to the disk, if it can.

    What goes wrong is told by ``fsync``, without which nothing is known to be on the disk anyway.
    """
    if _begin is not None:
        _begin(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
