"""Trains a byte-level GPT on real text; each rank has a copy of the model (DDP) or a part (FSDP).

    echelon run --ranks 2 examples/train_gpt.py
    echelon run --ranks 4 --world threads examples/train_gpt.py --steps 20 --technique fsdp
    torchrun --nproc-per-node 2 examples/train_gpt.py --data my-notes/

The batch is cut over the ranks, so any number of ranks trains the same model on the same data.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from gpt import GPT, VOCABULARY, GPTConfig
from optimizer import learning_rate, make_optimizer
from text import Text, batch, load_text
from torch import Tensor, nn
from torch.optim import AdamW
from wrap import add_options, wrap

import echelon as ec

EVALUATION_BATCHES = 8
VERIFIED_STEPS = 4
WATCHED_STEP = 3  # whose memory is drawn: the first ones make the optimizer's state
# In float64 the ranks and one process differ in the order of sums only; Adam, which divides by
# the size of a gradient, makes more of that where gradients are tiny.
VERIFIED_DIFFERENCE = 1e-9


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on real text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", help="a text file or folder; without it, the source code of Python's library")
    add("--name", default="gpt", help="results go to runs/NAME")
    add("--steps", type=int, default=300, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="sequences of a step, over all ranks")
    add("--context", type=int, default=64, help="bytes of a sequence")
    add("--layers", type=int, default=3, help="blocks of the model")
    add("--width", type=int, default=256, help="of the model")
    add("--heads", type=int, default=4, help="of attention, in each block")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    add("--seed", type=int, default=0, help="of weights and of the order of the data")
    add("--eval-every", type=int, default=100, help="steps between evaluations")
    add("--trace", action="store_true", help="also write a timeline for Perfetto")
    add("--verify", action="store_true", help="compare some steps with one process")
    add_options(parser)
    return parser.parse_args()


def check(args: argparse.Namespace, text: Text, world: ec.World) -> None:
    """Refuse options that cannot be carried out, before anything is built."""
    for name in ("steps", "batch_size", "context", "eval_every"):
        if getattr(args, name) < 1:
            raise ec.ArgumentError(f"--{name.replace('_', '-')} is {getattr(args, name)}, below 1")
    if args.batch_size % world.size:
        raise ec.ArgumentError(
            f"--batch-size {args.batch_size} cannot be cut over {world.size} ranks: "
            f"give a multiple of {world.size}"
        )
    shortest = min(len(text.train), len(text.held_out))
    if shortest <= args.context:
        raise ec.ArgumentError(
            f"--context {args.context} needs longer text: a part of --data has {shortest} bytes"
        )


def make_model(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> GPT:
    torch.manual_seed(args.seed)
    config = GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
    return GPT(config).to(device, dtype)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).view(-1, VOCABULARY), targets.flatten())


def train(
    model: nn.Module, optimizer: AdamW, data: Tensor, args: argparse.Namespace, rank: int, size: int
) -> Iterator[Tensor]:
    """Take the optimizer steps, and yield each one's loss on this rank's part of the batch.

    As rank 0 of 1, with a plain model, this is training in one process.
    """
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        tokens, targets = batch(
            data, args.context, args.batch_size, seed=args.seed, step=step, rank=rank, size=size
        )
        loss = loss_of(model, tokens, targets)
        loss.backward()  # with DDP, gradients are averaged over the ranks while this runs
        ec.clip_grad_norm_(model, args.clip)
        optimizer.step()
        yield loss.detach()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, args: argparse.Namespace, world: ec.World) -> float:
    """Bits per byte of held-out text; each rank looks at its part."""
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for step in range(EVALUATION_BATCHES):
        tokens, targets = batch(
            data,
            args.context,
            4 * args.batch_size,
            seed=0,
            step=step,
            rank=world.rank,
            size=world.size,
        )
        total += loss_of(model, tokens, targets)
    world.group.all_reduce(total, "mean", label="validation loss")
    return total.item() / EVALUATION_BATCHES / math.log(2)


def verify(data: Tensor, args: argparse.Namespace, world: ec.World) -> str:
    """Train a few steps on all ranks and again in one process on whole batches; compare."""
    args = argparse.Namespace(**{**vars(args), "steps": VERIFIED_STEPS})
    alone = make_model(args, torch.float64, world.device)
    copy = make_model(args, torch.float64, world.device)
    optimizer = make_optimizer(copy, args)
    together = wrap(copy, args, world)
    for _ in train(together, optimizer, data, args, world.rank, world.size):
        pass
    state = together.state_dict()
    difference = 0.0
    if world.rank == 0:
        for _ in train(alone, make_optimizer(alone, args), data, args, rank=0, size=1):
            pass
        for name, value in alone.state_dict().items():
            difference = max(difference, (state[name] - value).abs().max().item())
    difference = world.group.broadcast_object(difference, src=0)
    if not difference <= VERIFIED_DIFFERENCE:
        raise AssertionError(f"ranks and one process differ by {difference}: that is no rounding")
    return (
        f"after {VERIFIED_STEPS} steps in float64, the weights of {world.size} ranks and of one "
        f"process differ by at most {difference:.1e}"
    )


def main(world: ec.World, args: argparse.Namespace) -> None:
    text = load_text(args.data, world.device)
    check(args, text, world)
    verified = verify(text.train, args, world) if args.verify else None
    plain = make_model(args, getattr(torch, args.dtype), world.device)
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    optimizer = make_optimizer(plain, args)  # wrapping keeps the parameters, whatever their shape
    model = wrap(plain, args, world)
    info = ec.observe.RunInfo(
        total_steps=args.steps,
        unit="bits per byte",
        references={"unigram entropy": text.unigram_entropy()},
        config={**vars(args), "parameters": f"{num_parameters:,}"},
    )
    with ec.observe.Recorder(world, f"runs/{args.name}", info, trace=args.trace) as recorder:
        recorder.note("text", f"{text.source}, {len(text.train) + len(text.held_out):,} bytes")
        if verified is not None:
            recorder.note("verified", verified)
        losses = train(model, optimizer, text.train, args, world.rank, world.size)
        for step, loss in enumerate(losses, start=1):
            world.group.all_reduce(loss, "mean", label="loss")
            recorder.measure(model, optimizer)
            recorder.step(
                step,
                loss.item() / math.log(2),
                args.batch_size * args.context,
                learning_rate=learning_rate(step - 1, args),
            )
            if step % args.eval_every == 0 or step == args.steps:
                recorder.evaluation(step, evaluate(model, text.held_out, args, world))
            if step == WATCHED_STEP - 1 and args.technique == "fsdp":
                recorder.watch(lambda: model.memory_stats(optimizer).by_category())
        with model.full_parameters() if args.technique == "fsdp" else nullcontext():
            if world.rank == 0:
                sample = model.generate(b"def ", length=240, seed=args.seed)
                recorder.note("sample", sample.decode(errors="replace"))


if __name__ == "__main__":
    with ec.init() as world:
        main(world, parse_args())
