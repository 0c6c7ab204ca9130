"""A process of ``echelon run`` is the user's program, as if Python had been started with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.launch import rank_program

SCRIPT = """
import sys, os
import __main__
assert __name__ == "__main__" and __main__.__file__ == __file__ == sys.argv[0], sys.argv
assert __spec__ is None and "run_program" not in globals()
print(sys.argv[1:], "torch" in sys.modules, sys.path[0] == os.path.dirname(__file__))
def fail():
    raise ValueError("boom")
if sys.argv[1:] == ["fail"]:
    fail()
"""


def start(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, rank_program.__file__, *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=60, stdin=subprocess.DEVNULL
    )


def test_a_script_is_main_with_its_arguments_and_brings_no_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = start(str(script), "--flag", "-m", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout == "['--flag', '-m'] False True\n"


def test_a_traceback_begins_with_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = start(str(script), "fail", cwd=tmp_path)
    assert done.returncode == 1
    first, second, *_ = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert second == f'  File "{script}", line 10, in <module>'


def test_pdb_without_input_says_what_to_do_in_one_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("breakpoint()\nprint('on')\n")
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    for size, is_told in (("2", True), ("1", False)):
        monkeypatch.setenv("WORLD_SIZE", size)
        done = start(str(script), cwd=tmp_path)
        assert "bdb.BdbQuit" in done.stderr
        assert ("or echelon run --world threads" in done.stderr) == is_told


def test_a_module_of_a_package_is_run_by_its_name(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("name = 'sibling'")
    (package / "train.py").write_text(
        "import sys\nfrom .sibling import name\nprint(name, __name__, __package__, sys.argv[1:])"
    )
    done = start("-m", "package.train", "1", cwd=tmp_path)
    assert (done.stderr, done.stdout) == ("", "sibling __main__ package ['1']\n")
