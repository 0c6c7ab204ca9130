"""Jobs that call a function of a test module on every rank, each in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.children import environ

__all__ = ["run_job", "start_job"]

ROOT = Path(__file__).resolve().parent.parent.parent
OWN = ("-m", "echelon", "run", "--ranks")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


def start_job(
    target: str, ranks: int, *args: Any, folder: str, launcher: tuple[str, ...] = OWN
) -> subprocess.Popen[str]:
    """Start ``target`` (``module:function``) with ``args`` on each rank.

    One rank needs no launcher. Results of ranks are left in ``folder``.
    """
    # Python looks for modules beside the script, and here are packages with the names of libraries.
    program = Path(folder, "program.py")
    program.write_text("import sys; from tests.integrations import jobs; jobs.main(*sys.argv[1:])")
    launch = [] if ranks == 1 else [*launcher, str(ranks)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, *launch, str(program), target, folder, json.dumps(args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environ(OMP_NUM_THREADS="1", PYTHONPATH=path, TMPDIR=folder),  # for its logs
    )


def run_job(
    target: str, ranks: int, *args: Any, launcher: tuple[str, ...] = OWN, limit_s: float = 110
) -> list[Any]:
    """What ``target`` returned, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        job = start_job(target, ranks, *args, folder=folder, launcher=launcher)
        try:
            printed = job.communicate(timeout=limit_s)
        except BaseException:
            job.terminate()
            job.communicate()
            raise
        assert job.returncode == 0, "\n".join(printed)
        import torch

        files = [Path(folder, f"rank-{rank}.pt") for rank in range(ranks)]
        return [torch.load(file, weights_only=False) for file in files]


def main(target: str, folder: str, args: str) -> None:
    """What each rank runs."""
    import torch

    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(args))
    torch.save(result, Path(folder, f"rank-{os.environ.get('RANK', '0')}.pt"))
