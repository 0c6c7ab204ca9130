"""What has run is known, whoever started it, and read from a file that anybody may have written."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.errors import BlackboxCorrupt
from echelon.laboratory import job_facts
from echelon.laboratory.job_facts import JobFacts, checksum_of, versions
from tests.laboratory.boxed_runs import job_of
from tests.processes import run_python


def facts_of(world: ec.World) -> JobFacts:
    return JobFacts.of(world)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_the_function_of_a_run_is_known(kind: str) -> None:
    facts = ec.run(facts_of, 2, kind)[1]
    assert (facts.ranks, facts.function, facts.module) == (2, "facts_of", "")
    assert Path(facts.script) == Path(__file__)
    assert facts.script_checksum == checksum_of(__file__)
    assert facts.threads == torch.get_num_threads()
    assert facts.backend == {"threads": "threads", "processes": "shm"}[kind]


def test_a_function_without_a_file_is_known_by_its_name_alone() -> None:
    names: dict[str, Any] = {"facts_of": facts_of}
    exec("def typed(world):\n    return facts_of(world)", names)
    facts = ec.run(names["typed"], 1)[0]
    assert (facts.script, facts.script_checksum, facts.function) == ("", "", "typed")


SCRIPT = """
import json, sys
from dataclasses import asdict
import echelon as ec
from echelon.laboratory import job_facts
from echelon.laboratory.job_facts import JobFacts

with ec.init() as world:
    facts = JobFacts.of(world)
    if world.rank == 0:
        open(sys.argv[1], "w").write(json.dumps(asdict(facts)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), ("-m", "echelon", "run", "--ranks", "2", "--world", "threads")],
    ids=["alone", "threads"],
)
def test_a_script_is_known_with_its_arguments(words: tuple[str, ...], tmp_path: Path) -> None:
    script, output = tmp_path / "script.py", tmp_path / "facts.json"
    script.write_text(SCRIPT)
    result = run_python(*words, str(script), str(output), "--size", "3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    facts = json.loads(output.read_text())
    assert facts["script"] == str(script)
    assert facts["arguments"] == [str(output), "--size", "3"]
    assert (facts["function"], facts["module"]) == ("", "")
    assert facts["folder"] == str(tmp_path)


@pytest.mark.slow
def test_a_module_is_known_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SCRIPT)
    output = tmp_path / "facts.json"
    words = ("-m", "echelon", "run", "--ranks", "1", "--world", "threads", "-m", "package.train")
    result = run_python(*words, str(output), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(output.read_text())["module"] == "package.train"


def facts() -> JobFacts:
    return job_of(__file__)


def test_facts_come_back_from_their_file(tmp_path: Path) -> None:
    facts().write(tmp_path / "job.json")
    assert JobFacts.read(tmp_path / "job.json") == facts()


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": "4"},
        {"ranks": 0},
        {"ranks": 1 << 20},
        {"ranks": True},
        {"arguments": [1]},
        {"versions": {"torch": 2}},
        {"format": 2},
        {"other": 1},
    ],
)
def test_a_file_with_anything_else_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"format": 1, **asdict(facts()), **change}))
    with pytest.raises(BlackboxCorrupt, match=r"job\.json: has"):
        JobFacts.read(path)
    path.write_text("[")
    with pytest.raises(BlackboxCorrupt, match="no JSON"):
        JobFacts.read(path)


def test_another_version_is_named() -> None:
    assert facts().differing() == {}
    then = replace(facts(), versions={**versions(), "torch": "1.0"})
    assert then.differing() == {"torch": ("1.0", str(torch.__version__))}


def test_the_facts_of_a_job_have_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf-token", "abc", "--lr", "1"])
    assert ec.run(facts_of, 1)[0].arguments == ("--hf-token", "***", "--lr", "1")


def test_a_device_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_facts, "local_device", lambda rank: torch.device("cpu"))
    then = replace(facts(), device="cuda")
    assert then.differing() == {"device": ("cuda", "cpu")}
    assert then.device_here() == torch.device("cpu")
    monkeypatch.setattr(job_facts, "local_device", lambda rank: torch.device("cuda", 0))
    assert then.differing() == {}
    assert then.device_here() == torch.device("cuda", 0)
    assert facts().device_here() == torch.device("cpu")
