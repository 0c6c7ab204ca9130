"""The image of the Dockerfile, without Docker: its instructions, files, user and memory."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented_jobs import environ_of_job

ROOT = Path(__file__).resolve().parent.parent
SHM_MIB = 64  # of a container, by default
USER = 65534  # nobody: a user who owns nothing

# Runs a command as USER, in namespaces of its own: a small /dev/shm, and Python's installation in
# sight where it lies in a folder that only root may enter.
CONTAINER = f"""
set -e
mount -t tmpfs -o size={SHM_MIB}m none /dev/shm
chmod 1777 /dev/shm
if ! setpriv --reuid {USER} --clear-groups test -x {sys.base_prefix}/bin; then
    mount --bind {sys.base_prefix} "$HOLD"
    mount -t tmpfs -o mode=755 none "/$(cut -d / -f 2 <<<{sys.base_prefix})"
    mkdir -p {sys.base_prefix}
    mount --move "$HOLD" {sys.base_prefix}
fi
exec setpriv --reuid {USER} --regid {USER} --clear-groups --inh-caps=-all "$@"
"""


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def copied() -> list[str]:
    """What the image has of the repository."""
    return [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]


def command() -> list[str]:
    """What a container runs."""
    (text,) = (rest for word, rest in instructions() if word == "CMD")
    return list(json.loads(text))


def test_the_image_ends_as_an_ordinary_user_who_may_write_where_the_demo_writes() -> None:
    words = [word for word, _ in instructions()]
    assert words[0] == "FROM"
    assert words[-2:] == ["USER", "CMD"]
    (user,) = (rest for word, rest in instructions() if word == "USER")
    (folder,) = (rest for word, rest in instructions() if word == "WORKDIR")
    runs = [rest for word, rest in instructions() if word == "RUN"]
    assert any(shlex.split(run)[0] == "useradd" and user in run for run in runs)
    assert f"chown {user} {folder}" in runs
    assert set(words) == {"FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"}


def test_every_file_that_the_image_takes_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    assert set(copied()) == kept
    for name in kept:
        assert (ROOT / name).exists(), name


def test_the_base_image_is_a_supported_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (image,) = (rest for word, rest in instructions() if word == "FROM")
    version = image.removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


@pytest.fixture
def home() -> Iterator[Path]:
    """The folder of the user, with what the image has; that of a test is for root alone."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        for name in copied():
            source, target = ROOT / name, home / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        Path(folder).chmod(0o755)
        os.chown(home, USER, USER)
        yield home


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_the_demo_runs_for_another_user_with_64_mib_of_dev_shm(home: Path) -> None:
    hold = home.parent / "hold"
    hold.mkdir()
    words = [*command(), "--steps", "8", "--eval-every", "8"]
    assert words[0] == "echelon"
    process = subprocess.run(
        [
            *("unshare", "--mount", "bash", "-c", CONTAINER, "container"),
            *(sys.executable, "-m", *words),
        ],
        cwd=home,
        env=environ_of_job(PYTHONPATH=str(home / "src"), HOME=str(home), HOLD=str(hold)),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    (report,) = home.glob("runs/*/report.html")
    assert report.stat().st_uid == USER
