import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import echelon as ec
from echelon.launch.program import Program
from echelon.launch.simulated_job import run_threads
from tests.children import environ

PRELUDE = """
import sys
import torch
import echelon as ec
seen = globals().setdefault("seen", [])
"""


class Done(NamedTuple):
    """How a run ended, and what it printed."""

    code: int
    output: list[str]
    errors: list[str]


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What ``echelon run --ranks 3 --world threads train.py --lr 3`` does, in this process."""

    def run(body: str, timeout: float | None = None) -> Done:
        script = tmp_path / "train.py"
        script.write_text(PRELUDE + body)
        monkeypatch.setattr(sys, "argv", ["echelon"])
        monkeypatch.setattr(sys, "path", list(sys.path))
        code = run_threads(Program(str(script)), ["--lr", "3"], 3, timeout)
        printed = capsys.readouterr()
        return Done(code, printed.out.splitlines(), printed.err.splitlines())

    return run


def test_every_rank_runs_the_script_with_its_own_names_and_its_lines_stay_whole(
    tmp_path: Path, run: Run
) -> None:
    (tmp_path / "beside_the_script.py").write_text("NAME = 'beside'\n")
    body = """
import beside_the_script as beside
if __name__ == "__main__":
    with ec.init() as world:
        seen.append(world.rank)
        total = torch.tensor([world.rank + 1])
        world.group.all_reduce(total)
        for _ in range(50):
            print("rank", world.rank, "sum", total.item(), seen, sys.argv[1:], beside.NAME)
"""
    done = run(body)
    assert (done.code, done.errors) == (0, [])
    assert Counter(done.output) == {
        f"rank {rank} sum 6 [{rank}] ['--lr', '3'] beside": 50 for rank in range(3)
    }


def test_every_rank_has_code_of_its_own_by_which_torch_compile_keeps_what_it_compiled(
    run: Run,
) -> None:
    body = """
def outer():
    return lambda: 0

print(id(outer.__code__), id(outer().__code__))
ec.init().group.barrier()
"""
    done = run(body)
    assert done.code == 0
    assert len({number for line in done.output for number in line.split()}) == 6


def test_the_first_line_of_a_failure_names_the_rank_and_the_cause(tmp_path: Path, run: Run) -> None:
    body = """
with ec.init() as world:
    if world.rank == 1:
        raise ValueError("boom")
    world.group.barrier()
"""
    done = run(body)
    assert done.code == 1
    assert done.errors[0] == "rank 1 at step 0 raised ValueError: boom"
    assert done.errors[1] == f"  at {tmp_path / 'train.py'}:9 in <module>"
    assert len(done.errors) <= 25


@pytest.mark.slow
def test_ranks_wait_for_one_another_as_long_as_the_timeout_says(run: Run) -> None:
    body = """
import time
with ec.init() as world:
    if world.rank == 1:
        time.sleep(2)
    world.group.barrier()
"""
    done = run(body, timeout=0.25)
    assert done.code == 1
    assert "waited 0.2 s for it" in done.errors[0]


def test_a_script_that_is_no_python_is_a_short_message(run: Run) -> None:
    done = run("this is no python")
    assert done.code == 1
    assert done.errors[0].startswith("rank 0 raised SyntaxError: ")


@pytest.mark.parametrize(("end", "code"), [("3", 3), ("", 0), ("'no'", 1)])
def test_the_exit_code_of_a_script_is_kept(end: str, code: int, run: Run) -> None:
    done = run(f"sys.exit({end})")
    assert (done.code, done.errors) == (code, ["no"] if code == 1 else [])


@pytest.mark.parametrize(
    ("end", "code", "errors"),
    [
        ("3", 3, ["rank 1 at step 0 exited with code 3"]),
        (
            "'no data'",
            1,
            [
                "rank 1 at step 0 exited with code 1",
                "  its last call: barrier (#0 of group 'world')",
                "  the end of its standard error:",
                "  no data",
            ],
        ),
        ("75", 1, ["rank 1 at step 0 exited with code 75"]),
        ("256", 1, ["deadlock: no rank can go on"]),
    ],
)
def test_an_exit_of_one_rank_that_others_wait_for_is_named_and_the_run_has_failed(
    end: str, code: int, errors: list[str], run: Run
) -> None:
    body = f"""
world = ec.init()
world.group.barrier()
if world.rank == 1:
    sys.exit({end})
world.group.barrier()
print("saved")
"""
    done = run(body)
    assert (done.code, done.output) == (code, [])
    shown = [line.partition(" at /")[0] for line in done.errors]
    assert shown[: len(errors)] == errors


def test_an_exit_with_code_0_out_of_a_world_that_others_need_is_a_failure(run: Run) -> None:
    body = """
with ec.init() as world:
    if world.rank == 1:
        sys.exit(0)
    world.group.barrier()
"""
    done = run(body)
    assert done.code == 1
    assert done.errors[0] == "rank 1 at step 0 exited with code 0 while others were waiting"


def test_an_exit_of_one_rank_fails_the_run_though_nobody_waits_for_it(run: Run) -> None:
    done = run("sys.exit(4 * (ec.init().rank == 1))")
    assert (done.code, done.errors[0]) == (4, "rank 1 at step 0 exited with code 4")


@pytest.mark.parametrize("last", ["", "world.group.barrier()\n"])
def test_an_interrupt_that_a_script_raises_itself_is_a_failure_of_its_rank(
    last: str, tmp_path: Path, run: Run
) -> None:
    body = f"""
world = ec.init()
if world.rank == 1:
    raise KeyboardInterrupt
{last}"""
    done = run(body)
    assert done.code == 1
    assert done.errors[:2] == [
        "rank 1 at step 0 raised KeyboardInterrupt",
        f"  at {tmp_path / 'train.py'}:9 in <module>",
    ]


CLOSES = "sys.stdout.close(); sys.stderr.close()"
LEAVES_OUT = "sys.stdout = sys.stderr = None"


@pytest.mark.slow
@pytest.mark.parametrize("world", ["threads", "processes"])
@pytest.mark.parametrize("silence", [CLOSES, LEAVES_OUT])
def test_a_rank_that_has_silenced_itself_is_named_on_the_real_standard_error(
    world: str, silence: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    body = "import sys, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    body += f"{silence}\nif dist.get_rank() == 1:\n    raise ValueError('boom')\ndist.barrier()\n"
    script.write_text(body)
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "run", "-n", "2", "--world", world, str(script)],
        capture_output=True,
        text=True,
        env=environ(),
    )
    assert done.returncode == 1
    [_, first, *others] = done.stderr.splitlines()  # before it, what serves the group
    assert first == "rank 1 at step 0 raised ValueError: boom"
    assert not any("sys.excepthook" in line or "lost sys.stderr" in line for line in others)


def test_ctrl_c_ends_the_run(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    # On a very busy machine a rank may still sleep when the run gives up on it.
    monkeypatch.setattr(os, "_exit", lambda code: None)
    body = """
import os, signal, time
with ec.init() as world:
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGINT)
    else:
        time.sleep(0.3)
    world.group.barrier()
"""
    done = run(body)
    assert (done.code, done.errors) == (130, ["interrupted"])


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 0.0])
def test_a_rank_that_held_up_the_others_is_named_at_the_end_and_otherwise_none(
    seconds: float, run: Run
) -> None:
    body = f"""
import time
world = ec.init()
for _ in range(7):
    x = torch.ones(1, requires_grad=True)
    if world.rank == 1 and {seconds}:
        x.register_hook(lambda grad: time.sleep({seconds}))
    (2 * x).backward()
    world.group.all_reduce(x.grad)
    world.step += 1
"""
    done = run(body)
    assert (done.code, done.output) == (0, [])
    assert len(done.errors) == (seconds > 0)
    assert all(line.startswith("rank 1 cost 1") for line in done.errors)
    assert all("ms a step, in backward" in line for line in done.errors)


def test_the_ranks_may_be_run_by_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import echelon as ec\nec.init().group.barrier()\nprint('past')\n")
    monkeypatch.setattr(sys, "argv", ["echelon"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    calls = []

    def run_ranks(fn: Callable[..., Any], ranks: int, **options: Any) -> None:
        for call in ec.step_through(fn, ranks, **options):
            calls.append((call.op, str(call.places[1]).partition(":")[2]))

    assert run_threads(Program(str(script)), [], 2, 5, run_ranks=run_ranks) == 0
    assert calls == [("barrier", "2 in <module>")]
    assert capsys.readouterr().out.splitlines() == ["past"] * 2


def test_the_timeout_of_the_run_is_that_of_groups_of_torch(run: Run) -> None:
    body = """
import torch.distributed as dist
dist.init_process_group("gloo")
print(dist.group.WORLD._group.timeout)
"""
    assert run(body, 7.5).output == ["7.5"] * 3
    assert run(body).output == ["1800.0"] * 3
    assert "ECHELON_TIMEOUT" not in os.environ


def test_what_a_rank_raises_is_printed_so_that_a_terminal_obeys_nothing(run: Run) -> None:
    body = "ec.init()\nraise ValueError('\\x1b]0;OWNED\\x07')\n"
    done = run(body)
    assert done.code == 1
    assert done.errors[0].endswith(r"raised ValueError: \x1b]0;OWNED\x07")
    assert "\x1b" not in "".join(done.errors)
