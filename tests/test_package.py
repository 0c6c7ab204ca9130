"""What is published installs and runs elsewhere: the sdist, and the wheel that is built from it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = """
import echelon as ec
import torch
with ec.init() as world:
    total = torch.tensor([world.rank + 1])
    world.group.all_reduce(total)
    if world.rank == 0:
        print(ec.__file__, world.backend, total.item())
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="needs echelon[hosts]"),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel of a copy of the repository."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "dist"))
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, os.fsdecode(files.stdout).split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment, with the wheel and what the tests have beside it."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # Its .pth files are not read from there, so the package itself can only be the wheel's.
    (site_packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = dist.glob("*.whl")
    programs = folder / "bin"
    command = [str(programs / "pip"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, capture_output=True, env=clean_environ())
    return programs


def clean_environ() -> dict[str, str]:
    """The environment of a user, who has no repository on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def metadata(dist: Path) -> Message:
    """The metadata of the wheel."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "echelon").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == package
    assert "echelon/py.typed" in names


def test_the_sdist_builds_the_wheel_and_has_the_licence(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/echelon/py.typed"} <= names


def test_the_metadata_are_those_of_the_project(dist: Path) -> None:
    facts = metadata(dist)
    assert facts["Name"] == PROJECT["name"]
    assert facts["Requires-Python"] == PROJECT["requires-python"]
    assert facts["License-Expression"] == "Apache-2.0"
    assert set(facts.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "Programming Language :: Python :: 3.11" in facts.get_all("Classifier", [])


def test_a_job_of_two_ranks_runs_in_a_new_environment(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments: str) -> str:
        process = subprocess.run(
            [installed / "echelon", *arguments],
            cwd=tmp_path,
            env=clean_environ(),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    assert "run" in run("--help")
    for world, backend in (("processes", "shm"), ("threads", "threads")):
        file, *rest = run("run", "--ranks", "2", "--world", world, "train.py").split()
        assert Path(file).is_relative_to(installed.parent)
        assert rest == [backend, "3"]
