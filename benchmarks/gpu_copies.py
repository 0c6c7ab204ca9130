"""How fast data moves between the device, the host and the disk: offloaded steps, saves, loads."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import arguments, forget, joined, synchronize
from gpu_many_ranks import echelon_ranks, torch_ranks
from gpu_network import Network
from gpu_step import Trainee, config_of
from gpu_variants import Wrap, sharded
from llama import LlamaConfig

import echelon as ec
from tests.cuda.lines import Line, run_lines

RANKS = 8
STEPS = 4
LINE_S = 40.0


def pinned_policy(device: torch.device) -> Any:
    """FSDP2's offload, with pinned memory where there is a device."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def offloaded(
    what: str,
    ranks: Callable[[Network], AbstractContextManager[Wrap]],
    config: LlamaConfig,
    device: torch.device,
) -> Mapping[str, Any]:
    """The median time of a step of rank 0 of 8 whose shards are in the memory of the host."""
    forget(device)
    with ranks(Network(device)) as wrap:
        trainee = Trainee(config, wrap, device)
        trainee.steps(1)
        figures = trainee.steps(STEPS)
        # The parameters go to the device in forward and backward, the gradients to the host.
        nbytes = 3 * trainee.num_params * 2 / RANKS
        del trainee
    forget(device)
    seconds = statistics.median(figures.step_ms) / 1e3
    row = {"kind": "copy", "what": f"a step, {what}", "took_s": seconds}
    return row | {"gb_s": None, "copied_bytes": nbytes}


class Checkpoints:
    """A trained model, and a folder in which it is saved."""

    def __init__(self, world: ec.World, config: LlamaConfig, folder: str) -> None:
        self.world, self.config, self.folder = world, config, folder
        self.trainee = self._new()
        self.trainee.steps(1)
        state = self.trainee.optimizer.state_dict()["state"].values()
        moments = [value for row in state for value in row.values() if torch.is_tensor(value)]
        self.nbytes = sum(tensor.nbytes for tensor in moments)
        self.nbytes += sum(param.nbytes for param in self.trainee.model.parameters())

    def _new(self) -> Trainee:
        device = self.world.device
        return Trainee(self.config, lambda model: sharded(model, self.world.group), device)

    def _options(self, trainee: Trainee) -> dict[str, Any]:
        return {
            "model": trainee.model,
            "optimizer": trainee.optimizer,
            "group": self.world.group,
        }

    def _row(self, what: str, seconds: float) -> Mapping[str, Any]:
        speed = self.nbytes / seconds / 1e9
        return {"kind": "copy", "what": what, "took_s": seconds, "gb_s": speed}

    def save(self) -> Mapping[str, Any]:
        synchronize(self.world.device)
        start_s = time.perf_counter()
        ec.save(self.folder, step=1, **self._options(self.trainee))
        return self._row("save", time.perf_counter() - start_s)

    def start_save(self) -> Mapping[str, Any]:
        """Until the program may go on, in which the values are copied to pinned memory."""
        synchronize(self.world.device)
        start_s = time.perf_counter()
        pending = ec.async_save(self.folder, step=2, **self._options(self.trainee))
        seconds = time.perf_counter() - start_s
        pending.wait()
        return self._row("async save, until training goes on", seconds)

    def load(self) -> Mapping[str, Any]:
        other = self._new()
        synchronize(self.world.device)
        start_s = time.perf_counter()
        ec.load(self.folder, **self._options(other))
        synchronize(self.world.device)
        seconds = time.perf_counter() - start_s
        pairs = zip(other.model.parameters(), self.trainee.model.parameters(), strict=True)
        assert all(torch.equal(ec.local_shard(a), ec.local_shard(b)) for a, b in pairs)
        return self._row("load", seconds)


def main() -> int:
    options, device = arguments(__doc__)
    config = config_of(options.tiny)
    half = replace(config, layers=max(1, config.layers // 2))
    lines: list[tuple[str, Line]] = []
    for what, ranks in {
        "echelon, all offloaded": partial(echelon_ranks, RANKS, offload=ec.Offload.ALL),
        "FSDP2, all offloaded": partial(torch_ranks, RANKS, offload_policy=pinned_policy(device)),
        "echelon, optimizer offloaded": partial(echelon_ranks, RANKS, offload=ec.Offload.OPTIMIZER),
    }.items():
        lines.append((what, partial(offloaded, what, ranks, config, device)))
    code = run_lines(lines, device.type, options.after, LINE_S)
    after = max(0, options.after - len(lines))
    with joined(device) as world, tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(world, half, str(Path(folder, "saves")))
        saving: list[tuple[str, Line]] = [
            ("save", checkpoints.save),
            ("async save", checkpoints.start_save),
            ("load", checkpoints.load),
        ]
        code = max(code, run_lines(saving, device.type, after, LINE_S))
        del checkpoints, saving
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
