"""Torch functions that no ``TorchFunctionMode`` needs to see."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_torch_function(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose calls of torch draw no random numbers and use no default dtype.

    A simulated rank runs under a mode that inspects every call of torch for these two, which costs
    several microseconds a call.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
