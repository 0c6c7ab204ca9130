"""A rank that blocks outside of groups is overtaken, and one that something works for is not."""

from __future__ import annotations

import socket
import subprocess
import sys
import warnings

import pytest

import echelon as ec


@pytest.mark.slow
def test_a_rank_that_blocks_in_c_code_is_overtaken_and_warned() -> None:
    left, right = socket.socketpair()

    def main(world: ec.World) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if world.rank == 0:
                left.recv(1)  # what the other sends later
            else:
                right.send(b"x")
            world.group.barrier()
        return [str(warning.message) for warning in seen]

    with left, right:
        warned, others = ec.run(main, 2)
    assert len(warned) == 1
    assert not others
    assert warned[0].startswith("rank 0 was blocked for 2 s outside of echelon's calls")


@pytest.mark.slow
def test_a_rank_that_waits_for_a_process_that_computes_is_not_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echelon.comm.threads.turns.BLOCKED_S", 0.2)
    computes = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass"

    def main(world: ec.World, order: list[int]) -> None:
        if world.rank == 0:
            subprocess.run([sys.executable, "-S", "-c", computes], check=True)
        order.append(world.rank)
        world.group.barrier()

    order: list[int] = []
    ec.run(main, 2, args=(order,))
    assert order == [0, 1]
