"""Another user of the host cannot become a rank, run anything or read anything of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.children import environ
from tests.cli.jobs import ECHELON_RUN
from tests.cli.jobs import Job as Started
from tests.own_network import own_network
from tests.processes import free_port, wait_until
from tests.regressions.stranger import KNOCKS, SHARED

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)

SCRIPT = """
import json, os, pathlib, socket, sys, time
import torch
import echelon as ec
from echelon.process.listeners import listeners
from torch._C import _distributed_c10d as c10d

backend, folder = sys.argv[1], pathlib.Path(sys.argv[2])
rank = int(os.environ["RANK"])
late = len(sys.argv) > 3 and rank == int(sys.argv[3])
knocked = pathlib.Path(sys.argv[4]) if len(sys.argv) > 4 else None
create, devices, trials = c10d.ProcessGroupGloo.create_device, [], []


def create_knocked(**options):
    # gloo listens from here on, and no rank knows where yet: so a stranger is surely first.
    trials.append(backend)
    if len(trials) > 1:
        # On a busy host he would win all three races now and then, which ends a job by name.
        (knocked / "enough").touch()
        return create(**options)
    while True:
        before = listeners()
        devices.append(create(**options))  # kept, so that none gets the port of another
        (port,) = {found.port for found in listeners() - before}
        # Of two ranks, gloo lets the one connect whose port, as it is sent, is the higher number.
        if (socket.htons(port) >= 1 << 15) == late:
            break
    while not (knocked / f"knocked-{port}").exists():
        time.sleep(0.005)
    return devices[-1]


if knocked is not None:
    del os.environ["GLOO_SOCKET_IFNAME"]  # with it, torch would make the devices, unseen
    c10d.ProcessGroupGloo.create_device = staticmethod(create_knocked)
if late and backend == "bare":  # it looks when the stranger has written, however busy the host is
    while not (pathlib.Path((folder / "his").read_text()) / "reached").exists():
        time.sleep(0.01)
world = ec.init("gloo" if backend == "bare" else backend)
(folder / f"trials-{rank}").write_text(str(len(trials)))
torch.manual_seed(rank)
model = ec.DDP(torch.nn.Linear(3, 1), world.group)
with torch.no_grad():
    model.module.weight.fill_(1.0)
model(torch.full((2, 3), world.rank + 1.0)).sum().backward()
found = {
    "grad": model.module.weight.grad.tolist(),
    "objects": world.group.all_gather_object({"rank": world.rank}),
    "part": world.group.subgroup([0, 1]).all_gather_object(world.rank),
}
if (folder / "his").exists():  # the job lasts until the stranger has found it
    reached = pathlib.Path((folder / "his").read_text()) / "reached"
    end = time.monotonic() + 30
    while not reached.exists() and time.monotonic() < end:
        time.sleep(0.01)
(folder / f"result-{rank}").write_text(json.dumps(found))
"""
RIGHT = {"grad": [[3.0, 3.0, 3.0]], "objects": [{"rank": 0}, {"rank": 1}], "part": [0, 1]}


@contextmanager
def stranger(*how: str) -> Iterator[str]:
    """Another user who attacks; his folder.

    Afterwards nothing of his has run, and he holds nothing.
    """
    # He attacks whatever listens, so he gets a network without the ports of other tests.
    with own_network(), tempfile.TemporaryDirectory(prefix="echelon-stranger-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        attack = subprocess.Popen(
            [sys.executable, "-m", "tests.regressions.stranger", name, *how],
            env=environ(),
            stderr=subprocess.DEVNULL,  # torch tells of each connection that ends
            text=True,
        )
        try:
            wait_until((folder / "ready").exists, attack)
            assert Path(f"/proc/{attack.pid}").stat().st_uid == 65534
            yield name
            assert attack.poll() is None, "the attack has ended before the job"
        finally:
            attack.kill()
            attack.wait(20)
            for file in SHARED:
                Path("/dev/shm", file).unlink(missing_ok=True)
        assert how[0] in KNOCKS or (folder / "reached").exists(), "the attack has found nothing"
        assert not (folder / "ran").exists(), "what a stranger sent has run"
        assert not (folder / "spoils").exists(), (folder / "spoils").read_text()


@contextmanager
def lasting_until_reached(folder: Path, his: str) -> Iterator[None]:
    """Let the script in ``folder`` go on until the stranger has reached what he attacks."""
    (folder / "his").write_text(his)
    yield


def results(folder: Path) -> list[object]:
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(2)]


@needs_root
@pytest.mark.slow
def test_a_stranger_who_rewrites_all_stores_changes_nothing(tmp_path: Path) -> None:
    check_a_rewritten_store("gloo", tmp_path)


def check_a_rewritten_store(backend: str, tmp_path: Path) -> None:
    with (
        stranger("store") as his,
        lasting_until_reached(tmp_path, his),
        Started(tmp_path, SCRIPT, backend, str(tmp_path)) as job,
    ):
        code, output, errors = job.end()
    assert (code, output, errors) == (0, "", [])
    assert results(tmp_path) == [RIGHT, RIGHT]


@needs_root
@pytest.mark.slow
def test_a_stranger_who_connects_before_a_rank_loses_the_connection_and_the_job_goes_on(
    tmp_path: Path,
) -> None:
    check_a_first_connection("connect", 1, tmp_path)


def check_a_first_connection(how: str, late: int, tmp_path: Path) -> None:
    """Ranks of which ``late`` connects to the other one, where a stranger has been before."""
    with (
        stranger(how) as his,
        Started(
            tmp_path, SCRIPT, "gloo", str(tmp_path), str(late), his, options=("--timeout", "4")
        ) as job,
    ):
        code, output, errors = job.end()
    assert (code, output, errors) == (0, "", [])
    assert results(tmp_path) == [RIGHT, RIGHT]
    assert int((tmp_path / "trials-0").read_text()) > 1, "the stranger was not first"


def bare_ranks(folder: Path, port: int, his: str, **variables: str) -> list[subprocess.Popen[str]]:
    """Two ranks that no launcher of ours has started: they meet in a TCP store of torch.

    Rank 1 begins when the stranger, whose folder is ``his``, has reached that store.
    """
    (folder / "job.py").write_text(SCRIPT)
    (folder / "his").write_text(his)
    return [
        subprocess.Popen(
            [sys.executable, str(folder / "job.py"), "bare", str(folder), "1"],
            env=environ(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                ECHELON_TIMEOUT="60",
                **variables,
            ),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def ends(ranks: list[subprocess.Popen[str]], *which: int) -> list[str]:
    """What these ranks wrote on standard error, once they have ended; the others are killed."""
    try:
        return [ranks[rank].communicate(timeout=90)[1] for rank in which]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@needs_root
@pytest.mark.slow
def test_memory_that_a_stranger_offers_as_the_store_is_refused_by_its_owner(
    tmp_path: Path,
) -> None:
    port = free_port()
    with stranger("path", str(port)) as his:
        (error,) = ends(bare_ranks(tmp_path, port, his), 1)
    assert "is memory of user 65534, and this process of user 0" in error
    assert "WorldError" in error


TAKES_OVER = """
import json, os, pathlib, sys
import torch.distributed as dist
import echelon as ec
from echelon.comm.torch_dist import from_process_group

dist.init_process_group("gloo")
groups = [from_process_group(group) for group in (dist.group.WORLD, dist.new_group([0, 1]))]
groups.append(ec.init("gloo").group)
found = [group.all_gather_object(group.rank) for group in groups]
(pathlib.Path(sys.argv[1]) / f"result-{os.environ['RANK']}").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_a_process_group_of_the_script_is_taken_over_twice_and_proved_each_time(
    tmp_path: Path,
) -> None:
    launcher = ("env", "ECHELON_OWN_BACKENDS=1", *ECHELON_RUN)
    with Started(tmp_path, TAKES_OVER, str(tmp_path), launcher=launcher) as job:
        code, _, errors = job.end()
    assert (code, errors) == (0, [])
    assert results(tmp_path) == [[[0, 1]] * 3] * 2
