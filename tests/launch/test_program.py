"""What ``echelon run`` is to run, and how its ranks share the machine."""

from pathlib import Path

import pytest

from echelon.launch.program import Launch, Program, threads_per_rank
from tests.processes import run_python


def test_cores_are_shared_and_nobody_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 64)] == [8, 4, 2, 1, 1]


SHADOWS = ("torch", "numpy", "echelon", "multiprocessing", "selectors", "types", "queue", "json")
STARTS = {
    "echelon run": ("-P", "-m", "echelon", "run", "--ranks", "2"),
    "echelon run on threads": ("-P", "-m", "echelon", "run", "--ranks", "2", "--world", "threads"),
    "ec.run with processes": (),
}
MAIN = """
import echelon as ec
def main(world): return world.size
if __name__ == "__main__":
    if {starts}: ec.run(main, 2, "processes")
    else: main(ec.init())
    print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_no_process_of_ours_imports_from_the_working_directory(name: str, tmp_path: Path) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    home.mkdir()
    shared.mkdir()
    (home / "train.py").write_text(MAIN.format(starts=not STARTS[name]))
    for module in SHADOWS:
        (shared / f"{module}.py").write_text(f"open({str(shared)!r} + '/ran', 'a').write('!')\n")
    done = run_python(*STARTS[name], str(home / "train.py"), cwd=shared)
    assert "trained" in done.stdout, done.stderr
    assert not (shared / "ran").exists()


@pytest.mark.parametrize("live", [True, False])
def test_the_program_of_an_agent_is_what_the_user_has_started(live: bool) -> None:
    words = ("--ranks", "3", "-m", "x.py")
    for program, shown in (Program("train.py"), "train.py"), (Program("a.b", True), "-m a.b"):
        launch = Launch(program=program, arguments=words, ranks=2)
        command = launch.command("logs", live, launcher=7)
        assert "-P" in command
        assert Launch.program_words(command) == [*shown.split(), *words]
    assert Launch.program_words(["python", "train.py"]) == ["python", "train.py"]
