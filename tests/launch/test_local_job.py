import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.launch import local_job
from echelon.process import time_limits
from tests.children import environ

SCRIPT = """
import os, signal, sys, time
import torch
import echelon as ec

if sys.argv[1] == "absent" and os.environ["RANK"] == "1":
    sys.exit(0)
with ec.init(timeout=3 if sys.argv[1] == "stop" else 60) as world:
    total = torch.tensor([world.rank + 1.0], requires_grad=True)
    total.square().backward()
    world.group.all_reduce(total.grad)
    world.step = 2
    print("rank", world.rank, "of", world.size, "gradient", total.grad.item(), flush=True)
    if world.rank == 1:
        match sys.argv[1]:
            case "raise":
                raise ValueError("boom")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
    if sys.argv[1] == "sleep":
        time.sleep(60)
    world.group.all_reduce(total.grad, label="the last gradient")
"""


SLOW_SCRIPT = """
import sys, time
import torch
import echelon as ec

with ec.init() as world:
    for _ in range(7):
        x = torch.ones(1, requires_grad=True)
        if world.rank == 1 and sys.argv[1] == "slow":
            x.register_hook(lambda grad: time.sleep(0.2))
        (2 * x).backward()
        world.group.all_reduce(x.grad)
        world.step += 1
"""


LATER_WORLD = """
import torch
import torch.distributed as dist
import echelon as ec

dist.init_process_group("gloo")
world = ec.init()
weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight])
for step in range(3):
    weight.square().backward()
    world.group.all_reduce(weight.grad)
    optimizer.step()
raise ValueError("boom")
"""


def start(folder: Path, mode: str, text: str = SCRIPT) -> subprocess.Popen[str]:
    """``echelon run`` of the script on two ranks, as a user starts it in a pipe."""
    script = folder / "train.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, "-m", "echelon", "run", "--ranks", "2", str(script), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ(TMPDIR=str(folder)),  # where it keeps its logs
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cause", "code"),
    [
        ("raise", "rank 1 at step 2 raised ValueError: boom", 1),
        ("kill", "rank 1 at step 2 was killed by SIGKILL", 1),
    ],
)
def test_the_first_line_of_a_failure_names_the_rank_the_step_and_the_cause(
    mode: str, cause: str, code: int, tmp_path: Path
) -> None:
    process = start(tmp_path, mode)
    output, errors = process.communicate(timeout=90)
    lines = errors.splitlines()
    assert process.returncode == code
    assert lines[0] == cause
    # The other rank was given the time to say what it needed the failed one for.
    waited = "while this rank was in all_reduce(sum) float32[1] of 'the last gradient' (#1 of group"
    then = "then rank 0 at step 2 raised RankFailed: rank 1 "
    assert [line for line in lines if line.startswith(then)]
    assert waited in errors
    assert len(lines) <= 25
    assert output == "rank 0 of 2 gradient 6.0\n"
    logs = Path(lines[-1].removeprefix("all output is in "))
    assert {path.parent.name for path in logs.rglob("stderr.log")} == {"0", "1"}


@pytest.mark.slow
def test_a_failure_of_a_program_with_a_default_group_has_the_step_of_its_world_and_is_told_once(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, "", LATER_WORLD)
    _, errors = process.communicate(timeout=90)
    told = [line for line in errors.splitlines() if "boom" in line and "raise" in line]
    assert re.fullmatch(r"rank \d at step 3 raised ValueError: boom", told[0]), errors
    assert "Traceback" not in errors
    steps = re.findall(r"rank \d (at step \d)", errors)
    assert set(steps) == {"at step 3"}, errors


@pytest.mark.slow
def test_a_rank_that_leaves_before_its_world_is_named_and_nobody_waits_for_it(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, "absent")
    _, errors = process.communicate(timeout=55)  # the ranks themselves would wait for 60 s
    assert process.returncode == 1
    lines = errors.splitlines()
    assert lines[0] == "rank 1 before echelon.init() exited with code 0 while others were waiting"
    assert any("then rank 0 in echelon.init() raised RankFailed: rank 1 ended" in n for n in lines)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_and_ended(tmp_path: Path) -> None:
    process = start(tmp_path, "stop")
    assert process.stdout is not None
    process.stdout.readline()  # rank 1 is stopped, or about to be
    start_s = time.monotonic()
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    lines = errors.splitlines()
    assert lines[0] == (
        "rank 1 at step 2 is stopped by SIGSTOP or a debugger; rank 0 waited 3.0 s for it"
    )
    assert lines[1].startswith(
        "  its last call: all_reduce(sum) float32[1] (#0 of group 'world 0')"
    )
    assert "a process that is stopped cannot tell it" in lines[2]
    assert "  rank 0 waited in all_reduce(sum) float32[1] of 'the last gradient' (#1 of" in lines[3]
    assert len(lines) <= 25
    assert time.monotonic() - start_s < 25  # torchrun alone would wait 30 s after the timeout
    (stacks,) = tmp_path.glob("echelon-run-*/*/attempt_0/0/error-stacks.txt")
    assert re.search(r"train.py:\d+ in <module>", stacks.read_text())  # of rank 0


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep")
    assert process.stdout is not None
    process.stdout.readline()  # both ranks are in their sleep now, or about to be
    start_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start_s < 20
    assert process.returncode == 128 + signal.SIGINT
    assert errors.splitlines()[-1] == "SIGINT: all ranks have ended"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
def test_a_rank_that_held_up_the_others_is_named_at_the_end_and_otherwise_none(
    tmp_path: Path,
) -> None:
    _, errors = start(tmp_path, "slow", SLOW_SCRIPT).communicate(timeout=90)
    (line,) = errors.splitlines()
    match = re.fullmatch(r"rank 1 cost (\d+) ms a step, in backward \(a step took \d+ ms\)", line)
    assert match is not None
    assert 150 < int(match[1]) < 400
    _, errors = start(tmp_path, "usual", SLOW_SCRIPT).communicate(timeout=90)
    assert errors == ""


def test_an_agent_that_does_not_end_when_it_is_told_to_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_limits, "KILL_S", 0.5)
    deaf = ["sh", "-c", "trap '' TERM; echo deaf; exec sleep 300"]
    with subprocess.Popen(deaf, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"deaf\n"
        with pytest.raises(BrokenPipeError), local_job._passing_on(agent, 0.1):
            raise BrokenPipeError
        assert agent.returncode == -signal.SIGKILL
