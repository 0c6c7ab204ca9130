"""The program that the user names for a replay, and how it compares with the one that has run.

[Note: whose program it is]
The folder of a run is data, and whoever has written it can have recorded any command. So nothing
that it names is executed, imported or opened: the user names the program, its arguments and its
function. What the run recorded is shown, and compared with them.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any, final

from echelon.comm.threads.rank_modules import importing_for_themselves, main_names
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.errors.message_text import printable_line
from echelon.laboratory.job_facts import JobFacts, checksum_of
from echelon.launch.program import Program
from echelon.launch.rank_function import taking_world
from echelon.process.command_words import masked

_GIVE = "call ec.replay(RUN, function, args=...) in Python, with the function and its arguments"


@final
@dataclass(frozen=True, kw_only=True)
class NamedProgram:
    """What each rank of a replay executes. See [Note: whose program it is].

    Attributes:
        program: the script or module.
        function: the qualified name of the function of it to call, for a script that calls
            ``ec.run`` itself; empty to execute the program.
        arguments: of the program.
    """

    program: Program
    function: str = ""
    arguments: tuple[str, ...] = ()

    @contextmanager
    def as_started(self) -> Iterator[None]:
        """The arguments and the paths of modules that Python would give the program.

        Raises:
            ArgumentError: there is no such program.
        """
        if (problem := self.program.problem()) is not None:
            raise ArgumentError(problem)
        argv, path = sys.argv, list(sys.path)
        folder = self.program.folder()
        try:
            sys.argv = [self.program.name, *self.arguments]
            sys.path.insert(0, folder)
            self.program.require_package()
            with importing_for_themselves(folder):
                yield
        finally:
            sys.argv, sys.path[:] = argv, path

    def called(self) -> Callable[[World], Any]:
        """What each rank calls to run the program. Needs ``as_started``.

        Raises:
            ArgumentError: there is no such function, or it takes more than the world.
        """
        if not self.function:
            return partial(_execute, self.program)
        return _called(self.program, self.function)

    def differing(self, facts: JobFacts) -> dict[str, tuple[str, str]]:
        """What is other than in the run, by name: how it was, and how it is now.

        Raises:
            ArgumentError: the run has called a function, and none is named.
        """
        if facts.function and not self.function:
            raise ArgumentError(
                f"{_recorded(facts)}. Name the function that each rank is to call: "
                f"{self._command('--function NAME ')}; or {_GIVE}"
            )
        pairs = {"script": (facts.script_checksum or "none", self._checksum() or "not there")}
        if not facts.function:
            pairs["arguments"] = (_text(facts.arguments), _text(masked(self.arguments)))
        return {name: (then, now) for name, (then, now) in pairs.items() if then != now}

    def _checksum(self) -> str:
        if not self.program.is_module:
            return checksum_of(self.program.name)
        return checksum_of(str(self.program.read()[1]["__file__"]))

    def _command(self, option: str) -> str:
        words = shlex.join([*self.program.words(), *self.arguments])
        return printable_line(f"echelon replay RUN {option}{words}")


def no_program(facts: JobFacts) -> ArgumentError:
    """The error about a replay that names no program."""
    return ArgumentError(
        f"{_recorded(facts)}. It is not started from what a folder has recorded: name the program "
        "yourself, as in echelon replay RUN train.py ARGUMENTS"
    )


def command_of(facts: JobFacts) -> str:
    """The program of a run as one would type it after ``echelon replay RUN``."""
    if facts.function:
        words = ["--function", facts.function, facts.script or "SCRIPT"]
    else:
        name = ["-m", facts.module] if facts.module else [facts.script or "SCRIPT"]
        words = [*name, *facts.arguments]
    return printable_line(shlex.join(words))


def how_to_replay(run: Path, step: int, facts: JobFacts) -> str:
    """The command that computes a step of this job again."""
    if facts.function and ("<" in facts.function or not facts.script):  # found by no name
        return f"ec.replay({str(run)!r}, function, step={step})"
    command = f"echelon replay {shlex.quote(str(run))} --step {step} {command_of(facts)}"
    return printable_line(command)


def _recorded(facts: JobFacts) -> str:
    folder = printable_line(shlex.quote(facts.folder))
    return f"the run recorded the program {command_of(facts)}, in the folder {folder}"


def _text(words: tuple[str, ...]) -> str:
    return shlex.join(words) or "none"


def _execute(program: Program, world: World) -> None:
    code, names = program.read()
    exec(code, main_names(names))


def _called(program: Program, name: str) -> Callable[[World], Any]:
    if program.is_module:
        names = runpy.run_module(program.name, run_name="__replayed__")
    else:
        names = runpy.run_path(os.fspath(Path(program.name)), run_name="__replayed__")
    first, _, rest = name.partition(".")
    try:
        function = names[first]
        function = attrgetter(rest)(function) if rest else function
    except (KeyError, AttributeError):
        function = None
    if not callable(function):
        raise ArgumentError(f"{program.name} does not define a function {name}: {_GIVE}")
    try:
        signature(taking_world(function, 0)).bind("world")
    except TypeError as error:
        raise ArgumentError(
            f"{name} takes {signature(function)}, and its arguments in the run are not known: "
            f"{_GIVE}"
        ) from error
    return function  # type: ignore[no-any-return]
