"""Methods that torch.compile runs as they are, as if they were written in C++.

While a compiled function runs, the compiler looks at every Python frame below it, also at those of
a process group that DDP calls from there. It would trace locks and threads.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

C = TypeVar("C", bound=type[Any])


def bypass_compiler(cls: C) -> C:
    """Let the compiler look at no frame of the methods of this class, nor at what they call.

    ``torch.compiler.disable`` does the same for a function, and imports the compiler, which takes
    more than a second.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(cls).values():
        if inspect.isfunction(method):
            set_code_exec_strategy(method.__code__, skip)
            vars(method)["_torchdynamo_disable"] = True  # for a caller that is being traced
    return cls
