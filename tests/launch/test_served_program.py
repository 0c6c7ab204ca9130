"""A process of ``echelon run`` is the user's program, as if Python had been started with it."""

import contextlib
import socket
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


OWN_PORTS = """
import os, socket, sys, time
import torch, torch.distributed as dist
import torch.multiprocessing as mp

def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]

def add(rank, size, port, method):
    if method is None:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print(total.item(), flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        mp.spawn(add, args=(2, free_port(), None), nprocs=2)
    elif sys.argv[1] == "late":
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[2])
        if rank == 0:
            time.sleep(60)
        dist.init_process_group("gloo")
    else:
        add(rank, size, sys.argv[1], None)
        add(rank, size, sys.argv[2], f"tcp://127.0.0.1:{sys.argv[2]}")
"""


def run_echelon(script: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echelon", "run", "--world", "processes", "--tee"]
    command += ["--timeout", "5", "--ranks", str(ranks), str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def ports(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [str(server.getsockname()[1]) for server in servers]


@pytest.mark.slow
def test_ranks_meet_at_a_port_of_their_own_and_so_do_processes_that_a_rank_starts(
    tmp_path: Path,
) -> None:
    script = tmp_path / "own_ports.py"
    script.write_text(OWN_PORTS)
    done = run_echelon(script, 2, *ports(2))
    assert done.stdout.count("3.0") == 4, done.stderr
    assert run_echelon(script, 1).stdout.count("3.0") == 2


@pytest.mark.slow
def test_a_rank_that_does_not_serve_its_port_is_named_in_time(tmp_path: Path) -> None:
    script = tmp_path / "own_ports.py"
    script.write_text(OWN_PORTS)
    done = run_echelon(script, 2, "late", *ports(1))
    first = next(line for line in done.stderr.splitlines() if line.startswith("rank"))
    assert first.startswith("rank 0 before init_process_group did not come; rank 1 waited 5.0"), (
        done.stderr
    )
