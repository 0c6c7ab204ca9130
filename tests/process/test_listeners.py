"""What a process says about the sockets on which it listens."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from echelon.comm.torch_dist import open_store
from echelon.process.environment import JobEnvironment
from echelon.process.listeners import announced, listeners
from tests.children import environ
from tests.cli.sockets import refuses
from tests.listeners import listeners_of
from tests.processes import free_port

TWO_HOSTS = JobEnvironment(launcher="slurm", rank=0, size=2, local_rank=0, local_size=1)


def server(host: str, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    return socket.create_server(
        (host, 0), family=family, dualstack_ipv6=family is socket.AF_INET6 and host == ""
    )


@pytest.mark.parametrize(
    ("host", "family", "place", "loopback"),
    [
        ("127.0.0.1", socket.AF_INET, "127.0.0.1", True),
        ("127.0.0.3", socket.AF_INET, "127.0.0.3", True),
        ("", socket.AF_INET, "0.0.0.0", False),
        ("::1", socket.AF_INET6, "[::1]", True),
        ("", socket.AF_INET6, "[::]", False),
    ],
)
def test_a_listener_is_found_where_it_is_bound_and_gone_when_it_is_closed(
    host: str, family: socket.AddressFamily, place: str, loopback: bool
) -> None:
    before = listeners()
    with server(host, family) as one:
        port = one.getsockname()[1]
        (found,) = listeners() - before
        assert found in listeners_of(os.getpid())
        assert str(found) == f"{place}:{port}"
        assert found.address.is_loopback is loopback
        # What listens on every interface answers on this one, too.
        assert refuses("127.0.0.2", port) is loopback
    assert listeners() == before


def test_the_listeners_of_another_process_are_found_and_no_others() -> None:
    code = """
import socket
with socket.create_server(("127.0.0.1", 0)) as one:
    print(one.getsockname()[1], flush=True)
    input()
"""
    with (
        server("127.0.0.1"),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert [one.port for one in listeners_of(other.pid)] == [port]
        assert port not in [one.port for one in listeners()]
        other.communicate("\n")
    assert listeners_of(other.pid) == set()


@pytest.mark.parametrize(
    ("host", "one_host", "line"),
    [
        ("127.0.0.1", True, ""),
        (
            "127.0.0.1",
            False,
            "echelon: rank 3: the store listens on 127.0.0.1:{port}: warning: the other hosts of "
            "the job cannot reach it\n",
        ),
        (
            "",
            True,
            "echelon: rank 3: the store listens on 0.0.0.0:{port}: warning: that is every "
            "interface of this host, and nobody is asked for a password; let a firewall admit the "
            "hosts of the job alone\n",
        ),
    ],
)
def test_what_other_hosts_can_reach_is_said_and_on_several_hosts_everything(
    host: str, one_host: bool, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with announced(3, "the store", one_host=one_host):
        one = server(host)
    with one:
        assert capfd.readouterr() == ("", line.format(port=one.getsockname()[1]))


def test_a_store_on_an_address_of_no_interface_listens_on_all_and_warns(
    capfd: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    # As behind a translation of addresses: other hosts use one that this host does not have.
    env = replace(TWO_HOSTS, master_addr="203.0.113.7", master_port=port)
    store = open_store(env, 10.0)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert f"rank 0: the store listens on 0.0.0.0:{port}: warning: " in capfd.readouterr().err


@pytest.mark.slow
def test_ranks_on_several_hosts_say_each_address_in_a_line() -> None:
    script = """
import echelon as ec, torch
with ec.init("gloo", timeout=60) as world:
    world.group.subgroup([0, 1]).all_reduce(torch.ones(1))
"""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environ(**common, RANK=str(rank), GLOO_SOCKET_IFNAME="lo"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        said = rf"^echelon: rank {rank}: (.*) listens on 127\.0\.0\.1:\d+: warning: .*$"
        whats = [what.partition(" for ")[0] for what in re.findall(said, errors, re.M)]
        assert whats == ["the store"] * (rank == 0) + ["gloo", "gloo"], errors
        assert len(errors.splitlines()) == len(whats)
