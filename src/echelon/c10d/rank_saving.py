"""Asynchronous saves of DCP by simulated ranks, which are made at once.

``torch.distributed.checkpoint.async_save`` saves on a thread, which calls ``torch.distributed``. A
thread that a rank starts does not take turns, so it would find the groups of whichever rank runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from echelon.comm.threads.process_state import register_variable
from echelon.comm.threads.rank_threads import this_rank

_THREADS = "AsyncCheckpointExecutor"  # the beginning of the names that DCP gives to its threads

_submit = ThreadPoolExecutor.submit


def _submit_of_rank(
    self: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    """Call the function on the thread of the rank, if a save of DCP is submitted by a rank."""
    if this_rank() is None or not self._thread_name_prefix.startswith(_THREADS):
        return _submit(self, function, *args, **kwargs)
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    # DCP's own exceptions derive from BaseException; whoever asks for the result gets it.
    except BaseException as error:
        future.set_exception(error)
    return future


register_variable("saves of DCP", ThreadPoolExecutor, "submit", lambda submit: _submit_of_rank)
