"""Trains a byte-level GPT on real text; each rank has a copy of the model (DDP), a shard of all its
tensors (FSDP) or some of its layers (pipeline).

    echelon run --ranks 2 examples/train_gpt.py
    echelon run --ranks 4 --world threads examples/train_gpt.py --steps 20 --technique fsdp
    echelon run --ranks 2 examples/train_gpt.py --technique pipeline --schedule zb-h1
    echelon run --world threads examples/train_gpt.py --steps 20 --plan pp=2,shard=2
    torchrun --nproc-per-node 2 examples/train_gpt.py --data my-notes/
    echelon run --ranks 2 --max-restarts 3 examples/train_gpt.py --save-every 50 --resume auto

The batch is divided among the ranks, or into microbatches, so any number of ranks trains the same
model.
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import resuming
import torch
from gpt import GPT, GPTConfig, flops_per_token
from held_memory import held_bytes
from optimizer import learning_rate, make_optimizer, matrices
from steps import cross_entropy, evaluate, train
from text import Text, load_text
from torch import Tensor
from wrap import add_options, share, timed, whole, wrap

import echelon as ec

VERIFIED_STEPS = 4
WATCHED_STEP = 3  # its memory is drawn; the first steps create the optimizer's state
# In float64 the ranks and one process differ only in the order of sums; Adam divides by the size
# of a gradient, which amplifies the difference where gradients are tiny.
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
    add("--tracker", action="append", default=[], help="also send the numbers there; repeatable")
    add("--track-each-rank", action="store_true", help="as a run of its own")
    add("--verify", action="store_true", help="compare some steps with one process")
    resuming.add_options(parser)
    add_options(parser)
    return parser.parse_args()


def check(args: argparse.Namespace, text: Text, world: ec.World) -> None:
    """Refuse options that cannot be carried out, before anything is built."""
    for name in ("steps", "batch_size", "context", "eval_every", "keep"):
        if getattr(args, name) < 1:
            raise ec.ArgumentError(f"--{name.replace('_', '-')} is {getattr(args, name)}, below 1")
    size = share(args, world)[1]
    if args.batch_size % size:
        raise ec.ArgumentError(
            f"--batch-size {args.batch_size} cannot be cut over {size} ranks: "
            f"give a multiple of {size}"
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


def verify(data: Tensor, args: argparse.Namespace, world: ec.World) -> str:
    """Train a few steps on all ranks and again in one process on whole batches; compare."""
    args = argparse.Namespace(**{**vars(args), "steps": VERIFIED_STEPS})
    alone = make_model(args, torch.float64, world.device)
    copy = make_model(args, torch.float64, world.device)
    decaying = matrices(copy)
    together = wrap(copy, args, world, cross_entropy)
    optimizer = make_optimizer(together, decaying, args)
    for _ in train(together, optimizer, data, args, *share(args, world)):
        pass
    difference = 0.0
    with whole(together, copy, world) as trained:
        if world.rank == 0:
            optimizer = make_optimizer(alone, matrices(alone), args)
            for _ in train(alone, optimizer, data, args, rank=0, size=1):
                pass
            for value, expected in zip(trained.parameters(), alone.parameters(), strict=True):
                difference = max(difference, (value - expected).abs().max().item())
    difference = world.group.broadcast_object(difference, src=0)
    if not difference <= VERIFIED_DIFFERENCE:
        raise AssertionError(f"ranks and one process differ by {difference}: that is no rounding")
    return (
        f"after {VERIFIED_STEPS} steps in float64, the weights of {world.size} ranks and of one "
        f"process differ by at most {difference:.1e}"
    )


def main(world: ec.World, args: argparse.Namespace) -> None:
    world.agree(**vars(args))
    text = load_text(args.data, world.device)
    check(args, text, world)
    verified = verify(text.train, args, world) if args.verify else None
    plain = make_model(args, getattr(torch, args.dtype), world.device)
    num_parameters = sum(parameter.numel() for parameter in plain.parameters())
    decaying = matrices(plain)
    model = wrap(plain, args, world, cross_entropy)
    optimizer = make_optimizer(model, decaying, args)
    checkpoints = resuming.Checkpoints(args, model, optimizer)
    first = checkpoints.resume()
    info = ec.observe.RunInfo(
        total_steps=args.steps,
        unit="bits per byte",
        references={"unigram entropy": text.unigram_entropy()},
        config={**vars(args), "parameters": f"{num_parameters:,}"},
        flops_per_token=flops_per_token(plain.config, num_parameters),
        peak_flops=ec.observe.matmul_flops(world.device, getattr(torch, args.dtype)),
    )
    options = {"trace": args.trace, "to": args.tracker, "per_rank": args.track_each_rank}
    with ec.observe.Recorder(world, f"runs/{args.name}", info, **options) as recorder:
        recorder.note("text", f"{text.source}, {len(text.train) + len(text.held_out):,} bytes")
        if verified is not None:
            recorder.note("verified", verified)
        if first:
            recorder.note("resumed", f"after step {first}")
        with timed(model) as measured, checkpoints.stopping(world) as stop:
            steps = train(model, optimizer, text.train, args, *share(args, world), first)
            for step, (loss, norm) in enumerate(steps, start=first + 1):
                world.group.all_reduce(loss, "mean", label="loss")
                recorder.measure(model, optimizer)
                recorder.step(
                    step,
                    loss.item() / math.log(2),
                    args.batch_size * args.context,
                    learning_rate=learning_rate(step - 1, args),
                    gradient_norm=norm.item(),
                )
                if step % args.eval_every == 0 or step == args.steps:
                    recorder.evaluation(step, evaluate(model, text.held_out, args, world))
                if step == WATCHED_STEP - 1:
                    recorder.watch(partial(held_bytes, model, optimizer))
                checkpoints.after(step, stop)
        if measured is not None:
            planned, ran = measured.simulation.timeline, measured.timeline
            rows = {"planned": planned.steps, "measured": ran.steps}
            recorder.timelines(rows, ranks=measured.ranks)
        with whole(model, plain, world) as trained:
            if world.rank == 0:
                sample = trained.generate(b"def ", length=240, seed=args.seed)
                recorder.note("sample", sample.decode(errors="replace"))


if __name__ == "__main__":
    with ec.init() as world:
        main(world, parse_args())
