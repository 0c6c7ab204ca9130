"""A function of torch.nn that a simulated rank replaces is its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

import echelon as ec

RANKS = 4


def test_a_rank_replaces_a_function_for_itself_and_finds_its_own(concurrent: bool) -> None:
    @contextmanager
    def replaced(value: float) -> Iterator[None]:
        found = nn.init.kaiming_uniform_
        nn.init.kaiming_uniform_ = lambda tensor, *_, **__: nn.init.constant_(tensor, value)
        try:
            yield
        finally:
            nn.init.kaiming_uniform_ = found

    def main(world: ec.World) -> list[float]:
        seen = []
        for _ in range(20):
            if world.rank == 0:
                seen.append(nn.Linear(1, 1).weight.item() < 2)
                continue
            with replaced(world.rank + 1):
                with replaced(10 * world.rank):
                    inner = nn.Linear(1, 1).weight.item()
                outer = nn.Linear(1, 1).weight.item()
            seen.append((outer, inner, nn.Linear(1, 1).weight.item() < 2))
        return seen

    first, *others = ec.run(main, RANKS, concurrent=concurrent)
    assert first == [True] * 20
    for rank, seen in enumerate(others, start=1):
        assert seen == [(rank + 1.0, 10.0 * rank, True)] * 20
