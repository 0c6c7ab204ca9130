import subprocess
from pathlib import Path

import pytest
import torch

from echelon.observe.provenance import commit_text, provenance


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *names, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_commit_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert commit_text(tmp_path) == commit
    (tmp_path / "train.py").write_text("2")
    assert commit_text(tmp_path) == f"{commit}, with changes"


def test_without_a_repository_or_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_text(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_text(tmp_path) == ""


def test_a_run_knows_its_command_host_and_versions() -> None:
    facts = provenance(torch.device("cpu"), num_ranks=2)
    assert next(iter(facts)) == "command"
    assert {"host", "Python", "torch", "echelon", "device"} <= set(facts)
    assert facts["torch"] == torch.__version__
