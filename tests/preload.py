"""What ranks of most tests need: the server that they fork from imports it once for all of them.

An optimizer and a hook that the compiler must not see import ``torch._dynamo``, which takes longer
than most tests. The rest of echelon and the rank functions take a rank longer than its start.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

__all__ = ["preload"]

FIRST = (
    "torch._dynamo",
    "torch.distributed",
    "torch.testing",
    "torch.utils.checkpoint",
    "echelon.launch.processes",
    "echelon.launch.agent",
)
APART = ("c10d", "children", "cli")  # folders whose ranks come from elsewhere


def rank_modules() -> Iterator[str]:
    """The modules of tests whose functions ranks run; what needs hypothesis has none."""
    tests = Path(__file__).parent
    for path in sorted(tests.rglob("*/*.py")):
        parts = path.relative_to(tests).with_suffix("").parts
        if parts[0] in APART or path.stem == "__init__":
            continue
        if "hypothesis" not in path.read_text():
            yield ".".join(("tests", *parts))


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
    for name in rank_modules():
        with suppress(Exception, pytest.skip.Exception):  # the test that needs it says why
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


if __name__ == "tests.preload":
    preload()
