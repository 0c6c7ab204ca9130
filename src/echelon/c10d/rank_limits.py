"""What a program can do as a process and not as a simulated rank, and what to do instead.

Calls that would end or multiply all ranks are refused within ranks. Errors of torch and Python
whose cause is that a rank is a thread, or has no GPU, get a note.
"""

from __future__ import annotations

import importlib
import multiprocessing.context
import os
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from echelon.comm.threads.process_state import register_variable
from echelon.comm.threads.rank_modules import VARIABLE
from echelon.comm.threads.rank_threads import this_rank
from echelon.comm.threads.replaced_names import register_replacements
from echelon.errors import EchelonError, UnsupportedError
from echelon.errors.message_text import message_of

_PROCESSES = "or run it with --world processes, where each rank is a process"
_SPAWN = (
    "starts processes, and this program runs on simulated ranks already, each of which would start "
    f"as many: call the function itself, with the rank of torch.distributed, {_PROCESSES}"
)
_EXIT = (
    "would end all simulated ranks, which are threads of one process, without flushing what they "
    f"have printed: use sys.exit, {_PROCESSES}"
)
_RPC = (
    "makes one agent for a process, and simulated ranks are threads of one process: send tensors "
    f"with torch.distributed.send and recv, {_PROCESSES}"
)

# The errors that torch and Python raise, by a part of their text, and what to do.
_NOTES: tuple[tuple[str, str], ...] = (
    (
        "Only a single TORCH_LIBRARY can be used",
        "simulated ranks share the operators of torch, and each imports the program's modules for "
        f"itself: move the library into a module and share that one by {VARIABLE}=-MODULE, "
        f"{_PROCESSES}",
    ),
    (
        "signal only works in main thread",
        "simulated ranks are threads, which cannot install signal handlers: install them only "
        "where threading.current_thread() is threading.main_thread(), or use echelon.StopSignals, "
        f"{_PROCESSES}",
    ),
)
# How libraries say that a process may make a call once only.
_ONCE = re.compile(
    r"already|(only|more than) once|multiple times|[Dd]uplicate|\btwice\b|can only be called"
)
_ONCE_NOTE = (
    "simulated ranks are threads of one process, and a rank before this one may have made this "
    "call: if a process may make it once only, let one rank make it, or have the library be each "
    f"rank's own by {VARIABLE}=NAMES, {_PROCESSES}"
)
_INTEROP = (
    "sets a number that simulated ranks share, and which can be set once: let all ranks set the "
    f"same number before anything is computed, {_PROCESSES}"
)

_GPU_WORDS = ("CUDA", "cuda", "NVIDIA", "nccl", "NCCL", "no accelerator")
_NO_GPU = (
    "this machine has no GPU, and simulated ranks compute on the CPU: let the program choose, as "
    'in device = "cuda" if torch.cuda.is_available() else "cpu", and leave device_ids of '
    "DistributedDataParallel out there"
)


def note_for(error: BaseException) -> str | None:
    """What to do about an error of a simulated rank, where its cause is that it is one.

    Example:
        >>> note_for(ValueError("signal only works in main thread")).partition(",")[0]
        'simulated ranks are threads'
    """
    text = message_of(error)
    for part, note in _NOTES:
        if part in text:
            return note
    if not isinstance(error, Exception):
        return None
    kinds = RuntimeError | AssertionError | ValueError | ImportError | AttributeError
    is_of_gpu = isinstance(error, kinds) and not torch.cuda.is_available()
    if is_of_gpu and any(word in text for word in _GPU_WORDS):
        return _NO_GPU
    is_ours = isinstance(error, EchelonError) or type(error).__module__.startswith("echelon.")
    if not is_ours and _ONCE.search(text):
        return _ONCE_NOTE
    return None


def _refusing(function: Callable[..., Any], name: str, reason: str) -> Callable[..., Any]:
    """A function that refuses to be called by simulated ranks; their forks are none."""
    owner = os.getpid()

    @wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if this_rank() is None or os.getpid() != owner:
            return function(*args, **kwargs)
        raise UnsupportedError(f"{name} {reason}")

    return refuse


def _shared_number(function: Callable[[int], None]) -> Callable[[int], None]:
    """Sets the number of threads once for all ranks."""

    @wraps(function)
    def set_number(number: int) -> None:
        try:
            function(number)
        except RuntimeError as error:
            if this_rank() is None:
                raise
            if number != torch.get_num_interop_threads():
                name = "torch.set_num_interop_threads"
                raise UnsupportedError(f"{name}({number}) {_INTEROP}") from error

    return set_number


register_variable("numbers that ranks share", torch, "set_num_interop_threads", _shared_number)
# How each rank starts processes.
register_variable("start method", multiprocessing.context._default_context, "_actual_context")

# ``torch.multiprocessing`` has a function of the name of this module.
_spawning = importlib.import_module("torch.multiprocessing.spawn")
register_replacements(
    "calls that no rank can make",
    (
        (os, "_exit", ("os._exit", _EXIT)),
        *(
            (module, name, (f"torch.multiprocessing.{name}", _SPAWN))
            for module in (torch.multiprocessing, _spawning)
            for name in ("spawn", "start_processes")
        ),
        (torch.distributed.rpc, "init_rpc", ("torch.distributed.rpc.init_rpc", _RPC)),
    ),
    lambda function, shown: _refusing(function, *shown),
)
