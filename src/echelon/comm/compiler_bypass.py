"""Code that torch.compile runs as it is, as if it was written in C++.

While a compiled function runs, the compiler looks at every Python frame below it, also at those of
a process group that DDP calls from there. It would trace locks and threads, and parameters of which
this rank holds a part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

C = TypeVar("C", bound=Callable[..., Any])  # a class or a function


def bypass_compiler(code: C) -> C:
    """Let the compiler look at no frame of a function, or of the methods of a class.

    Nor does it at functions inside of them, such as hooks, and at what they call, unless that was
    compiled by itself.

    ``torch.compiler.disable`` does the same for a function, and imports the compiler, which takes
    more than a second.
    """
    functions = vars(code).values() if inspect.isclass(code) else [code]
    for function in functions:
        if inspect.isfunction(function):
            _skip(function.__code__)
            vars(function)["_torchdynamo_disable"] = True  # for a caller that is being traced
    return code


def _skip(code: CodeType) -> None:
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(code, skip)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _skip(constant)
