"""What collectives under way keep, and how they end when their rank fails."""

import threading
import time
from pathlib import Path

import pytest
import torch

import echelon as ec


def drops_its_window(world: ec.World) -> float:
    window = world.group.window(1 << 20)
    window.local.fill_(1.0)
    local = window.local
    if world.rank == 1:
        time.sleep(0.3)
    work = world.group.all_reduce(local, async_op=True)
    time.sleep(0.1)  # it is under way on rank 0
    del window
    assert work is not None
    work.wait()
    return float(local[0])


def fails_with_a_call_under_way(world: ec.World, path: Path) -> None:
    total = torch.ones(4)
    if world.rank == 0:
        work = world.group.all_reduce(total, async_op=True)
        assert work is not None

        def wait() -> None:
            try:
                work.wait()
            except ec.EchelonError as error:
                path.write_text(str(error))

        threading.Thread(target=wait).start()
        time.sleep(0.3)
        raise ValueError("boom")
    time.sleep(1.5)
    world.group.all_reduce(total)


def test_a_collective_keeps_a_dropped_window_and_blames_no_living_rank(tmp_path: Path) -> None:
    assert ec.run(drops_its_window, 2, "processes", timeout=30) == [2.0, 2.0]
    with pytest.raises(ValueError, match="boom"):
        ec.run(fails_with_a_call_under_way, 2, "processes", args=(tmp_path / "error",), timeout=30)
    assert (tmp_path / "error").read_text().startswith("rank 0 raised ValueError: boom")
