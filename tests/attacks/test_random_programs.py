"""Random programs: any mix of calls, sizes, groups and waits gives what each call alone would."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import echelon as ec
from echelon.comm.work import Work
from tests.comm.checking import same
from tests.comm.dtype_checks import reduced, values
from tests.worlds import run_world

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64)
NUMELS = (0, 1, 7, 1000, 20_000)
Check = Callable[[], None]


class Program:
    """One rank's part of a program that all ranks draw from the same dice."""

    def __init__(self, group: ec.Group, seed: int) -> None:
        self.dice = random.Random(seed)  # the same on every rank
        self.whim = random.Random(seed * 100 + group.rank)  # each rank's own
        self.groups = [group, *self.subgroups(group)]
        self.open: list[tuple[Work, Check]] = []

    def subgroups(self, group: ec.Group) -> list[ec.Group | None]:
        chosen = [
            self.dice.sample(range(group.size), self.dice.randint(1, group.size)) for _ in "ab"
        ]
        return [group.subgroup(ranks) for ranks in chosen]

    def step(self, number: int) -> None:
        """One call in one group, or nothing where this rank is not in it."""
        group = self.groups[self.dice.randrange(3)]
        kind = self.dice.choice(
            ("reduce", "reduce", "gather", "scatter", "broadcast", "swap", "ring")
        )
        dtype, numel = self.dice.choice(DTYPES), self.dice.choice(NUMELS)
        if dtype == torch.float32 and self.dice.random() < 0.3:
            numel = 200_000  # longer than a slot and a ring; slow to check for integers
        in_background, root = self.dice.random() < 0.5, self.dice.randrange(100)
        if group is None:
            return
        work, check = getattr(self, kind)(
            group, dtype, numel, in_background, root % group.size, number
        )
        if work is None:
            check()
        else:
            self.open.append((work, check))
        while self.open and self.whim.random() < 0.3:
            self.finish(self.whim.randrange(len(self.open)))

    def finish(self, index: int) -> None:
        work, check = self.open.pop(index)
        work.wait()
        check()

    def reduce(self, group, dtype, numel, in_background, root, number):
        parts = [values(dtype, number + r, numel) for r in range(group.size)]
        mine = parts[group.rank].clone()
        op = "product" if root % 2 else "sum"
        work = group.all_reduce(mine, op, in_background, label=f"step {number}")
        return work, lambda: same(mine, reduced(parts, op), f"step {number}")

    def gather(self, group, dtype, numel, in_background, root, number):
        parts = [values(dtype, number + r, numel // (r + 1)) for r in range(group.size)]
        outputs = [torch.empty_like(part) for part in parts]
        work = group.all_gather(outputs, parts[group.rank], in_background)
        return work, lambda: same(torch.cat(outputs), torch.cat(parts), f"step {number}")

    def scatter(self, group, dtype, numel, in_background, root, number):
        n = group.size
        parts = [values(dtype, number + r, numel * n) for r in range(n)]
        output = torch.empty(numel, dtype=dtype)
        work = group.reduce_scatter_single(output, parts[group.rank], "sum", in_background)
        lanes = [part[numel * group.rank : numel * (group.rank + 1)] for part in parts]
        return work, lambda: same(output, reduced(lanes, "sum"), f"step {number}")

    def broadcast(self, group, dtype, numel, in_background, root, number):
        mine = values(dtype, number + group.rank, numel)
        work = group.broadcast(mine, root, in_background)
        return work, lambda: same(mine, values(dtype, number + root, numel), f"step {number}")

    def swap(self, group, dtype, numel, in_background, root, number):
        n, r = group.size, group.rank
        ins, outs = (
            [(numel + r) // (s + 1) for s in range(n)],
            [(numel + s) // (r + 1) for s in range(n)],
        )
        parts = [values(dtype, number + 10 * r + s, ins[s]) for s in range(n)]
        output = torch.empty(sum(outs), dtype=dtype)
        work = group.all_to_all_single(output, torch.cat(parts), outs, ins, in_background)
        expected = [values(dtype, number + 10 * s + r, outs[s]) for s in range(n)]
        return work, lambda: same(output, torch.cat(expected), f"step {number}")

    def ring(self, group, dtype, numel, in_background, root, number):
        n, r = group.size, group.rank
        if n == 1:
            return None, lambda: None
        sending = group.isend(values(dtype, number + r, numel), (r + 1) % n, tag=number)
        output = torch.empty(numel, dtype=dtype)
        work = group.irecv(output, (r - 1) % n, tag=number)

        def check() -> None:
            sending.wait()
            same(output, values(dtype, number + (r - 1) % n, numel), f"step {number}")

        return work, check


def run_program(world: ec.World, seeds: tuple[int, ...], num_steps: int) -> None:
    for seed in seeds:
        program = Program(world.group, seed)
        for number in range(num_steps):
            program.step(number)
        while program.open:
            program.finish(program.whim.randrange(len(program.open)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_programs_of_simulated_ranks(ranks: int) -> None:
    run_world("threads", run_program, ranks, ((ranks, ranks + 10), 60))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 5])
def test_programs_of_processes(ranks: int) -> None:
    run_world("processes", run_program, ranks, ((ranks, ranks + 20), 60))
