"""Where a run comes from: commit, versions, host and command. Known before its first step."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

from echelon.comm.streams import device_of
from echelon.process.command_words import masked
from echelon.version import __version__

_GIT_S = 5.0  # a repository on a slow disk must not hold up a run
_RANK_PROGRAM = "rank_program.py"
_PACKAGES = ("numpy", "transformers", "lightning", "accelerate")


def provenance(device: torch.device, num_ranks: int) -> dict[str, str]:
    """The facts by name, in the order in which the page shows them.

    The command is written as it was given, without the secrets in it.
    """
    host = platform.uname()
    rows = {
        "command": command_text(sys.orig_argv, sys.argv, num_ranks),
        "folder": os.getcwd(),
        "commit": commit_text(Path.cwd()),
        "host": host.node,
        "system": f"{host.system} {host.release}, {host.machine}",
        "processors": str(os.cpu_count()),
        "device": device_of(device).name(),
        "threads of torch": str(torch.get_num_threads()),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "echelon": __version__,
    }
    # Only what the script uses has an influence on it.
    rows |= {name: metadata.version(name) for name in _PACKAGES if name in sys.modules}
    return {name: text for name, text in rows.items() if text}


def command_text(typed: list[str], seen: list[str], num_ranks: int) -> str:
    """The command as one would type it.

    A rank that ``echelon run`` has started was not typed so; the options of ``echelon run``, but
    for the number of ranks, are not known to it.

    Args:
        typed: ``sys.orig_argv``.
        seen: ``sys.argv``.

    Example:
        >>> command_text(["/usr/bin/python3", "train.py", "two words"], ["train.py"], 1)
        "python3 train.py 'two words'"
        >>> ranks = ["python3", "-u", "/lib/echelon/launch/rank_program.py", "train.py", "--lr=1"]
        >>> command_text(ranks, ["train.py", "--lr=1"], 2)
        'echelon run --ranks 2 train.py --lr=1'
    """
    if any(Path(argument).name == _RANK_PROGRAM for argument in typed):
        return shlex.join(["echelon", "run", "--ranks", str(num_ranks), *masked(seen)])
    return shlex.join([Path(typed[0]).name, *masked(typed[1:])]) if typed else ""


def commit_text(folder: Path) -> str:
    """The commit of the repository that ``folder`` is in, and whether files differ from it.

    It is empty where there is no repository, no git, or git does not answer in time.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if changed is None:
        return commit
    return f"{commit}, with changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
