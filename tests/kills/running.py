"""Runs a scene with ``kill_at_call.c`` preloaded, which a compiler makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NEEDS = {"lightning": "lightning", "trainer": "transformers", "accelerate": "accelerate"}


def struck(scene: str, parts: int, folder: Path, error: str | None = None) -> dict[str, Any]:
    """End, or fail, a save at its calls; how many there were, and what was found after each.

    Args:
        parts: at how many calls, evenly; 0: at all.
        folder: for the library.
        error: the name of an errno with which the call fails; None: the process is killed.
    """
    host = NEEDS.get(scene.partition("-")[0])
    if host is not None:
        pytest.importorskip(host)
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a compiler of C")
    library = folder / "kill_at_call.so"
    source = HERE / "kill_at_call.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills", scene, str(parts), *([error] if error else [])],
        env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts
