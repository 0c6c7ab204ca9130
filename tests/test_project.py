"""What the repository tells others about itself: extras, workflows, forms, citation, versions."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from echelon.version import __version__
from tests.processes import run_python

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
# Of the forms of GitHub.
INPUTS = {"checkboxes", "dropdown", "input", "markdown", "textarea"}


def workflow(path: Path) -> dict[Any, Any]:
    """A workflow; YAML reads its key ``on`` as true."""
    return dict(yaml.safe_load(path.read_text()))


def steps_of(path: Path) -> list[dict[str, Any]]:
    """All steps of a workflow."""
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def test_import_echelon_loads_itself_and_little_of_python() -> None:
    program = "import sys; b = set(sys.modules); import echelon; print(*(set(sys.modules) - b))"
    loaded = set(run_python("-c", program).stdout.split())
    assert {name for name in loaded if name.startswith("echelon")} == {
        "echelon",
        "echelon.process",
        "echelon.process.offered_debugger",
        "echelon.version",
    }
    assert len(loaded) < 60
    for name in ("torch", "numpy", "rich", "typer", "inspect", "ctypes", "multiprocessing"):
        assert name not in loaded


def test_every_extra_that_a_text_names_exists() -> None:
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        extra.strip()
        for path in texts
        for names in re.findall(r"\bechelon\[([a-z, ]+)\]", path.read_text())
        for extra in names.split(",")
    }
    assert named
    assert named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_what_github_needs(path: Path) -> None:
    facts = workflow(path)
    assert facts["name"] == path.stem
    assert facts[True]  # "on"
    assert facts["permissions"] == {"contents": "read"}  # a job that needs more says so
    for job in facts["jobs"].values():
        assert job["runs-on"]
        assert set(job.get("needs", "").split()) <= facts["jobs"].keys()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
    # A tag can be moved to other code, which would run with the rights of the job.
    uses = re.findall(r"uses: .*", path.read_text())
    assert len(uses) == sum("uses" in step for step in steps_of(path))
    for line in uses:
        assert re.fullmatch(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v[0-9.]+", line)


def test_the_workflows_run_what_the_makefile_has_and_all_versions_of_python() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in WORKFLOWS:
        for step in steps_of(path):
            for target in re.findall(r"^make (?:\w+=\S+ )*([a-z-]+)", step.get("run", ""), re.M):
                assert target in targets
    matrix = workflow(GITHUB / "workflows" / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert f">={matrix['python'][0]}" == PROJECT["requires-python"]


def test_a_release_is_published_without_a_password() -> None:
    (publish,) = (
        job
        for job in workflow(GITHUB / "workflows" / "release.yml")["jobs"].values()
        if any("pypi-publish" in step.get("uses", "") for step in job["steps"])
    )
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"] == "pypi"
    assert "with" not in publish["steps"][-1]
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()


def test_a_tag_that_is_not_the_version_is_not_released(tmp_path: Path) -> None:
    steps = steps_of(GITHUB / "workflows" / "release.yml")
    (check,) = (step for step in steps if "TAG" in step.get("env", {}))
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "echelon-1.2.3.tar.gz").touch()
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.3] - 2027-01-01\n")
    for tag, expected in (("v1.2.3", True), ("v1.2.4", False)):
        environ = {**os.environ, "TAG": tag}
        command = ["bash", "-e", "-c", check["run"]]
        process = subprocess.run(command, cwd=tmp_path, env=environ, check=False)
        assert (process.returncode == 0) == expected


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_needs(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    for field in form["body"]:
        assert field["type"] in INPUTS
        assert field["attributes"]["label"]
        assert field.keys() <= {"type", "id", "attributes", "validations"}


def test_the_citation_is_of_this_version_and_licence() -> None:
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {
        "cff-version",
        "message",
        "title",
        "authors",
    } <= facts.keys()  # required
    assert facts["cff-version"] == "1.2.0"
    assert facts["type"] == "software"
    assert (facts["title"], facts["version"]) == (PROJECT["name"], __version__)
    assert (facts["license"], facts["abstract"]) == (PROJECT["license"], PROJECT["description"])
    assert facts["keywords"] == PROJECT["keywords"]
    for author in facts["authors"]:
        assert author.get("name") or author.get("family-names")


def test_the_changelog_has_versions_newest_first_and_the_kinds_of_its_format() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[0] == "[Unreleased]"
    form = re.compile(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d")
    released = [form.fullmatch(line) for line in headings[1:]]
    assert all(released), headings
    numbers = [tuple(map(int, match.groups())) for match in released if match]
    assert numbers == sorted(numbers, reverse=True)
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_every_python_that_is_claimed_has_been_tried() -> None:
    tried = re.findall(r"^\| (3\.\d+)\.\d+ \|", (ROOT / "docs" / "versions.md").read_text(), re.M)
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert set(claimed) == set(tried)
