"""What has run: the script, how it was started, and what the bits of its results depend on."""

from __future__ import annotations

import inspect
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Self, final

import torch

from echelon.checkpoint.checksum import checksum
from echelon.comm.streams import local_device
from echelon.comm.world import World
from echelon.errors import BlackboxCorrupt, CheckpointCorrupt
from echelon.process.atomic_files import replace_file
from echelon.process.command_words import masked
from echelon.process.plain_file import read_plain
from echelon.values.untrusted_json import read_json, write_json
from echelon.version import __version__

FORMAT = 1
_MAX_NBYTES = 1 << 20
_MAX_SCRIPT_NBYTES = 1 << 26
# What calls the function of ``ec.run``, and the program of simulated ranks.
_CALL = ("echelon.launch.rank_function", "call")
_SIMULATED_JOB = "echelon.launch.simulated_job"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_KINDS = {"int": int, "str": str, "tuple": list, "dict": dict}  # in JSON, by annotation


@final
@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What is known of a job.

    Attributes:
        ranks: how many.
        backend: over which they communicated.
        device: the kind of device of their tensors.
        threads: of torch, on each rank.
        versions: of torch and others, and of the instructions of the processor.
        script: path of the main program, or of the file of the function; empty if there is none.
        script_checksum: of its bytes.
        module: the name under which it was started by ``-m``; empty if by its path.
        function: the qualified name of what ``ec.run`` has called; empty for a main program.
        arguments: of the main program, without secrets.
        folder: the working directory.
    """

    ranks: int
    backend: str
    device: str
    threads: int
    versions: dict[str, str]
    script: str
    script_checksum: str
    module: str
    function: str
    arguments: tuple[str, ...]
    folder: str

    @classmethod
    def of(cls, world: World) -> Self:
        """The facts of the job in which this is called."""
        script, module, function = _program()
        return cls(
            ranks=world.size,
            backend=world.backend,
            device=_kind(world.device),
            threads=torch.get_num_threads(),
            versions=versions(),
            script=script,
            script_checksum=checksum_of(script),
            module=module,
            function=function,
            arguments=masked(map(_text, sys.argv[1:])),
            folder=_text(os.getcwd()),
        )

    def write(self, path: Path) -> None:
        """Write them to a file, which is there whole or not at all.

        Raises:
            OSError: that cannot be done.
        """
        replace_file(path, write_json({"format": FORMAT, **asdict(self)}, "facts of a job"))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read them from a file of unknown origin.

        Raises:
            BlackboxCorrupt: it has none.
            OSError: it cannot be read.
        """
        data = read_plain(path, _MAX_NBYTES)
        try:
            content: Any = read_json(data, path, memory=1 << 24)
        except CheckpointCorrupt as error:
            raise BlackboxCorrupt(str(error), path) from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise BlackboxCorrupt("has no facts of a job that this version can read", path)
        kinds = {field.name: _KINDS[str(field.type).split("[")[0]] for field in fields(cls)}
        for name, kind in kinds.items():
            if type(content.get(name)) is not kind or not _holds_texts(content[name]):
                raise BlackboxCorrupt(f"has no {name} of a job", path)
        if content.keys() != kinds.keys() or not 0 < content["ranks"] < 1 << 16:
            raise BlackboxCorrupt("has other facts than those of a job", path)
        return cls(**{**content, "arguments": tuple(content["arguments"])})

    def device_here(self) -> torch.device:
        """The device for simulated ranks: one of this kind, or the CPU where there is none."""
        device = torch.device("cpu") if self.device == "cpu" else local_device(0)
        return device if _kind(device) == self.device else torch.device("cpu")

    def differing(self) -> dict[str, tuple[str, str]]:
        """What is different here, by name: how it was, and how it is now."""
        here = versions()
        pairs = {name: (text, here.get(name, "none")) for name, text in self.versions.items()}
        if self.device != "cpu":  # which is everywhere
            pairs["device"] = (self.device, _kind(local_device(0)))
        return {name: (then, now) for name, (then, now) in pairs.items() if then != now}


def versions() -> dict[str, str]:
    """What the bits of a step depend on, besides the code and the values."""
    return {
        "echelon": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "NumPy": metadata.version("numpy"),
        "instructions of the processor": torch.backends.cpu.get_cpu_capability(),
    }


def checksum_of(script: str) -> str:
    """The checksum of the bytes of a file; empty if it cannot be read."""
    try:
        return checksum(read_plain(script, _MAX_SCRIPT_NBYTES, follows=True)) if script else ""
    except OSError:
        return ""


def _program() -> tuple[str, str, str]:
    """The path of what runs, its name as a module, and the function that ``ec.run`` has called."""
    frames = list(_frames())
    calls = [
        i for i, (module, frame) in enumerate(frames) if (module, frame.f_code.co_name) == _CALL
    ]
    if not calls:
        return _main_program(vars(sys.modules["__main__"]))
    below = frames[calls[-1] + 1 :]
    if below[0][0] == _SIMULATED_JOB:  # which executes the main program in the frame after that
        return _main_program(below[1][1].f_globals)
    codes = (frame.f_code for _, frame in below)
    code = next((code for code in codes if not code.co_filename.startswith(_PACKAGE)), None)
    if code is None:
        return _main_program(vars(sys.modules["__main__"]))
    file = os.path.abspath(code.co_filename) if os.path.isfile(code.co_filename) else ""
    return _text(file), "", code.co_qualname


def _frames() -> Iterator[tuple[str, FrameType]]:
    """The modules and the frames of this thread, from the outermost to the innermost."""
    frames = [info.frame for info in inspect.stack(context=0)]
    return ((frame.f_globals.get("__name__", ""), frame) for frame in reversed(frames))


def _main_program(names: Mapping[str, Any]) -> tuple[str, str, str]:
    file, spec = names.get("__file__"), names.get("__spec__")
    path = "" if file is None else _text(os.path.abspath(file))
    return path, "" if spec is None else _text(spec.name), ""


def _kind(device: torch.device) -> str:
    return str(device).partition(":")[0]


def _text(name: str) -> str:
    """A name that UTF-8 has; one of the system may have bytes that are no text."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _holds_texts(value: object) -> bool:
    """Whether a list or a dict of JSON has nothing but texts."""
    if isinstance(value, dict):
        return all(isinstance(item, str) for item in value.values())
    return not isinstance(value, list) or all(isinstance(item, str) for item in value)
