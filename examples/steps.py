"""Training steps and evaluation of a model, plain or wrapped."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY
from optimizer import learning_rate
from text import batch
from torch import Tensor
from torch.optim import AdamW
from wrap import Shared, share

import echelon as ec

EVALUATION_BATCHES = 8


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), targets.flatten())


def gradients(model: GPT | Shared, tokens: Tensor, targets: Tensor) -> Tensor:
    """Run forward and backward; returns the loss, on every rank."""
    if isinstance(model, ec.Pipeline):
        return model.step(tokens, target=targets, loss_everywhere=True)
    loss = cross_entropy(model(tokens), targets)
    loss.backward()  # with DDP, gradients are averaged over the ranks while this runs
    return loss.detach()


def train(
    model: GPT | Shared,
    optimizer: AdamW,
    data: Tensor,
    args: argparse.Namespace,
    rank: int,
    size: int,
    first: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Take the optimizer steps, and yield the loss of each on this rank's part of the batch, and
    the norm of the gradient.

    With rank 0 of size 1 and a plain model, this is training in one process.

    Args:
        first: the number of the first step; those before it are done.
    """
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = batch(
            data, args.context, args.batch_size, seed=args.seed, step=step, rank=rank, size=size
        )
        loss = gradients(model, tokens, targets)
        norm = ec.clip_grad_norm_(model, args.clip)
        optimizer.step()
        yield loss, norm
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: Shared, data: Tensor, args: argparse.Namespace, world: ec.World) -> float:
    """Bits per byte of held-out text; each rank evaluates its share."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    rank, size = share(args, world)
    for step in range(EVALUATION_BATCHES):
        tokens, targets = batch(
            data, args.context, 4 * args.batch_size, seed=0, step=step, rank=rank, size=size
        )
        if isinstance(model, ec.Pipeline):
            total += model.eval_step(tokens, target=targets, loss_everywhere=True)
        else:
            total += cross_entropy(model(tokens), targets)
    world.group.all_reduce(total, "mean", label="validation loss")
    return total.item() / EVALUATION_BATCHES / math.log(2)
