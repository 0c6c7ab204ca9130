"""Two hosts, made of this one: two network namespaces joined by a cable (a veth pair).

Each has its own interfaces, so what works only on one host does not work here; and the cable can
be cut, which leaves connections open on which nothing ever arrives.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.children import environ
from tests.comm import two_hosts_job

ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Why this machine cannot make network namespaces; None if it can."""
    if shutil.which("ip") is None:
        return "there is no ip command (Debian: apt-get install iproute2)"
    name = f"ec{os.getpid()}t"
    for words in (["netns", "add", name], ["netns", "del", name]):
        made = subprocess.run(["ip", *words], capture_output=True, text=True)
        if made.returncode != 0:
            return f"network namespaces cannot be made here: {made.stderr.strip()}"
    return None


class TwoHosts:
    """Two namespaces with one address each, and the cable between them."""

    def __init__(self) -> None:
        self.names = [f"ec{os.getpid()}a", f"ec{os.getpid()}b"]
        self.cables = [f"{name}v" for name in self.names]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def connect(self) -> None:
        """Make the namespaces and plug the cable in."""
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ends = (self.cables[0], "netns", self.names[0], "type", "veth", "peer", "name")
        ip("link", "add", *ends, self.cables[1], "netns", self.names[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")

    def cut(self) -> None:
        """Take the cable out at one end; the other end then has no carrier either."""
        ip("-n", self.names[0], "link", "set", self.cables[0], "down")

    def remove(self) -> None:
        """Delete what was made; the cable goes with its namespaces."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def torchrun(self, host: int, script: Path, *args: str) -> subprocess.Popen[bytes]:
        """Start torchrun's agent on one host, in a session of its own."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
        torchrun += ["--nnodes", "2", "--node-rank", str(host), "--max-restarts", "0"]
        torchrun += ["--master-addr", self.addresses[0], "--master-port", "29417"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *torchrun, str(script), *args],
            env=environ(
                GLOO_SOCKET_IFNAME=self.cables[host],
                OMP_NUM_THREADS="1",
                PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            ),
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    two = TwoHosts()
    try:
        two.connect()
        yield two
    finally:
        two.remove()


def facts(folder: Path, kind: str, agents: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    """What both ranks wrote; fails with the output of an agent that ended before."""
    files = [folder / f"{kind}-{rank}.json" for rank in range(2)]
    end = time.monotonic() + END_S
    while not all(file.exists() and file.read_text().endswith("}") for file in files):
        for agent in agents:
            if agent.poll() is not None and not all(file.exists() for file in files):
                output = agent.communicate()[0].decode(errors="replace")
                pytest.fail(f"an agent ended with {agent.returncode}:\n{output[-4000:]}")
        assert time.monotonic() < end, f"no {kind} after {END_S} s"
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


def stop(agent: subprocess.Popen[bytes]) -> str:
    """End an agent, which ends its ranks; then whatever of its session is left. What they said."""
    agent.terminate()
    with suppress(subprocess.TimeoutExpired):  # it waits for the other host, out of its reach
        agent.wait(timeout=2.0)
    with suppress(ProcessLookupError):  # nothing was left
        os.killpg(agent.pid, signal.SIGKILL)
    return agent.communicate()[0].decode(errors="replace")


@pytest.mark.hosts
@pytest.mark.slow
def test_two_hosts_train_as_one_process_does_and_name_each_other_when_the_link_is_cut(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    script = Path(two_hosts_job.__file__)
    agents = [hosts.torchrun(host, script, str(tmp_path)) for host in range(2)]
    said: list[str] = []
    try:
        trained = facts(tmp_path, "trained", agents)
        alone = two_hosts_job.train(two_hosts_job.model(), [0, 1])
        for rank, found in enumerate(trained):
            assert (found["backend"], found["rank"]) == ("gloo", rank)
            for mine, expected in zip(found["trained"], alone, strict=True):
                # Two halves of a batch are summed in another order than the whole.
                torch.testing.assert_close(
                    torch.tensor(mine, dtype=torch.float64),
                    torch.tensor(expected, dtype=torch.float64),
                    rtol=1e-12,
                    atol=1e-13,
                )
        assert trained[0]["trained"] == trained[1]["trained"]
        hosts.cut()
        for rank, found in enumerate(facts(tmp_path, "cut", agents)):
            assert found["type"] == "CommTimeout", found["text"]
            assert "all_reduce(sum) float32[100] of 'after the cut'" in found["text"]
            assert found["text"].endswith(f"s for rank {1 - rank} in vain")
            assert found["seconds"] < two_hosts_job.TIMEOUT_S + 8.0
    finally:
        said += [stop(agent) for agent in agents]
    for rank, (text, address) in enumerate(zip(said, hosts.addresses, strict=True)):
        assert f"echelon: rank {rank}: gloo for group 'world' listens on {address}:" in text


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])  # the first host has the store
def test_when_the_agent_of_one_host_is_killed_the_rank_of_the_other_host_names_its_rank(
    killed: int, hosts: TwoHosts, tmp_path: Path
) -> None:
    script = Path(two_hosts_job.__file__)
    agents = [hosts.torchrun(host, script, str(tmp_path)) for host in range(2)]
    try:
        facts(tmp_path, "trained", agents)
        agent = agents[killed].pid  # "ip netns exec" becomes the agent
        os.kill(agent, signal.SIGKILL)
        start_s = time.monotonic()
        told = tmp_path / f"cut-{1 - killed}.json"
        while not (told.exists() and told.read_text().endswith("}")):
            assert time.monotonic() - start_s < two_hosts_job.TIMEOUT_S + 10.0
            time.sleep(0.05)
        found = json.loads(told.read_text())
        assert found["type"] == "RankFailed", found["text"]
        assert found["text"].startswith(f"rank {killed} ")
    finally:
        said = [stop(agent) for agent in agents]
    assert f"the agent of torchrun on the host of rank {killed} (process {agent})" in said[killed]
