"""Ways to die and to hang, and a training that does so; for tests of what is then told."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import torch

import echelon as ec

__all__ = ["DEATHS", "HANGS", "SLEEP_S", "train"]

SLEEP_S = 1000.0
MOST_S = 60.0  # of what a simulated rank does, which nobody can end: it would outlive its test


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    ctypes.string_at(0)


def raises() -> None:
    raise ValueError("boom")


def exits_with_0() -> None:
    os._exit(0)


def runs_out_of_memory() -> None:
    raise MemoryError("cannot allocate 12 GiB")


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    time.sleep(SLEEP_S)


def sleeps_a_minute() -> None:
    time.sleep(MOST_S)


def computes() -> None:
    end = time.monotonic() + MOST_S
    while time.monotonic() < end:
        pass


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=MOST_S)


DEATHS: dict[str, Callable[[], None]] = {
    "SIGKILL": is_killed,
    "SIGSEGV": crashes,
    "ValueError: boom": raises,
    "exit code 0": exits_with_0,
    "MemoryError: cannot allocate 12 GiB": runs_out_of_memory,
}
HANGS: dict[str, Callable[[], None]] = {
    "stopped": is_stopped,
    "sleep": sleeps,
    "computation": computes,
    "lock": waits_for_a_lock,
}


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
