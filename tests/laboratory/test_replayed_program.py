"""The program of a run is found again, or a sentence says what to do instead."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.errors import ArgumentError
from echelon.laboratory.job_facts import JobFacts
from echelon.laboratory.replayed_program import as_started, check_trusted, function_of
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


def test_a_function_is_found_in_its_script_and_sees_its_arguments(facts: JobFacts) -> None:
    with as_started(facts):
        function: Any = function_of(facts)
        assert function(None) == ("__replayed__", [facts.script, "--size", "3"])
        function = function_of(replace(facts, function="Trainer.train"))
        assert function(None) == "trained"


def test_a_function_that_takes_no_world_is_found_too(facts: JobFacts) -> None:
    with as_started(facts):
        function: Any = function_of(replace(facts, function="without_world"))
        assert function() == "called"


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
    with as_started(facts):
        function_of(replace(facts, function=""))(None)  # type: ignore[arg-type]
    assert vars(sys.modules["__main__"])["executed"] == facts.script


def test_what_was_before_comes_back(facts: JobFacts) -> None:
    before = (sys.argv, list(sys.path), os.getcwd())
    with pytest.raises(ValueError, match="no"), as_started(facts):
        assert os.getcwd() == facts.folder
        assert sys.path[0] == facts.folder
        raise ValueError("no")
    assert (sys.argv, list(sys.path), os.getcwd()) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"function": "gone"}, "does not define gone any more: call ec.replay"),
        ({"function": "number"}, "does not define number any more"),
        ({"function": "main.<locals>.inner"}, "cannot be found by its name: call ec.replay"),
        ({"function": "with_more"}, r"with_more takes \(world, size\), and its arguments in the"),
        ({"script": ""}, "the run was no script: call ec.replay"),
    ],
)
def test_a_program_that_cannot_be_called_says_why(
    facts: JobFacts, change: dict[str, Any], sentence: str
) -> None:
    with as_started(facts), pytest.raises(ArgumentError, match=sentence):
        function_of(replace(facts, **change))


def test_a_script_or_a_folder_that_is_gone_is_named(facts: JobFacts) -> None:
    Path(facts.script).unlink()
    with as_started(facts), pytest.raises(ArgumentError, match="does not exist"):
        function_of(facts)
    nowhere = replace(facts, folder="/nowhere")
    with pytest.raises(ArgumentError, match="working directory /nowhere"), as_started(nowhere):
        pass


def test_a_run_of_a_local_function_is_replayed_by_the_function(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        for _ in ec.Blackbox(tmp_path).steps([1]):
            pass

    ec.run(main, 1)
    with pytest.raises(ArgumentError, match="cannot be found by its name"):
        ec.replay(tmp_path)
    assert ec.replay(tmp_path, main).same


def test_a_program_that_somebody_else_may_have_named_is_not_executed(
    facts: JobFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs/job.json"
    file.parent.mkdir()
    facts.write(file)
    check_trusted(file, file.parent, facts)
    with pytest.raises(ArgumentError, match="lies in the folder of the run"):
        check_trusted(file, tmp_path, facts)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ArgumentError, match=f"belongs to the user {user}, who may have named any"):
        check_trusted(file, file.parent, facts)
