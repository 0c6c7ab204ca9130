"""Tests on the simulated device need a compiler, as the device does."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="the simulated device is compiled, and there is no compiler here",
)
