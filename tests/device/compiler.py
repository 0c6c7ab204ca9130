"""Tests on the simulated device need a compiler, as the device does."""

import shutil
from pathlib import Path

import pytest

from echelon.testing.device.native import HEADERS

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))) or not Path(HEADERS, "Python.h").exists(),
    reason="the simulated device is compiled, and there is no compiler or no Python.h here",
)
