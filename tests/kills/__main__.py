"""Ends or fails a save at its calls, each in a fork: ``python -m tests.kills SCENE PARTS ERRNO``.

Run with ``kill_at_call.c`` preloaded. It prints how many calls there were and how many were struck,
and what was found after each.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from echelon.errors import EchelonError
from tests.kills.scenes import NEW, OLD, SCENES, Scene, quiet

FINE, REFUSED, BROKEN = 0, 3, 4  # exit codes


def forked(act: Callable[[], object]) -> int:
    """Run ``act`` in a fork; how that has ended."""
    pid = os.fork()
    if pid == 0:
        code = BROKEN
        try:
            act()
            code = FINE
        except EchelonError:
            code = REFUSED
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def look(scene: Scene, folder: Path) -> float | None:
    """What a user finds; in a fork, because a world does not outlive one in which it began."""
    out, into = os.pipe()
    code = forked(lambda: os.write(into, json.dumps(scene.look(folder)).encode()))
    os.close(into)
    with os.fdopen(out) as pipe:
        text = pipe.read()
    assert code == FINE, f"what is left cannot be loaded: {sorted(folder.rglob('*'))}"
    value: float | None = json.loads(text)
    return value


def count_calls(scene: Scene, folder: Path, library: ctypes.CDLL) -> int:
    """How many calls a save makes that nobody disturbs."""

    def save() -> None:
        library.kill_at_call(os.fsencode(folder), ctypes.c_long(-1), 0)
        scene.put(folder, NEW)
        (folder.parent / "calls").write_text(str(library.calls_so_far()))

    assert forked(save) == FINE
    return int((folder.parent / "calls").read_text())


def strike(scene: Scene, folder: Path, library: ctypes.CDLL, number: int, fails: int) -> str:
    """Save, and end or fail at one call; what is there then, and again after a second save."""

    def save() -> None:
        library.kill_at_call(os.fsencode(folder), ctypes.c_long(number), fails)
        scene.put(folder, NEW)

    code = forked(save)
    if fails:  # where only the removal of something old has failed, it is no error
        assert code in (FINE, REFUSED), f"call {number} ends with {code}"
    else:
        assert code == -signal.SIGKILL, f"call {number} ends with {code}"
    value = look(scene, folder)
    assert value in ((OLD, NEW) if scene.has_old else (None, NEW)), (number, value)
    if value is None or value == OLD:
        assert code != FINE, (number, value)
    if scene.has_old or value is None:
        assert forked(lambda: scene.put(folder, NEW)) == FINE, f"after call {number}"
        assert not scene.left(folder), (number, scene.left(folder))
    assert look(scene, folder) == NEW, number
    return "new" if value == NEW else "old" if value == OLD else "nothing"


def main(name: str, parts: int, fails: int) -> None:
    quiet()
    for module in SCENES[name].modules:  # here, and not in each fork
        importlib.import_module(module)
    scene, library = SCENES[name], ctypes.CDLL(os.environ["LD_PRELOAD"])
    top = Path(tempfile.mkdtemp(prefix="kills "))
    try:

        def fresh(name: str) -> Path:
            folder = top / name / "rün\n1"
            folder.mkdir(parents=True)
            if scene.has_old:
                assert forked(lambda: scene.put(folder, OLD)) == FINE
            return folder

        calls = count_calls(scene, fresh("whole"), library)
        chosen = range(calls) if not parts else range(0, calls, max(1, calls // parts))
        counts = Counter(strike(scene, fresh(f"{i}"), library, i, fails) for i in chosen)
        print(json.dumps({"calls": calls, "struck": len(chosen), **counts}))
    finally:
        shutil.rmtree(top)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), getattr(errno, sys.argv[3]) if len(sys.argv) > 3 else 0)
