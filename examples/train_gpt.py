"""Trains a byte-level GPT on real text. Each rank has a copy of the model and a part of each batch.

    echelon run --ranks 2 examples/train_gpt.py
    echelon run --ranks 4 --world threads examples/train_gpt.py --steps 20
    torchrun --nproc-per-node 2 examples/train_gpt.py --data my-notes/

The batch is cut over the ranks, so any number of ranks trains the same model on the same data.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, GPTConfig
from text import Text, batch, bits, load_text
from torch import Tensor, nn

import echelon as ec

EVALUATION_BATCHES = 8
VERIFIED_STEPS = 4
# In float64 only the order of sums differs between ranks and one process; Adam, which divides by
# the size of a gradient, makes more of that where gradients are tiny.
VERIFIED_DIFFERENCE = 1e-9


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on real text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", help="a text file or folder (default: the source code of Python's library)")
    add("--name", default="gpt", help="results go to runs/NAME")
    add("--steps", type=int, default=500, help="optimizer steps")
    add("--seconds", type=float, help="train about so long, instead of --steps")
    add("--batch-size", type=int, default=16, help="sequences a step, over all ranks")
    add("--context", type=int, default=128, help="bytes a sequence")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=192)
    add("--heads", type=int, default=6)
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=100, help="steps between evaluations")
    add("--trace", action="store_true", help="also write a timeline for Perfetto")
    add("--verify", action="store_true", help="compare some steps with one process")
    return parser.parse_args()


def check(args: argparse.Namespace, text: Text, world: ec.World) -> None:
    """Refuse options that cannot be carried out, before anything is built."""
    if min(args.steps, args.batch_size, args.eval_every, args.context) < 1:
        raise ec.ArgumentError("--steps, --batch-size, --eval-every and --context start at 1")
    if args.batch_size % world.size:
        raise ec.ArgumentError(
            f"--batch-size {args.batch_size} cannot be cut over {world.size} ranks: "
            f"give a multiple of {world.size}"
        )
    shortest = min(len(text.train), len(text.held_out))
    if shortest <= args.context + 1:
        raise ec.ArgumentError(
            f"--context {args.context} needs more text than the {shortest} bytes there are"
        )


def make_model(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> GPT:
    torch.manual_seed(args.seed)
    config = GPTConfig(
        layers=args.layers, width=args.width, heads=args.heads, context=args.context
    )
    return GPT(config).to(device, dtype)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A short climb, then half a cosine down to a tenth."""
    warmup = max(1, min(50, args.steps // 10))
    if step < warmup:
        return float(args.lr * (step + 1) / warmup)
    done = (step - warmup) / max(1, args.steps - warmup)
    return float(args.lr * (0.55 + 0.45 * math.cos(math.pi * done)))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, device: torch.device) -> Tensor:
    logits = model(tokens.to(device))
    return F.cross_entropy(logits.view(-1, VOCABULARY), targets.to(device).flatten())


def train(
    model: nn.Module, data: Tensor, args: argparse.Namespace, world: ec.World, size: int
) -> Iterator[tuple[Tensor, torch.optim.Optimizer]]:
    """Take optimizer steps, and yield each step's loss on this rank's part of the batch.

    With ``size`` 1 the whole batch is this rank's part: this is then training in one process.
    """
    rank = world.rank if size > 1 else 0
    optimizer = make_optimizer(model, args)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = batch(
            data, args.context, args.batch_size, seed=args.seed, step=step, rank=rank, size=size
        )
        loss = loss_of(model, tokens, targets, world.device)
        loss.backward()  # with DDP, gradients are averaged over the ranks while it runs
        ec.clip_grad_norm_(model, args.clip)
        optimizer.step()
        yield loss.detach(), optimizer
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, args: argparse.Namespace, world: ec.World) -> float:
    """Bits per byte of the held-out text, each rank looking at its part."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for step in range(EVALUATION_BATCHES):
        tokens, targets = batch(
            data, args.context, 4 * args.batch_size, seed=0, step=step, rank=world.rank, size=world.size
        )
        total += loss_of(model, tokens, targets, world.device)
    world.group.all_reduce(total, "mean", label="validation loss")
    return bits(total.item() / EVALUATION_BATCHES)


def steps_within(seconds: float, text: Text, args: argparse.Namespace, world: ec.World) -> int:
    """How many steps fit into ``seconds``: a trial on a model that is then thrown away."""
    model = ec.DDP(make_model(args, world.device, getattr(torch, args.dtype)), world.group)
    trial = train(model, text.train, args, world, world.size)
    for _ in range(3):  # the first steps are slower
        next(trial)
    start_s = time.perf_counter()
    for _ in range(5):
        next(trial)
    step_s = torch.tensor((time.perf_counter() - start_s) / 5, device=world.device)
    world.group.all_reduce(step_s, "max", label="time of a step")
    return max(1, int(seconds / step_s.item()))


def verify(text: Text, args: argparse.Namespace, world: ec.World) -> float:
    """The largest difference of a weight between this world and one process, after a few steps."""
    args = argparse.Namespace(**{**vars(args), "steps": VERIFIED_STEPS})
    alone = make_model(args, world.device, torch.float64)
    together = ec.DDP(copy.deepcopy(alone), world.group)
    for _ in train(together, text.train, args, world, world.size):
        pass
    difference = 0.0
    if world.rank == 0:
        for _ in train(alone, text.train, args, world, size=1):
            pass
        for ours, plain in zip(together.parameters(), alone.parameters(), strict=True):
            difference = max(difference, (ours - plain).abs().max().item())
    return float(world.group.broadcast_object(difference, src=0))


def main(world: ec.World, args: argparse.Namespace) -> None:
    text = load_text(args.data)
    check(args, text, world)
    if args.seconds is not None:
        args.steps = steps_within(args.seconds, text, args, world)
    model = ec.DDP(make_model(args, world.device, getattr(torch, args.dtype)), world.group)
    info = ec.observe.RunInfo(
        total_steps=args.steps,
        unit="bits per byte",
        references={"unigram entropy": text.unigram_entropy()},
        config={**vars(args), "parameters": sum(p.numel() for p in model.parameters())},
    )
    with ec.observe.Recorder(world, f"runs/{args.name}", info, trace=args.trace) as recorder:
        recorder.note("text", f"{text.source}, {len(text.train) + len(text.held_out):,} bytes")
        for step, (loss, optimizer) in enumerate(
            train(model, text.train, args, world, world.size), start=1
        ):
            world.group.all_reduce(loss, "mean", label="loss")
            recorder.measure(model, optimizer)
            recorder.step(step, bits(loss.item()), args.batch_size * args.context)
            if step % args.eval_every == 0 or step == args.steps:
                recorder.evaluation(step, evaluate(model.module, text.held_out, args, world))
        if args.verify:
            difference = verify(text, args, world)
            recorder.note(
                "verified",
                f"{VERIFIED_STEPS} steps in float64 on {world.size} ranks and in one process: "
                f"weights differ by at most {difference:.1e}",
            )
            if not difference <= VERIFIED_DIFFERENCE:
                raise AssertionError(f"weights differ by {difference}: that is no rounding")
        if world.rank == 0:
            sample = model.module.generate(b"def ", 200, seed=args.seed)
            recorder.note("sample", sample.decode(errors="replace"))


if __name__ == "__main__":
    with ec.init() as world:
        main(world, parse_args())
