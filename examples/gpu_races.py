"""A loop with a prefetcher of its own, which has a race on a GPU: nothing of echelon in it.

echelon race examples/gpu_races.py            # names the race, without a GPU
echelon race examples/gpu_races.py --record   # has none
"""

import sys
from collections.abc import Iterator

import torch
from torch import nn

copies = torch.cuda.Stream()


def batches(number: int) -> Iterator[torch.Tensor]:
    """Batches that are copied to the device beside the computation."""
    for _ in range(number):
        with torch.cuda.stream(copies):
            batch = torch.randn(64, 32).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        if "--record" in sys.argv:
            batch.record_stream(torch.cuda.current_stream())
        yield batch


def main() -> None:
    """Train some steps, and read the losses at the end only."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches(4):
        loss = model(batch).square().mean()
        del batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    print([round(loss, 4) for loss in torch.stack(losses).tolist()])


main()
