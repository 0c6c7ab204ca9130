"""A replay executes the program that the user names, and nothing that the run has recorded."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from echelon.errors import ArgumentError
from echelon.laboratory.job_facts import JobFacts
from echelon.laboratory.replayed_program import NamedProgram, command_of
from echelon.launch.program import Program
from tests.laboratory.boxed_runs import job_of

SCRIPT = """
import sys

def main(world):
    return __name__, sys.argv

class Trainer:
    @staticmethod
    def train(world):
        return "trained"

def with_more(world, size):
    return size

def without_world():
    return "called"

number = 3

if __name__ == "__main__":
    sys.modules["__main__"].executed = __file__
"""


@pytest.fixture
def facts(tmp_path: Path) -> JobFacts:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return job_of(str(script), ranks=1, backend="threads", folder=str(tmp_path))


def named(facts: JobFacts, function: str = "") -> NamedProgram:
    return NamedProgram(program=Program(facts.script), function=function, arguments=("--size", "3"))


@pytest.mark.parametrize("function", ["main", "Trainer.train", "without_world"])
def test_a_named_function_is_found_and_sees_the_arguments(facts: JobFacts, function: str) -> None:
    program = named(facts, function)
    with program.as_started():
        called: Any = program.called()
        result = called() if function == "without_world" else called(None)
    expected = {
        "main": ("__replayed__", [facts.script, "--size", "3"]),
        "Trainer.train": "trained",
        "without_world": "called",
    }
    assert result == expected[function]


def test_a_run_of_a_program_that_takes_no_world_is_replayed(tmp_path: Path) -> None:
    def main() -> None:
        for _ in ec.Blackbox(tmp_path).steps([1]):
            pass

    ec.run(main, 2)
    assert ec.replay(tmp_path, main).same


def test_a_script_is_executed_as_the_main_program(
    facts: JobFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "executed", None, raising=False)
    program = named(facts)
    with program.as_started():
        program.called()(None)  # type: ignore[arg-type]
    assert vars(sys.modules["__main__"])["executed"] == facts.script


def test_what_was_before_comes_back(facts: JobFacts) -> None:
    before = (sys.argv, list(sys.path), os.getcwd())
    with pytest.raises(ValueError, match="no"), named(facts).as_started():
        assert sys.path[0] == facts.folder
        raise ValueError("no")
    assert (sys.argv, list(sys.path), os.getcwd()) == before


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("gone", "does not define a function gone: call ec.replay"),
        ("number", "does not define a function number"),
        ("main.<locals>.inner", "does not define a function main.<locals>.inner"),
        ("with_more", r"with_more takes \(world, size\), and its arguments in the"),
    ],
)
def test_a_function_that_cannot_be_called_says_why(
    facts: JobFacts, function: str, sentence: str
) -> None:
    program = named(facts, function)
    with program.as_started(), pytest.raises(ArgumentError, match=sentence):
        program.called()


def test_a_program_is_compared_with_the_one_that_has_run(facts: JobFacts) -> None:
    script = replace(facts, function="")
    assert named(facts).differing(script) == {}
    assert named(facts, "main").differing(facts) == {}
    other = replace(script, script_checksum="0" * 16, arguments=("--size", "4"))
    assert named(facts).differing(other).keys() == {"script", "arguments"}
    with pytest.raises(ArgumentError, match=r"the run recorded the program --function main .*Name"):
        named(facts).differing(facts)
    Path(facts.script).unlink()
    with pytest.raises(ArgumentError, match="does not exist"), named(facts).as_started():
        pass


def test_a_recorded_program_is_shown_as_one_would_type_it_and_cannot_write_lines() -> None:
    facts = job_of("/a b/train.py")
    assert command_of(facts) == "--function main '/a b/train.py'"
    hostile = replace(facts, function="", module="x\n\x1b[2J", arguments=("$(id)",))
    assert command_of(hostile) == r"-m 'x\n\x1b[2J' '$(id)'"


HOSTILE = {  # what a folder of somebody else may name
    "a module beside it": {"module": "evil", "script": "/nonexistent"},
    "a script in it": {"script": "evil.py"},
    "a script of the system with arguments": {
        "script": str(Path(os.__file__).parent / "timeit.py"),
        "arguments": ["-n1", "-r1", "open('ran', 'w')"],
    },
    "a function": {"script": "evil.py", "function": "main"},
    "a relative folder": {"script": "evil.py", "folder": "."},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_a_folder_names_is_executed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def main() -> None:
        for _ in ec.Blackbox(run).steps([1]):
            pass

    ec.run(main, 1)
    (run / "evil.py").write_text("open('ran', 'w')\ndef main(world): open('ran', 'w')\n")
    (file,) = run.glob("blackbox/*/job.json")
    given = {"module": "", "function": "", "script_checksum": "", "folder": str(run)}
    file.write_text(json.dumps(json.loads(file.read_text()) | given | HOSTILE[name]))
    monkeypatch.chdir(run)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the named program has run')\n")
    for words in ([], ["--anyway"], ["--list"], ["--keep"]):
        result = CliRunner().invoke(app, ["replay", str(run), *words])
        assert result.exit_code == (0 if words in (["--list"], ["--keep"]) else 2)
    function = ["--function", "main"] if name == "a function" else []
    result = CliRunner().invoke(app, ["replay", str(run), "--anyway", *function, str(script)])
    assert re.search("the named program has run", result.output + repr(result.exception))
    assert not (run / "ran").exists()
