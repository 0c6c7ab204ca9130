"""A process reads the memory of another one, unless that is forbidden, wrong or gone."""

import os
import subprocess
import sys

import pytest
import torch

import echelon as ec
from echelon.comm.shm import peer_memory
from echelon.comm.shm.peer_memory import PeerMemory
from tests.comm.checking import same

# A process may always read its own memory, so that rank 0 can be read here.
THIS, OTHER = 0, 1


def two_ends() -> tuple[PeerMemory, PeerMemory]:
    """A rank that reads rank 0, and rank 0, both in this process."""
    return PeerMemory((os.getpid(), -1)), PeerMemory((-1, os.getpid()))


def reads_its_peer(world: ec.World) -> list[float]:
    source = torch.arange(100_000.0) + world.rank
    items = world.group.all_gather_object([os.getpid(), source.data_ptr()])
    memory = PeerMemory([-1 if rank == world.rank else pid for rank, (pid, _) in enumerate(items)])
    probes = world.group.all_gather_object(memory.probe_address)
    peer, output = 1 - world.rank, torch.empty(100_000)
    assert memory.can_read(probes)
    assert memory.read(peer, items[peer][1], output)
    world.group.barrier()
    same(output, torch.arange(100_000.0) + peer)
    return output[:2].tolist()


def test_processes_read_the_memory_of_each_other() -> None:
    assert ec.run(reads_its_peer, 2, "processes") == [[1.0, 2.0], [0.0, 1.0]]


def test_only_the_probe_of_a_peer_shows_that_it_can_be_read() -> None:
    reader, owner = two_ends()
    zeros = torch.zeros(8)
    assert reader.can_read([owner.probe_address, 0])
    assert not reader.can_read([zeros.data_ptr(), 0])  # it is memory, but not the probe
    assert not reader.can_read([8, 0])  # no memory is there


def test_where_the_kernel_forbids_it_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, owner = two_ends()
    monkeypatch.setattr(peer_memory, "_read", lambda *arguments: -1)
    assert not reader.can_read([owner.probe_address, 0])
    assert not reader.read(THIS, owner.probe_address, torch.empty(1))


def test_a_long_read_goes_on_where_a_system_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = two_ends()
    whole, source, lengths = peer_memory._read, torch.arange(1000), []

    def read_in_part(pid: int, target: object, _: int, span: object, *rest: int) -> int:
        target.nbytes = span.nbytes = min(span.nbytes, 3000)
        lengths.append(int(whole(pid, target, 1, span, *rest)))
        return lengths[-1]

    monkeypatch.setattr(peer_memory, "_read", read_in_part)
    output = torch.empty_like(source)
    assert reader.read(THIS, source.data_ptr(), output)
    same(output, source)
    assert lengths == [3000, 3000, 2000]


def test_memory_that_is_gone_and_a_process_that_has_ended_are_seen() -> None:
    reader, _ = two_ends()
    assert not reader.read(THIS, 8, torch.empty(10))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not PeerMemory((-1, ended.pid)).read(OTHER, torch.ones(1).data_ptr(), torch.empty(1))
