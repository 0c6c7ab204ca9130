"""Failures reach all simulated ranks, of which there may be hundreds."""

import time
import weakref

import pytest
import torch

import echelon as ec
from echelon.errors import RankFailed
from tests.comm.threads.test_thread_world import one


def test_a_failure_in_the_work_of_the_last_rank_reaches_all(monkeypatch) -> None:
    def broken(*args: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("echelon.comm.threads.group.reduce_into", broken)
    seen: list[str] = []

    def main(world: ec.World) -> None:
        try:
            world.group.all_reduce(one())
        except MemoryError as error:
            seen.append(str(error))

    ec.run(main, 3)
    assert seen == ["no more"] * 3


def test_a_failure_frees_ranks_that_wait_and_names_the_call_they_were_in() -> None:
    seen: list[RankFailed] = []

    def main(world: ec.World) -> None:
        if world.rank == 2:
            raise KeyError("lost")
        try:
            world.group.all_reduce(one(), label="gradients")
        except RankFailed as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="lost") as info:
        ec.run(main, 4)
    assert info.value.__notes__ == ["raised on rank 2 of 4"]
    assert len(seen) == 3
    for error in seen:
        assert error.failed_rank == 2
        assert "raised KeyError: 'lost'" in str(error)
        assert "all_reduce(sum) float32[1] of 'gradients' (#0 of group 'world')" in str(error)
        assert isinstance(error.__cause__, KeyError)


def test_64_ranks_start_reduce_a_mebibyte_and_stop() -> None:
    def main(world: ec.World) -> float:
        gradients = torch.full((2**18,), float(world.rank))
        world.group.all_reduce(gradients)
        return gradients[-1].item()

    start_s = time.perf_counter()
    assert ec.run(main, 64) == [float(sum(range(64)))] * 64
    assert time.perf_counter() - start_s < 10.0  # the benchmark has the figure


@pytest.mark.slow
def test_200_ranks_meet() -> None:
    def main(world: ec.World) -> int:
        world.group.barrier()
        group = world.mesh(dp=20, tp=10)["tp"]
        value = torch.tensor([world.rank])
        group.all_reduce(value, "max")
        return int(value)

    assert ec.run(main, 200) == [rank // 10 * 10 + 9 for rank in range(200)]


def test_windows_are_ordinary_memory_that_all_ranks_see() -> None:
    def main(world: ec.World) -> list[float]:
        window = world.group.window(2)
        window.local.fill_(world.rank)
        world.group.barrier()
        return [window.peer(rank)[1].item() for rank in range(world.size)]

    assert ec.run(main, 3) == [[0.0, 1.0, 2.0]] * 3


def test_a_work_does_not_keep_the_tensor_of_the_other_rank() -> None:
    """Or a pipeline of simulated ranks would need more memory than one of processes."""

    def main(world: ec.World) -> bool:
        tensor = torch.zeros(3)
        if world.rank == 0:
            work = world.group.isend(tensor, 1)
            world.group.barrier()
            work.wait()
            return True
        world.group.recv(tensor, 0)
        memory = weakref.ref(tensor.untyped_storage())
        del tensor
        is_free = memory() is None
        world.group.barrier()
        return is_free

    assert ec.run(main, 2) == [True, True]
