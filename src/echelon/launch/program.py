"""What ``echelon run`` is to run, on how many ranks, and the command that does it."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

from echelon.errors import ArgumentError
from echelon.process import time_limits
from echelon.process.operating_system import num_processors

MOST_RANKS = 1 << 16  # of one machine; more is a mistake

_AGENT = "echelon.launch.agent"
_LIVE = "--live"  # its only option without a value


@dataclass(frozen=True)
class Program:
    """A script, or a module.

    Attributes:
        name: the path of the script, or the module's name with dots.
        is_module: which of the two.
    """

    name: str
    is_module: bool = False

    def problem(self) -> str | None:
        """Why it cannot be run, if that is seen at once."""
        if self.is_module:
            if not all(part.isidentifier() for part in self.name.split(".")):
                return f"{self.name!r} is no name of a module: give one as in package.train"
            return None
        path = Path(self.name)
        if not path.exists():
            return f"File {self.name!r} does not exist."
        if path.is_dir():
            return f"{self.name!r} is a directory: give a file, or -m and the name of a module."
        return None if os.access(path, os.R_OK) else f"{self.name!r} cannot be read."

    def words(self) -> list[str]:
        """What stands for it on the command line of Python."""
        if self.is_module:
            return ["-m", self.name]
        # A name such as -x.py would be taken for an option.
        return [f".{os.sep}{self.name}" if self.name.startswith("-") else self.name]

    def folder(self) -> str:
        """Where Python looks for modules first."""
        return os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)

    def read(self) -> tuple[CodeType, Mapping[str, Any]]:
        """Its code, and the names that Python gives its module; ``__file__`` is among them.

        Raises:
            ArgumentError: there is no such module.
            SyntaxError: it is no Python.
        """
        if not self.is_module:
            path = Path(self.name)
            return compile(path.read_bytes(), self.name, "exec"), {"__file__": self.name}
        spec = _spec_of(self.name)
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        names = {
            "__file__": spec.origin,
            "__spec__": spec,
            "__package__": spec.parent,
            "__loader__": spec.loader,
        }
        return code, names

    def require_package(self) -> None:
        """Find the outermost package of a module, and import nothing.

        Raises:
            ArgumentError: there is none.
        """
        if self.is_module and importlib.util.find_spec(self.name.partition(".")[0]) is None:
            raise _no_module(self.name)


def _no_module(name: str) -> ArgumentError:
    return ArgumentError(
        f"there is no module {name!r} to run; Python looks for it in {sys.path[0]} and where "
        "packages are installed"
    )


def _spec_of(name: str) -> ModuleSpec:
    """The specification of a module, or of ``__main__`` in a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:  # of a package that it would be in
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise _no_module(name)
    return spec


def threads_per_rank(ranks: int) -> int:
    """How many torch threads each rank gets when the ranks of one host share its cores."""
    return max(1, num_processors() // ranks)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One call of ``echelon run`` with processes.

    Attributes:
        program: what to run.
        arguments: of the script.
        ranks: how many processes.
        log_dir: where their output goes; None: a folder that goes away after success.
        max_restarts: how often all ranks start again after a failure.
        grace: seconds that ranks get to save and leave after a signal, before they are killed.
        timeout: seconds that a rank waits for others in one call, for ``ec.init``; None: its own.
        tee: show what all ranks print, not only rank 0.
    """

    program: Program
    arguments: tuple[str, ...]
    ranks: int
    log_dir: Path | None = None
    max_restarts: int = 0
    grace: float = time_limits.SAVE_S
    timeout: float | None = None
    tee: bool = False

    def command(
        self,
        log_dir: str,
        live: bool,
        launcher: int | None = None,
        attempts: str | None = None,
    ) -> list[str]:
        """The command that starts torch's agent.

        Args:
            live: rank 0 writes straight to our standard output, because that is a terminal.
            launcher: the process with which the agent ends, if it is to end with one.
            attempts: the file for how each attempt ends; None: one in ``log_dir``.
        """
        options = {
            "--ranks": str(self.ranks),
            "--max-restarts": str(self.max_restarts),
            "--grace": f"{self.grace:g}",
            "--log-dir": log_dir,
        }
        if launcher is not None:
            options["--end-with"] = str(launcher)
        if attempts is not None:
            options["--attempts"] = attempts
        flags = [part for option in options.items() for part in option] + [_LIVE] * live
        return [
            sys.executable,
            "-P",  # or modules of the working directory would be imported before ours
            "-m",
            _AGENT,
            *flags,
            *self.program.words(),
            *self.arguments,
        ]

    @staticmethod
    def program_words(words: Sequence[str]) -> list[str]:
        """What the user has started, by the words of a process: the agent's own are left out."""
        if _AGENT not in words:
            return list(words)
        rest = list(words[words.index(_AGENT) + 1 :])
        while rest and rest[0].startswith("--"):
            del rest[: 1 if rest[0] == _LIVE else 2]
        return rest

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables to set; those that the user has set stay, but for what the call says."""
        wanted = {
            "OMP_NUM_THREADS": str(threads_per_rank(self.ranks)),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",  # or lines in files would come late
        }
        said = {} if self.timeout is None else {"ECHELON_TIMEOUT": f"{self.timeout:g}"}
        return {name: value for name, value in wanted.items() if name not in environ} | said

    def shown(self) -> str:
        """The command as one would type it."""
        variables = [f"{k}={shlex.quote(v)}" for k, v in self.environment(os.environ).items()]
        log_dir = str(self.log_dir) if self.log_dir is not None else "LOG_DIR"
        return " ".join([*variables, shlex.join(self.command(log_dir, live=True))])
