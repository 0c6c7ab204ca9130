import json
import os
import re
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from tests.children import environ
from tests.observe.runs import write_run

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
        (["-n", "0", "{script}"], "greater than or equal to 1"),
        (["--ranks", "2"], "Missing argument"),
        (["--ranks", "2", "--max-restarts", "-1", "{script}"], "greater than or equal to 0"),
        (["--ranks", "2", "--grace", "-1", "{script}"], "greater than or equal to 0"),
        (["--ranks", "2", "--timeout", "0", "{script}"], "greater than or equal to 0.001"),
        (["--ranks", "2", "--timeout", "soon", "{script}"], "--timeout"),
        (["--ranks", "2", "--timeout", "inf", "{script}"], "'--timeout': Input should be less"),
        ([*THREADS, "--timeout", "inf", "{script}"], "'--timeout': Input should be less"),
        (["--ranks", "2", "--grace", "inf", "{script}"], "'--grace': Input should be less"),
        (["{script}", "--plan", "dp=65537"], "ranks is 65537; give a whole number <= 65536"),
        (["--ranks", "65537", "{script}"], "'--ranks' / '-n': Input should be less"),
        ([*THREADS, "--print", "{script}"], "--print: simulated ranks are threads"),
        ([*THREADS, "--log-dir", "x", "{script}"], "--log-dir: simulated ranks are threads"),
        ([*THREADS, "--max-restarts", "1", "{script}"], "--max-restarts: simulated ranks"),
        ([*THREADS, "--grace", "1", "{script}"], "--grace: simulated ranks are threads"),
        (["--ranks", "2", "--step", "{script}"], "--step: it holds simulated ranks"),
        (["--ranks", "2", "--log-dir", "{script}", "{script}"], "cannot hold the output"),
        (["--ranks", "2", "--log-dir", "{script}/x", "{script}"], "cannot hold the output"),
        (["--ranks", "2", "--log-dir", "/proc", "{script}"], "cannot hold the output"),
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
    assert "-P -m echelon.launch.agent --ranks 2 --max-restarts 0 --grace 5 " in output
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


def test_two_runs_are_compared_where_the_user_wants(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, ranks=1) for name in "ab")
    page = second / "compared-with-a.html"
    assert call("report", first, second) == (0, f"{page}\n")
    assert page.exists()
    chosen = tmp_path / "two.html"
    assert call("report", first, second, "--output", chosen)[0] == 0
    assert chosen.exists()
    code, output = call("report", first, "--output", chosen)
    assert code == 2
    assert "page of two runs" in " ".join(output.split())
    for place in (chosen / "page.html", tmp_path / "nowhere" / "page.html", tmp_path):
        code, output = call("report", first, second, "--output", place)
        assert code == 2
        assert "cannot be written" in " ".join(output.split())


def test_a_run_is_sent_to_a_tracker_or_a_sentence_says_why_not(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'trackers' is not installed")
    start = {"kind": "start", "name": "a", "ranks": 1, "backend": "threads", "device": "cpu"}
    start |= {"version": 1, "time": "", "total_steps": 1, "unit": "", "references": {}}
    step = {"kind": "step", "step": 1, "time_s": 0.5, "loss": 2.0, "tokens_per_s": 8.0}
    lines = (json.dumps(line) + "\n" for line in (start | {"config": {}}, step))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    code, output = call("report", "--to", "tensorboard", tmp_path)
    assert (code, output.strip()) == (0, f"tensorboard: 1 steps of {tmp_path}")
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert not (tmp_path / "report.html").exists()
    code, output = call("report", "--to", "comet", tmp_path)
    assert code == 2
    assert "there is no tracker 'comet'" in " ".join(output.split())


# --- The command line: what it shows of other ranks, what it runs, and what it refuses ---------


SCRIPT = """
import sys
import echelon as ec
with ec.init() as world:
    print("first", world.rank, sys.argv[1:])
    world.group.barrier()
    print("second", world.rank, __name__, flush=True)
    print("error", world.rank, file=sys.stderr)
    print("open", world.rank, end="")
"""


def echelon(*arguments: str, folder: Path, code: int = 0) -> tuple[str, str]:
    """What a command prints to its two streams."""
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", *arguments],
        cwd=folder,
        env=environ(TMPDIR=str(folder)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == code, ended.stderr
    return ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("world", ["processes", "threads"])
def test_tee_shows_the_lines_of_all_ranks_each_with_its_rank(world: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    out, error = echelon(
        "run", "--ranks", "3", "--world", world, "--tee", "train.py", "--lr", folder=tmp_path
    )
    expected = [
        f"[rank {rank}] {text}"
        for rank in range(3)
        for text in (f"first {rank} ['--lr']", f"second {rank} __main__", f"open {rank}")
    ]
    assert sorted(out.splitlines()) == sorted(expected)
    if world == "processes":
        assert sorted(error.splitlines()) == [f"[rank {rank}] error {rank}" for rank in range(3)]
        assert not list(tmp_path.glob("echelon-run-*"))


@pytest.mark.slow
def test_without_tee_the_end_says_how_to_see_what_other_ranks_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    out, error = echelon("run", "--ranks", "2", "train.py", folder=tmp_path)
    assert out == "first 0 []\nsecond 0 __main__\nopen 0"
    last = error.splitlines()[-1]
    assert last.startswith("rank 1 printed, too: --tee shows it, --log-dir DIR keeps it")
    _, error = echelon("run", "--ranks", "2", "--log-dir", "logs", "train.py", folder=tmp_path)
    match = re.search(r"^all output is in (.*)$", error, re.MULTILINE)
    assert match is not None
    [log] = (tmp_path / match[1]).glob("*/attempt_0/1/stdout.log")
    assert log.read_text() == "first 1 []\nsecond 1 __main__\nopen 1"


@pytest.mark.slow
@pytest.mark.parametrize("world", ["processes", "threads"])
def test_a_module_is_run_by_its_name(world: str, tmp_path: Path) -> None:
    package = tmp_path / "jobs"
    (package / "again").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "again" / "__init__.py").touch()
    (package / "words.py").write_text("WORD = 'relative'\n")
    (package / "train.py").write_text(
        "import os, sys\nfrom .words import WORD\nimport echelon as ec\n"
        "with ec.init() as world:\n"
        "    if world.rank == 0:\n"
        "        print(WORD, __name__, __package__, sys.argv[1:], os.path.basename(sys.argv[0]))\n"
    )
    (package / "again" / "__main__.py").write_text("from jobs.train import WORD\nprint(__name__)\n")
    run = ("run", "--ranks", "2", "--world", world, "-m")
    out, _ = echelon(*run, "jobs.train", "--lr", "-m", folder=tmp_path)
    assert out == "relative __main__ jobs ['--lr', '-m'] train.py\n"
    out, _ = echelon(*run, "jobs.again", folder=tmp_path)
    assert "__main__" in out.splitlines()
    _, error = echelon(*run, "jobs.nothing", folder=tmp_path, code=1)
    assert re.search(r"[Nn]o module (named )?'?jobs\.nothing", error)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["processes", "threads"])
def test_a_script_may_be_named_as_an_option_is(world: str, tmp_path: Path) -> None:
    (tmp_path / "-x.py").write_text("import sys\nprint('ran', sys.argv[1:])\n")
    out, _ = echelon("run", "--ranks", "1", "--world", world, "--", "-x.py", "-v", folder=tmp_path)
    assert out == "ran ['-v']\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "'nowhere.py' does not exist"),
        (["."], "'.' is a directory"),
        (["-m", "jobs/train.py"], "'jobs/train.py' is no name of a module"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["run", "--ranks", "2", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"echelon {ec.__version__}\n")
    assert metadata.version("echelon") == ec.__version__


def test_the_end_of_a_run_says_where_its_report_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(world: ec.World) -> None:
        info = ec.observe.RunInfo(total_steps=1)
        with ec.observe.Recorder(world, tmp_path / "run", info) as recorder:
            recorder.step(1, 0.5, num_tokens=1)

    ec.run(main, 2)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"the report of this run is {tmp_path / 'run' / 'report.html'}"
    )
