import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app

HELP_S = 0.3
THREADS = ("--ranks", "2", "--world", "threads")


def call(*arguments: str | Path) -> tuple[int, str]:
    """The exit code of a command, and all that it printed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('ran')\n")
    return path


def test_help_needs_no_torch_and_little_time() -> None:
    code = "import sys; from echelon.cli import app; app(['--help'], standalone_mode=False); "
    code += "print('torch' in sys.modules)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "False"
    for command in ("run", "report", "doctor", "checkpoint"):
        assert command in done.stdout
    # Time on the processor: what the clock shows on a machine that does nothing else.
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used <= HELP_S


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2", "nowhere.py"], "nowhere.py' does not exist"),
        (["--ranks", "0", "{script}"], "greater than or equal to 1"),
        (["--ranks", "two", "{script}"], "--ranks"),
        (["{script}"], "say how many, or give the script a --plan"),
        (["--ranks", "3", "{script}", "--plan", "pp=2"], "it is 3, and --plan pp=2 is for 2"),
        (["{script}", "--plan=tp=2"], "give each of pp, dp, shard at most once"),
        (["--ranks", "2", "--world", "mars", "{script}"], "--world"),
        (["--ranks", "2", "--bad", "{script}"], "No such option: --bad"),
        (["--ranks", "2"], "Missing argument"),
        (["--ranks", "2", "--max-restarts", "-1", "{script}"], "greater than or equal to 0"),
        (["--ranks", "2", "--grace", "-1", "{script}"], "greater than or equal to 0"),
        (["--ranks", "2", "--timeout", "0", "{script}"], "greater than or equal to 0.001"),
        (["--ranks", "2", "--timeout", "soon", "{script}"], "--timeout"),
        ([*THREADS, "--print", "{script}"], "--print: simulated ranks are threads"),
        ([*THREADS, "--log-dir", "x", "{script}"], "--log-dir: simulated ranks are threads"),
        ([*THREADS, "--max-restarts", "1", "{script}"], "--max-restarts: simulated ranks"),
        ([*THREADS, "--grace", "1", "{script}"], "--grace: simulated ranks are threads"),
    ],
)
def test_a_call_that_cannot_be_carried_out_ends_with_code_2(
    arguments: list[str], message: str, script: Path
) -> None:
    code, output = call("run", *(a.format(script=script) for a in arguments))
    assert code == 2
    assert message in output


def test_print_shows_the_command_that_does_it_and_starts_nothing(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    code, output = call("run", "--ranks", "2", "--print", script, "--steps", "3", "--help")
    assert code == 0
    assert output.count("\n") == 1
    assert f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // 2)} " in output
    assert "GLOO_SOCKET_IFNAME=lo " in output
    assert "-m echelon.launch.agent --ranks 2 --max-restarts 0 --grace 5 " in output
    assert "--end-with" not in output
    assert "ECHELON_TIMEOUT" not in output
    assert output.rstrip().endswith(f"{script} --steps 3 --help")


def test_the_command_has_what_the_options_say(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_TIMEOUT", "7")
    options = ["--max-restarts", "3", "--grace", "0.5", "--timeout", "90", "--log-dir", "logs"]
    code, output = call("run", "--ranks", "2", *options, "--print", script)
    assert code == 0
    assert "ECHELON_TIMEOUT=90 " in output
    assert " --max-restarts 3 --grace 0.5 --log-dir logs " in output


def test_a_plan_of_the_script_says_how_many_ranks_to_start(script: Path) -> None:
    for ranks, plan in (([], ["--plan", "pp=2,shard=3"]), (["--ranks", "6"], ["--plan=dp=6"])):
        code, output = call("run", *ranks, "--print", script, *plan)
        assert code == 0
        assert "agent --ranks 6 " in output


def test_variables_that_the_user_has_set_stay(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in call("run", "--ranks", "2", "--print", script)[1]


def test_a_report_of_nothing_says_what_to_give(tmp_path: Path) -> None:
    code, output = call("report", tmp_path / "nothing")
    assert code == 2
    assert "give the folder of a run" in " ".join(output.split())


def test_a_report_is_drawn_again(tmp_path: Path) -> None:
    start = {"kind": "start", "name": "a", "ranks": 1, "backend": "threads", "device": "cpu"}
    start |= {"version": 1, "time": "", "total_steps": 1, "unit": "", "references": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(start | {"config": {}}) + "\n")
    code, output = call("report", tmp_path)
    assert (code, output.strip()) == (0, str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").exists()
