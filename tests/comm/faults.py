"""Ways to die and to hang, and a training that does so; for tests of what is then told."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

import echelon as ec
from echelon.process.die_with_parent import signal_on_death_of_parent

__all__ = ["DEATHS", "DOES", "HANGS", "NEED_PROCESS", "train"]

FOREVER_S = 1000.0
THREAD_S = 6.0  # of a simulated rank, which nobody can end: it would outlive its test


def seconds() -> float:
    """How long a rank hangs."""
    return THREAD_S if threading.current_thread() is not threading.main_thread() else FOREVER_S


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    time.sleep(seconds())


def computes() -> None:
    end = time.monotonic() + seconds()
    while time.monotonic() < end:
        pass


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds())


def waits_for_a_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(seconds(),), daemon=True)
    thread.start()
    thread.join()


def waits_for_a_process() -> None:
    end_with_us = partial(signal_on_death_of_parent, os.getpid(), signal.SIGKILL)
    subprocess.run(["sleep", f"{seconds()}"], preexec_fn=end_with_us)


def waits_for_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, suppress(TimeoutError):
        ours.settimeout(seconds())
        ours.recv(1)


def raises(kind: type[BaseException], text: str) -> None:
    raise kind(text)


HANGS: dict[str, Callable[[], object]] = {
    "stopped": is_stopped,
    "sleep": sleeps,
    "computation": computes,
    "lock": waits_for_a_lock,
    "thread": waits_for_a_thread,
    "subprocess": waits_for_a_process,
    "socket": waits_for_a_socket,
    "C call": lambda: ctypes.CDLL(None).sleep(int(seconds())),
    "C call with the interpreter": lambda: ctypes.PyDLL(None).sleep(int(seconds())),
}
# What the report of a hang says that such a rank does.
DOES = {
    "stopped": "is stopped by SIGSTOP or a debugger",
    "sleep": "sleeps or waits outside communication",
    "computation": "computes outside communication",
    "lock": "sleeps or waits outside communication",
}
DEATHS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "ValueError: boom": partial(raises, ValueError, "boom"),
    "MemoryError: cannot allocate 12 GiB": partial(raises, MemoryError, "cannot allocate 12 GiB"),
    "out of memory": lambda: torch.empty(1 << 50),
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "exit code 0": lambda: os._exit(0),
    "exit code 3": lambda: os._exit(3),
}
# What would take all simulated ranks with it.
NEED_PROCESS = {"stopped", "C call with the interpreter", "SIGKILL", "SIGSEGV", "abort"}
NEED_PROCESS |= {"exit code 0", "exit code 3"}


def train(world: ec.World, fault: Callable[[], None], step: int, in_save: str | None) -> None:
    """Ten steps of DDP; rank 1 meets ``fault`` in one of them, before it or while it saves.

    Args:
        step: of the fault.
        in_save: a file that all ranks write after the step; None: the fault comes before.
    """
    torch.manual_seed(0)
    model = ec.DDP(torch.nn.Linear(4, 4), world.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(10):
        model(torch.full((2, 4), float(world.rank))).square().sum().backward()
        if world.rank == 1 and number == step and in_save is None:
            fault()
        optimizer.step()
        optimizer.zero_grad()
        if in_save is not None:
            with open(f"{in_save}-{world.rank}", "wb") as file:
                file.write(bytes(1000))
                if world.rank == 1 and number == step:
                    fault()
