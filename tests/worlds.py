"""Start one rank function in every kind of world that this machine has.

``run_world(kind, fn, ranks, args)`` is ``echelon.run`` for threads and processes, and for gloo a
set of processes that call ``echelon.init`` as a script under torchrun does. Starting processes
costs seconds, so tests put many checks into one start.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import echelon as ec

KINDS = ("threads", "processes", "gloo")
TIMEOUT_S = 60.0  # of one call; a test that hangs fails before its own time is up

RankFunction = Callable[..., Any]


def run_world(
    kind: str, fn: RankFunction, ranks: int, args: Sequence[Any] = (), timeout: float = TIMEOUT_S
) -> list[Any]:
    """Call ``fn(world, *args)`` on every rank and return the results in rank order."""
    if kind == "gloo":
        return _run_gloo(fn, ranks, args, timeout)
    return ec.run(fn, ranks, kind, args=args, timeout=timeout)


def _run_gloo(fn: RankFunction, ranks: int, args: Sequence[Any], timeout: float) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        process = context.Process(
            target=_gloo_rank, args=(there, rank, ranks, port, fn, tuple(args), timeout)
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        answers = [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
    for rank, (failed, value) in enumerate(answers):
        if failed:
            error, text = value
            error.add_note(f"on rank {rank} of {ranks} over gloo:\n{text}")
            raise error
    return [value for _, value in answers]


def _answer(rank: int, pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return True, (RuntimeError(f"rank {rank} died without an answer"), "")


def _gloo_rank(
    pipe: Any, rank: int, ranks: int, port: int, fn: RankFunction, args: Any, timeout: float
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        with ec.init("gloo", timeout=timeout) as world:
            value = fn(world, *args)
        pipe.send((False, value))
    except Exception as error:
        pipe.send((True, (error, traceback.format_exc())))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
