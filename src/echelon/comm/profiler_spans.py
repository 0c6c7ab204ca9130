"""Calls of a group as spans of ``torch.profiler``, which sees nothing of transports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from echelon.diagnosis.collective_call import CallSignature

NO_SPAN = nullcontext()

# Whether a profiler runs on this thread. Calls ask it before they build a span.
profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled


class _Thread(threading.local):
    shows_caller = False


_thread = _Thread()


def profiler_span(
    action: str, signature: CallSignature, group: str
) -> AbstractContextManager[object]:
    """A span of the profiler around a body that issues a call or waits for it.

    Its name is ``echelon:`` and ``action``. With ``record_shapes=True`` the profiler also keeps the
    shape and dtype of the call, its group and its label. Within a ``caller_span`` only waits have
    spans.
    """
    if _thread.shows_caller and action != "wait":
        return NO_SPAN
    facts = {"group": group, "shape": str(list(signature.shape))}
    if signature.label is not None:
        facts["label"] = signature.label
    inputs = []
    if signature.dtype is not None:
        inputs.append(_stand_in(signature.shape, signature.dtype))
    span: AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(
        f"echelon:{action}", inputs, facts
    )
    return span


@contextmanager
def caller_span(op: str, tensors: Sequence[Tensor], group: str) -> Iterator[None]:
    """One span for a call of another interface, whatever calls of a group it consists of.

    Args:
        op: as the group names it.
        tensors: what the caller gives, in its own shapes.
        group: the name of the group.
    """
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    facts = {"group": group, "shape": shapes or "[]"}
    outer = _thread.shows_caller
    _thread.shows_caller = True
    try:
        with torch._C._profiler._RecordFunctionFast(f"echelon:{op}", list(tensors), facts):
            yield
    finally:
        _thread.shows_caller = outer


@lru_cache(maxsize=1024)
def _stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without memory; calls have flattened theirs when the span begins."""
    return torch.empty(shape, dtype=dtype, device="meta")
