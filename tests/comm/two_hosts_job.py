"""What each rank runs in ``test_two_hosts``: train to parity, then lose the other host."""

import json
import sys
import time
from pathlib import Path

import torch

import echelon as ec
from echelon.errors import CommError

STEPS = 3
TIMEOUT_S = 10.0


def model() -> torch.nn.Module:
    """The same on every rank and in the test."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)]
    return torch.nn.Sequential(*layers).double()


def batch(step: int, ranks: list[int]) -> torch.Tensor:
    """The rows of some ranks, end to end."""
    rows = []
    for rank in ranks:
        torch.manual_seed(100 * step + rank)
        rows.append(torch.randn(4, 6, dtype=torch.float64))
    return torch.cat(rows)


def train(net: torch.nn.Module, ranks: list[int]) -> list[list[float]]:
    """The parameters after some steps on the rows of ``ranks``."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(STEPS):
        net(batch(step, ranks)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().flatten().tolist() for parameter in net.parameters()]


def main(folder: Path) -> None:
    """One rank."""
    with ec.init(timeout=TIMEOUT_S) as world:
        trained = train(ec.DDP(model(), world.group), [world.rank])
        facts = {"backend": world.backend, "rank": world.rank, "trained": trained}
        (folder / f"trained-{world.rank}.json").write_text(json.dumps(facts))
        try:
            while True:
                start_s = time.monotonic()
                world.group.all_reduce(torch.ones(100), label="after the cut")
        except CommError as error:
            seconds = time.monotonic() - start_s
            facts = {"type": type(error).__name__, "text": str(error), "seconds": seconds}
            (folder / f"cut-{world.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
