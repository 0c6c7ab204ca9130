"""What a training step of one technique takes on one device, in a world of one rank.

    python benchmarks/gpu_step.py "FSDP2" --device cuda

Prints a line of JSON. A world of one rank shows what a technique adds by itself: its Python, its
copies and its memory. It does not show the network.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llama import ONE_BILLION, TINY, Block, Llama
from torch import nn

import echelon as ec

WARM_UP, STEPS = 3, 10
ALONE = "one process alone"
MIXED = ", float32 parts"


@dataclass(frozen=True)
class Place:
    """Where a variant runs: echelon's world, beside the default group of torch.distributed."""

    world: ec.World
    device: torch.device


def sharded(model: nn.Module, place: Place, **options: Any) -> nn.Module:
    """echelon's FSDP with one unit for each block."""
    rule = ec.units.by_type(Block)
    return ec.FSDP(model, place.world.group, units=rule, min_num_params=0, **options)


def fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    """PyTorch's FSDP2 with one unit for each block."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def flattened(model: nn.Module, place: Place) -> nn.Module:
    """PyTorch's first FSDP with one unit for each block."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=place.device,
    )


def mixed_of_torch() -> Any:
    """bfloat16 in forward and backward, float32 everywhere else."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offload_of_torch() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def data_parallel(model: nn.Module, place: Place) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


MIXED_OF_ECHELON = ec.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)
VARIANTS: dict[str, Callable[[nn.Module, Place], nn.Module]] = {
    ALONE: lambda model, place: model,
    "echelon FSDP": sharded,
    "FSDP2": lambda model, place: fully_sharded(model),
    "echelon DDP": lambda model, place: ec.DDP(model, place.world.group),
    "PyTorch DDP": data_parallel,
    "FSDP1": flattened,
    f"echelon FSDP{MIXED}": lambda m, place: sharded(m, place, precision=MIXED_OF_ECHELON),
    f"FSDP2{MIXED}": lambda model, place: fully_sharded(model, mp_policy=mixed_of_torch()),
    "echelon FSDP, ZeRO-2": lambda model, place: sharded(
        model, place, strategy=ec.Strategy.SHARD_GRAD_OP
    ),
    "FSDP2, no reshard": lambda model, place: fully_sharded(model, reshard_after_forward=False),
    "echelon FSDP, offloaded": lambda model, place: sharded(model, place, offload=ec.Offload.ALL),
    "FSDP2, offloaded": lambda model, place: fully_sharded(
        model, offload_policy=offload_of_torch()
    ),
}


def measured(variant: str, device: str, tiny: bool) -> dict[str, Any]:
    """Train some steps; medians, in milliseconds and bytes."""
    place = joined(device)
    config = TINY if tiny else ONE_BILLION
    torch.manual_seed(0)
    with place.device:
        model: nn.Module = Llama(config)
    if MIXED not in variant:
        model = model.to(torch.bfloat16)
    num_params = sum(p.numel() for p in model.parameters())
    model = VARIANTS[variant](model, place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.randint(config.vocabulary, (config.batch, config.context), device=place.device)
    rows = [step(model, optimizer, tokens, place.device) for _ in range(WARM_UP + STEPS)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    medians = {
        name: round(statistics.median(row[name] for row in rows[WARM_UP:]), 3)
        for name in ("step_ms", "issue_ms", "cpu_ms")
    }
    losses = [row["loss"] for row in rows]
    place.world.close()
    dist.destroy_process_group()
    return {
        "variant": variant,
        "num_params": num_params,
        "num_units": config.layers + 1,
        "tokens": config.batch * config.context,
        **medians,
        "steps_ms": [round(row["step_ms"], 3) for row in rows],
        "peak_bytes": peak,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, device: torch.device
) -> dict[str, float]:
    """One step; how long until forward and backward were issued, and until all was done.

    Processor time is that of all threads: on CUDA, backward runs on one of torch's own.
    """
    synchronize(device)
    start_s, cpu_s = time.perf_counter(), time.process_time()
    loss = model(tokens)
    loss.backward()
    issued_s, issued_cpu_s = time.perf_counter(), time.process_time()
    optimizer.step()
    optimizer.zero_grad()
    synchronize(device)
    return {
        "step_ms": 1e3 * (time.perf_counter() - start_s),
        "issue_ms": 1e3 * (issued_s - start_s),
        "cpu_ms": 1e3 * (issued_cpu_s - cpu_s),
        "loss": loss.item(),
    }


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def joined(device: str) -> Place:
    """A world of one rank, and the default group of torch.distributed beside it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    backend = "nccl" if device == "cuda" else "gloo"
    place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
        dist.init_process_group(backend, device_id=place)
    else:
        dist.init_process_group(backend)
    return Place(ec.init(backend), place)


def profile(device: str, tiny: bool) -> str:
    """What a step of echelon's FSDP spends its time on, as torch's profiler sees it."""
    place = joined(device)
    config = TINY if tiny else ONE_BILLION
    with place.device:
        model = sharded(Llama(config).to(torch.bfloat16), place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.randint(config.vocabulary, (config.batch, config.context), device=place.device)
    for _ in range(WARM_UP):
        step(model, optimizer, tokens, place.device)
    with torch.profiler.profile() as seen:
        step(model, optimizer, tokens, place.device)
    order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    table = seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
    place.world.close()
    dist.destroy_process_group()
    return str(table)


def main() -> None:
    """Measure the variant that was named, or profile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=[*VARIANTS, "profile"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.variant == "profile":
        row: dict[str, Any] = {"profile": profile(options.device, options.tiny)}
    else:
        row = measured(options.variant, options.device, options.tiny)
    print(f"RESULT {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
