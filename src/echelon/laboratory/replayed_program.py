"""The program of a run, found again: a script that each rank executes, or a function of it.

[Note: whose program it is]
The folder of a run names the program, and whoever writes the folder can name any other. So it is
executed only if the file with the name belongs to the user, and lies outside of the folder.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Any

from echelon.comm.threads.rank_modules import importing_for_themselves, main_names
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.laboratory.job_facts import JobFacts
from echelon.launch.program import Program
from echelon.launch.rank_function import taking_world

_GIVE = "call ec.replay(RUN, function, args=...) in Python, with the function and its arguments"


@contextmanager
def as_started(facts: JobFacts) -> Iterator[None]:
    """The working directory, the arguments and the paths of modules of the run.

    Raises:
        ArgumentError: the working directory is not there.
    """
    argv, path, folder = sys.argv, list(sys.path), os.getcwd()
    try:
        os.chdir(facts.folder)
    except OSError as error:
        raise ArgumentError(
            f"the run had the working directory {facts.folder}, which cannot be entered here: "
            f"{error.strerror}"
        ) from error
    try:
        sys.argv = [facts.script, *facts.arguments]
        folder_of_program = program_of(facts).folder()
        sys.path.insert(0, folder_of_program)
        with importing_for_themselves(folder_of_program):
            yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.chdir(folder)


def check_trusted(file: Path, run: Path, facts: JobFacts) -> None:
    """Refuse to execute what a folder of somebody else names. See [Note: whose program it is].

    Args:
        file: from which ``facts`` were read.
        run: the folder of the run.

    Raises:
        ArgumentError: it is another user's, or brings its script with it.
    """
    owner = os.stat(file).st_uid
    if sys.platform != "win32" and owner != os.geteuid():
        raise ArgumentError(
            f"{file} belongs to the user {owner}, who may have named any program in it: {_GIVE}"
        )
    if Path(facts.script).resolve().is_relative_to(run.resolve()):
        raise ArgumentError(
            f"the script {facts.script} lies in the folder of the run, which may have come with "
            f"it from somebody else: {_GIVE}"
        )


def program_of(facts: JobFacts) -> Program:
    """The script or the module that was started."""
    return Program(facts.module or facts.script, is_module=bool(facts.module))


def function_of(facts: JobFacts) -> Callable[[World], Any]:
    """What each rank calls to run the program again. Needs ``as_started``.

    Raises:
        ArgumentError: it cannot be found, or needs arguments that are not known.
    """
    program = program_of(facts)
    if not facts.script:
        raise ArgumentError(f"the run was no script: {_GIVE}")
    if (problem := program.problem()) is not None:
        raise ArgumentError(problem)
    if facts.function:
        return _found_function(facts)
    program.require_package()
    return partial(_execute, program)


def _execute(program: Program, world: World) -> None:
    code, names = program.read()
    exec(code, main_names(names))


def _found_function(facts: JobFacts) -> Callable[[World], Any]:
    if "<" in facts.function:  # <locals> or <lambda>
        raise ArgumentError(
            f"the run called {facts.function} of {facts.script}, which cannot be found by its "
            f"name: {_GIVE}"
        )
    names = runpy.run_path(facts.script, run_name="__replayed__")
    first, _, rest = facts.function.partition(".")
    try:
        function = names[first]
        function = attrgetter(rest)(function) if rest else function
    except (KeyError, AttributeError):
        function = None
    if not callable(function):
        raise ArgumentError(f"{facts.script} does not define {facts.function} any more: {_GIVE}")
    try:
        signature(taking_world(function, 0)).bind("world")
    except TypeError as error:
        raise ArgumentError(
            f"{facts.function} takes {signature(function)}, and its arguments in the run are not "
            f"known: {_GIVE}"
        ) from error
    return function  # type: ignore[no-any-return]
