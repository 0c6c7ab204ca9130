"""The device in C++, compiled with the headers of the installed torch, and kept."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from echelon.errors import UnsupportedError
from echelon.errors.message_text import say
from echelon.process.atomic_files import replace_file

NAME = "echelon_simulated_device"
_TORCH = Path(torch.__file__).parent
HEADERS = sysconfig.get_paths()["include"]  # of Python
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-DNDEBUG")  # as torch, for the same classes
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


@cache
def device_library() -> Any:
    """The extension module, compiled if no process has done so with this torch.

    Raises:
        UnsupportedError: there is no compiler, or it does not accept the sources.
    """
    sources = {
        path.name: path.read_bytes()
        for path in files("echelon.testing.device").joinpath("csrc").iterdir()
        if path.name.endswith((".cpp", ".h"))
    }
    built = _folder() / f"{_key(sources)}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        _compile(sources, built)
    spec = importlib.util.spec_from_file_location(NAME, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "echelon"


def _key(sources: dict[str, bytes]) -> str:
    parts = [torch.__version__, sys.version, *_FLAGS, *map(repr, sorted(sources.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(sources: dict[str, bytes], built: Path) -> None:
    named = os.environ.get("CXX", "c++")
    compiler = shutil.which(named) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnsupportedError(
            f"the simulated device is compiled once, and there is no compiler here (CXX={named}): "
            "install one (Debian: apt install g++)"
        )
    if not Path(HEADERS, "Python.h").exists():
        raise UnsupportedError(
            f"the simulated device is compiled once, and {HEADERS} has no Python.h: install the "
            "headers of Python (Debian: apt install python3-dev)"
        )
    say("echelon: compiling the simulated device for this torch, once: about a minute")
    # torch.utils.cpp_extension knows these, too, but imports setuptools, which changes sys.path.
    headers = (_TORCH / "include", _TORCH / "include/torch/csrc/api/include", HEADERS)
    includes = [f"-I{path}" for path in headers]
    define = f"-DTORCH_EXTENSION_NAME={NAME}"
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        for name, text in sources.items():
            Path(folder, name).write_bytes(text)
        units = [name for name in sources if name.endswith(".cpp")]
        _run([[compiler, *_FLAGS, define, *includes, "-c", unit] for unit in units], folder)
        objects = [f"{Path(unit).stem}.o" for unit in units]
        links = [f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}"]
        _run([[compiler, "-shared", *objects, *links, *_LIBRARIES, "-o", built.name]], folder)
        # At once, for others that do the same.
        replace_file(built, Path(folder, built.name).read_bytes(), sync=False)


def _run(commands: list[list[str]], folder: str) -> None:
    """Run commands at the same time."""
    running = [
        subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    errors = [process.communicate()[1] for process in running]
    for process, text in zip(running, errors, strict=True):
        if process.returncode:
            raise UnsupportedError(
                f"the simulated device does not compile with torch {torch.__version__}: "
                f"{text[-2000:]}"
            )
