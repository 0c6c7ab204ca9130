"""Rank 0 of 8, 64 and 1,024 ranks that are not there, with the network off and at 50 GB/s.

Shapes, copies, launches, Python and memory are those of a job of so many ranks; values and the
other ranks' lateness are not. FSDP2 communicates here, which it does not with one rank. What a step
takes with the network beyond what it takes without is communication that nothing hides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from gpu_device import arguments, forget, has_streams, say
from gpu_network import AbsentRanks, Network, delayed
from gpu_step import WARM_UP, Trainee, config_of, counted, facts_of, measure, small, timed
from gpu_variants import Wrap, fully_sharded, sharded
from llama import LlamaConfig
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.cuda.lines import Line, run_lines
from tests.rank_zero import group_of

RANKS = (8, 1024, 64)  # the most telling first
GB_S = 50.0  # what one of eight ports of 400 Gbit/s gives
STEPS = 6
LINE_S = 30.0
# Bound by launches: what a technique does on the host shows here.
NARROW = LlamaConfig(
    layers=64,
    width=512,
    heads=8,
    key_heads=8,
    hidden=1536,
    vocabulary=4096,
    batch=1,
    context=256,
)


@contextmanager
def echelon_ranks(size: int, network: Network, **options: Any) -> Iterator[Wrap]:
    """echelon's FSDP on rank 0 of ``size``."""
    group, _ = group_of(size, network.device, partial(AbsentRanks, network=network))
    try:
        yield lambda model: sharded(model, group, **options)
    finally:
        group.close()


@contextmanager
def torch_ranks(size: int, network: Network, **options: Any) -> Iterator[Wrap]:
    """PyTorch's FSDP2 on rank 0 of ``size``."""
    dist.init_process_group("fake", store=c10d.HashStore(), rank=0, world_size=size)
    try:
        mesh = init_device_mesh(network.device.type, (size,))

        def wrap(model: nn.Module) -> nn.Module:
            return delayed(fully_sharded(model, mesh=mesh, **options), network)

        yield wrap
    finally:
        dist.destroy_process_group()


VARIANTS: dict[str, Callable[[int, Network], Any]] = {
    "echelon FSDP, prefetch 1": partial(echelon_ranks, forward_prefetch=1),
    "FSDP2": torch_ranks,
    "echelon FSDP, prefetch 0": partial(echelon_ranks, forward_prefetch=0),
}


def of_many(
    name: str, config: LlamaConfig, size: int, variant: str, device: torch.device, num_steps: int
) -> None:
    """Print the figures of one variant without a network and with one."""
    forget(device)
    network = Network(device)
    with VARIANTS[variant](size, network) as wrap:
        trainee = Trainee(config, wrap, device)
        trainee.steps(WARM_UP)
        counts = counted(trainee)
        for gb_s in (None, GB_S) if has_streams(device) else (None,):
            network.gb_s = gb_s
            trainee.steps(1)
            network.nbytes = network.num_calls = 0
            row = timed(trainee, num_steps)
            say(
                "step",
                ranks=size,
                network=str(network),
                model=name,
                variant=variant,
                collectives=network.num_calls / num_steps,
                network_bytes=network.nbytes / num_steps,
                **facts_of(trainee),
                **row,
                **counts,
            )
        del trainee
    forget(device)


def alone(
    name: str, config: LlamaConfig, device: torch.device, num_steps: int
) -> Mapping[str, Any]:
    """The figures of one process without any technique, from which others are told."""
    row = measure("one process alone", config, lambda model: model, device, num_steps=num_steps)
    return {"kind": "alone", "ranks": 1, "network": None, "model": name, **row}


def lines_of(device: torch.device, tiny: bool) -> list[tuple[str, Line]]:
    """All variants of both models: on 8 ranks, then on more."""
    models = {"wide blocks": config_of(tiny), "narrow blocks": small(NARROW) if tiny else NARROW}
    ranks, num_steps = (RANKS[:1], 2) if tiny else (RANKS, STEPS)
    lines: list[tuple[str, Line]] = [
        (f"alone, {name}", partial(alone, name, config, device, num_steps))
        for name, config in models.items()
    ]
    lines += [
        (
            f"{size} ranks, {variant}, {name}",
            partial(of_many, name, config, size, variant, device, num_steps),
        )
        for size in ranks
        for name, config in models.items()
        for variant in VARIANTS
    ]
    return lines


def main() -> int:
    options, device = arguments(__doc__)
    if not has_streams(device):
        say("left_out", what="the time of a network that is not there: streams cannot sleep here")
    return run_lines(lines_of(device, options.tiny), device.type, options.after, LINE_S)


if __name__ == "__main__":
    sys.exit(main())
