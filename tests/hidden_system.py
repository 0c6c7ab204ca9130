"""This machine as macOS or Windows: what they do not have is hidden from Python.

``hide`` is called in a process of its own, before echelon is imported. Modules of Python and torch
that choose by the system what they bind are imported here, so they are as on Linux.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import errno
import faulthandler
import fcntl
import importlib.util
import logging.handlers
import multiprocessing.context
import multiprocessing.pool
import multiprocessing.resource_tracker
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import rich.console
import torch.distributed.checkpoint
import torch.distributed.elastic.multiprocessing
import torch.utils.data
import typer

__all__ = ["hide"]

_BOUND = (asyncio, importlib, logging, multiprocessing, subprocess, tempfile, rich, torch, typer)

_NOT_THERE: dict[Any, str] = {
    os: """EFD_CLOEXEC GRND_NONBLOCK MFD_CLOEXEC O_PATH O_TMPFILE P_PIDFD copy_file_range eventfd
        fdatasync memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate sched_getaffinity
        sched_setaffinity splice unshare waitid""",
    fcntl: "F_ADD_SEALS F_GETPIPE_SZ F_SETPIPE_SZ F_SETSIG F_GETSIG",
    resource: "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_SIGPENDING RUSAGE_THREAD prlimit",
    signal: "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT sigtimedwait sigwaitinfo",
    select: "epoll",
    socket: "AF_NETLINK SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}
_NOT_ON_WINDOWS: dict[Any, str] = {
    os: """EX_OK EX_TEMPFAIL O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK P_PID WEXITED WNOHANG
        WNOWAIT chown fchmod fork forkpty getegid geteuid getgid getloadavg getpgid getuid killpg
        lchown mkfifo nice pread preadv pwrite pwritev register_at_fork sendfile setpgid setsid
        setuid statvfs sysconf uname wait wait3 wait4""",
    signal: """SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1
        SIGUSR2 pthread_kill pthread_sigmask setitimer siginterrupt sigwait""",
    select: "poll",
    socket: "AF_UNIX",
    time: "clock_gettime clock_gettime_ns",
    faulthandler: "register unregister",
}
_MODULES_NOT_ON_WINDOWS = "fcntl grp posix pty pwd resource syslog termios tty"
_NOT_IN_C = ("prctl", "process_vm_readv", "sync_file_range", "syscall", "tgkill")
_FOLDERS = ("/proc", "/dev/shm", "/sys")


def hide(system: str) -> None:
    """Take away from Python what ``system`` does not have: ``"darwin"`` or ``"win32"``."""
    sysconfig.get_config_vars()  # while the file of this system is looked for
    lists = [_NOT_THERE, _NOT_ON_WINDOWS] if system == "win32" else [_NOT_THERE]
    _hide_libc(system)
    _hide_folders()
    if system == "win32":
        sys.modules["msvcrt"] = _msvcrt()
    for names in lists:
        for module, words in names.items():
            for name in words.split():
                vars(module).pop(name, None)
    vars(signal)["Signals"] = enum.IntEnum(  # type: ignore[misc]
        "Signals", {each.name: each.value for each in signal.Signals if hasattr(signal, each.name)}
    )
    for name in _MODULES_NOT_ON_WINDOWS.split() if system == "win32" else ():
        vars(sys)["modules"][name] = None
    sys.platform = system


def _msvcrt() -> ModuleType:
    """The locks of files of Windows, by those of Linux."""
    module, flock = ModuleType("msvcrt"), fcntl.flock

    def locking(descriptor: int, mode: int, nbytes: int) -> None:
        try:
            flock(descriptor, mode)
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, "Permission denied") from error

    vars(module).update(
        locking=locking, LK_NBLCK=fcntl.LOCK_EX | fcntl.LOCK_NB, LK_UNLCK=fcntl.LOCK_UN
    )
    return module


def _refuse(path: object) -> None:
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_FOLDERS):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))


def _hide_folders() -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            _refuse(arguments[0])

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            _refuse(path)
            return function(path, *args, **options)

        return call

    sys.addaudithook(audit)
    for name in ("access", "lstat", "readlink", "stat"):  # which have no event
        setattr(os, name, refusing(getattr(os, name)))


def _hide_libc(system: str) -> None:
    class Library(ctypes.CDLL):
        """A library of C, as this system would load it."""

        def __init__(self, name: str | None, *args: Any, **options: Any) -> None:
            if name is None and system == "win32":
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *args, **options)

        def __getattr__(self, name: str) -> Any:
            if name in _NOT_IN_C:
                raise AttributeError(f"dlsym: symbol {name!r} not found")
            return super().__getattr__(name)

    ctypes.CDLL = Library  # type: ignore[misc]
