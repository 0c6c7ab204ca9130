"""The repository keeps its own promises: pinned versions, reasons for dependencies, examples."""

import doctest
import importlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from tests.hosts import skip_without_host

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
DIRECT = [
    *PROJECT["build-system"]["requires"],
    *PROJECT["project"]["dependencies"],
    *(requirement for extra in EXTRAS.values() for requirement in extra),
]
# A CUDA build of torch brings these, each pinned by torch itself.
BROUGHT_BY_CUDA = ("nvidia-", "cuda-", "triton")


def canonical(requirement: str) -> str:
    """The name in a requirement, as package indexes compare names."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """The versions of constraints.txt by canonical name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


def installed() -> set[str]:
    """The canonical names of all installed packages."""
    return {canonical(package.name) for package in metadata.distributions()}


def brought_by(names: set[str]) -> set[str]:
    """The names of what is installed because one of ``names`` requires it, directly or not."""
    seen: set[str] = set()
    waiting, present = set(names), installed()
    while waiting:
        try:
            requirements = metadata.requires(waiting.pop()) or []
        except metadata.PackageNotFoundError:
            continue  # an extra that was not asked for, or a package of another platform
        needed = {canonical(text) for text in requirements if "extra ==" not in text}
        waiting |= (needed & present) - seen
        seen |= needed & present
    return seen


def test_every_direct_dependency_is_pinned() -> None:
    assert {canonical(requirement) for requirement in DIRECT} - set(pins()) == set()


def test_everything_that_a_dependency_brings_is_pinned() -> None:
    direct = {canonical(requirement) for requirement in DIRECT}
    open_ended = {name for name in brought_by(direct) if not name.startswith(BROUGHT_BY_CUDA)}
    assert open_ended - set(pins()) == set()


def test_every_dependency_has_its_reason() -> None:
    written = (ROOT / "docs" / "dependencies.md").read_text()
    assert [name for name in map(canonical, DIRECT) if f"| `{name}` |" not in written] == []


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SRC.rglob("*.py")) if ">>>" in path.read_text()],
    ids=lambda path: str(path.relative_to(SRC / "echelon")),
)
def test_the_examples_of_docstrings_run(path: Path) -> None:
    skip_without_host(path)
    name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, "see the captured output"
