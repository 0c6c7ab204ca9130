"""What ranks of most tests need: the server that they fork from imports it once for all of them.

An optimizer and a hook that the compiler must not see import ``torch._dynamo``, which takes longer
than most tests. The rest of echelon and the rank functions take a rank longer than its start.
"""

import gc
import importlib
import os
from contextlib import suppress

__all__ = ["preload"]

PRELOADED = "ECHELON_TEST_PRELOADED"  # the names of modules, from conftest.py
FIRST = (
    "torch._dynamo",
    "torch.distributed",
    "torch.testing",
    "torch.utils.checkpoint",
    "echelon.launch.processes",
    "echelon.launch.agent",
)


def preload() -> None:
    """Import all of it.

    A million objects are made here, and none of them is garbage. To look for it meanwhile takes a
    fifth of the time, and a rank that looks through them again copies their memory.
    """
    gc.disable()
    for name in FIRST:
        importlib.import_module(name)
    echelon = importlib.import_module("echelon")
    for name in echelon.__all__:
        getattr(echelon, name)
    for name in os.environ.pop(PRELOADED, "").split():
        with suppress(Exception):  # the test that needs it says why
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


if __name__ == "tests.preload":
    preload()
