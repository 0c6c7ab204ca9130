"""Calls of torch that are the library's own, which no mode and no tensor subclass acts on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_torch_function(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose calls of torch are the library's own.

    A mode of the user, such as that of ``torch.set_default_device``, leaves its tensors alone.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call
