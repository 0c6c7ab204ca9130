"""Processes that stay, one a rank, and call what a test tells them to: a start costs seconds.

One process is started, as a fork of the server that has torch; it imports what else the ranks need,
once, and forks them.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60.0
EXIT_S = 20.0  # to leave process groups and unload torch, on a busy machine

Setup = Callable[[int, int, dist.Store], None]


class Ranks:
    """Ranks that share a store of c10d. A context manager.

    Args:
        size: how many.
        prepare: imports, called once, before the ranks are forked.
        setup: called once on each rank with ``(rank, size, store)``.
    """

    def __init__(self, size: int, prepare: Callable[[], None], setup: Setup) -> None:
        context = multiprocessing.get_context("forkserver")
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._pipes, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
        args = (self._store.port, prepare, setup, theirs)
        self._parent = context.Process(target=_fork_ranks, args=args)
        self._parent.start()
        for pipe in theirs:
            pipe.close()
        self._pids = self.call(_pid)

    def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """``fn(rank, size, *args)`` on all ranks: their results, or the first failure."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((fn, args)))
        end = time.monotonic() + timeout_s
        answers: list[tuple[Any, BaseException | None]] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not return from {fn.__name__}")
            answers.append(pickle.loads(pipe.recv_bytes()))
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                error.add_note(f"on rank {rank}")
                raise error
        return [result for result, _ in answers]

    def close(self) -> None:
        """End all ranks; kill those that do not."""
        for pipe in self._pipes:
            pipe.close()
        self._parent.join(EXIT_S)
        if self._parent.is_alive():
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            self._parent.join()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fork_ranks(
    port: int, prepare: Callable[[], None], setup: Setup, pipes: tuple[Connection, ...]
) -> None:
    torch.set_num_threads(1)
    gc.disable()
    prepare()
    gc.freeze()  # what was imported is no garbage, and looking through it would copy its memory
    gc.enable()
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_serve, args=(rank, len(pipes), port, setup, pipe), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def _serve(rank: int, size: int, port: int, setup: Setup, pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT_S))
    setup(rank, size, store)
    with ExitStack() as stack:
        if dist.is_initialized():
            stack.callback(dist.destroy_process_group)
        while True:
            try:
                fn, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            error: BaseException | None = None
            result = None
            try:
                result = fn(rank, size, *args)
            except Exception as caught:
                error = caught
                error.add_note(traceback.format_exc())
            pipe.send_bytes(pickle.dumps((result, error)))


def _pid(rank: int, size: int) -> int:
    return os.getpid()
