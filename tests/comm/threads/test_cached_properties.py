"""A rank that waits for others in a cached property does not keep them from reading it."""

from functools import cached_property

import pytest
import torch

import echelon as ec


class Job:
    def __init__(self, world: ec.World) -> None:
        self.world = world
        self.num_reads = 0

    @cached_property
    def total(self) -> float:
        self.num_reads += 1
        value = torch.tensor([self.world.rank + 1.0])
        self.world.group.all_reduce(value)
        return value.item()


def test_ranks_that_wait_for_each_other_in_a_cached_property_all_arrive() -> None:
    def main(world: ec.World) -> tuple[float, float, int]:
        job = Job(world)
        return job.total, job.total, job.num_reads

    before = vars(cached_property)["__get__"]
    results = ec.run(main, 3, timeout=10)
    assert results == [(6.0, 6.0, 1)] * 3
    assert vars(cached_property)["__get__"] is before


def test_a_cached_property_that_cannot_keep_its_value_is_refused_on_ranks_as_elsewhere() -> None:
    class Slotted:
        __slots__ = ()

        @cached_property
        def value(self) -> int:
            return 1

    def main(world: ec.World) -> int:
        assert isinstance(Slotted.value, cached_property)
        return Slotted().value

    with pytest.raises(TypeError, match="No '__dict__' attribute on 'Slotted' instance"):
        ec.run(main, 2)
