"""Rank 0 of 4 with streams that are late at random: the same bits, and every planted fault found.

The reference of a case is a run in which the device is synchronized at every use of a stream. Then
each use of a stream in the code is taken away once, and the bits must differ.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_device import arguments, has_streams, synchronize
from gpu_disturbance import Disturbance, disturbed
from gpu_network import AbsentRanks, Network, cycles_per_ms
from torch import Tensor, nn

import echelon as ec
from tests.cuda.lines import LeftOut, Line, run_lines
from tests.cuda.training import Block, batch_on, build
from tests.rank_zero import group_of

RANKS = 4
STEPS = 3
SEEDS = 5
TRIES = 12  # runs with other delays and cases until a fault counts as not found
FEW_TRIES = 4  # where nobody knows whether a difference can be seen
MIXED = ec.MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)

CASES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "rows": {"layout": "rows"},
    "forward prefetch 1": {"forward_prefetch": 1},
    "forward prefetch 2, no limit": {"forward_prefetch": 2, "limit_all_gathers": False},
    "prefetch in backward POST": {"backward_prefetch": ec.BackwardPrefetch.POST},
    "SHARD_GRAD_OP": {"strategy": ec.Strategy.SHARD_GRAD_OP},
    "SHARD_OPTIMIZER": {"strategy": ec.Strategy.SHARD_OPTIMIZER},
    "optimizer offloaded": {"offload": ec.Offload.OPTIMIZER},
    "all offloaded, rows": {"offload": ec.Offload.ALL, "layout": "rows"},
    "bfloat16": {"precision": MIXED},
    "bfloat16, optimizer offloaded": {"precision": MIXED, "offload": ec.Offload.OPTIMIZER},
    "bfloat16, replicated units": {"precision": MIXED, "min_num_params": 100},
    "flat parameters": {"use_orig_params": False},
}
DDP = "DDP, small buckets"

# What the code cannot do without, where it communicates and memory is not shared.
NEEDED = {
    "storage.refresh: wait_for_current": "gathers wait for the optimizer",
    "storage_kinds.GatheredStorage.wait_for_unshard: wait": "a unit waits for its gather",
    "storage_kinds.GatheredStorage.reshard: wait_for_current": "memory is kept until its last use",
    "gradients.Reduction._start: wait_for_current": "a reduction waits until its slot is filled",
    "gradients.Reduction.release_slot: wait": "a slot waits for the reduction before",
    "gradients.Reduction.finish: wait": "the optimizer waits for reductions",
    "gradients.Reduction.finish: synchronize": "the host waits for gradients that come to it",
    "NativeWork: wait": "streams wait for a collective",
}


def wrapped(title: str, group: ec.Group, device: torch.device) -> nn.Module:
    """A new model in the technique of a case."""
    torch.manual_seed(0)
    if title == DDP:
        return ec.DDP(build(device), group, bucket_bytes=256, first_bucket_bytes=64)
    options = {"min_num_params": 0, **CASES[title]}
    model = build(device).float() if "precision" in options else build(device)
    return ec.FSDP(model, group, units=ec.units.by_type(Block), **options)


def trained(title: str, disturbance: Disturbance) -> list[Tensor]:
    """The losses and the weights of some steps, of which nothing is read before the end."""
    device = disturbance.device

    def engine_of(rank: int, size: int) -> AbsentRanks:
        return AbsentRanks(
            rank,
            size,
            Network(device),
            before=disturbance.delay,
            waits=disturbance.has_engine_wait,
        )

    group, _ = group_of(RANKS, device, engine_of)
    with disturbed(disturbance):
        model = wrapped(title, group, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        dtype = next(model.parameters()).dtype
        batches = [
            [tensor.to(dtype) for tensor in batch_on(device, step, 0)] for step in range(STEPS)
        ]
        synchronize(device)
        losses = []
        for inputs, targets in batches:
            for half, context in ((slice(2), model.no_sync()), (slice(2, None), nullcontext())):
                with context:
                    disturbance.delay()
                    loss = F.mse_loss(model(inputs[half]).to(dtype), targets[half])
                    disturbance.delay()
                    loss.backward()
                losses.append(loss.detach())
            ec.clip_grad_norm_(model, 0.3)
            disturbance.delay()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses.append(F.mse_loss(model(batches[0][0]).to(dtype), batches[0][1]))
        synchronize(device)
        weights = [ec.local_shard(param).detach().cpu().clone() for param in model.parameters()]
        results = [loss.cpu() for loss in losses] + weights
    group.close()
    return results


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether all bits agree, and none is of a NaN."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


class Races:
    """The references of all cases, made when they are first needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._references: dict[str, list[Tensor]] = {}
        self._sites: dict[str, set[str]] = {}

    def reference(self, title: str) -> list[Tensor]:
        if title not in self._references:
            disturbance = Disturbance(self.device)
            self._references[title] = trained(title, disturbance)
            self._sites[title] = set(disturbance.sites)
        return self._references[title]

    def cases_of(self, site: str) -> list[str]:
        """The cases that reach a site."""
        for title in (*CASES, DDP):
            self.reference(title)
        return [title for title, sites in self._sites.items() if site in sites]

    def sites(self) -> list[str]:
        """All sites of all cases."""
        self.cases_of("")
        return sorted(set().union(*self._sites.values()))

    def clean(self, title: str) -> Mapping[str, Any]:
        """The bits of a case are those of its reference, whatever is late."""
        reference = self.reference(title)
        is_cuda = has_streams(self.device)
        for seed in range(SEEDS if is_cuda else 1):
            if not are_equal(trained(title, Disturbance(self.device, seed)), reference):
                raise AssertionError(f"{title}: other bits with the delays of seed {seed}")
        outcome = "equal bits" if is_cuda else "runs; delays need a device"
        num_seeds = SEEDS if is_cuda else None
        row = {"kind": "race", "fault": None, "case": title}
        return row | {"num_seeds": num_seeds, "outcome": outcome}

    def planted(self, site: str) -> Mapping[str, Any]:
        """Without a site the bits differ in some case."""
        if not has_streams(self.device):
            raise LeftOut("a planted fault, for which the CPU has no streams")
        cases = self.cases_of(site)
        row = {"kind": "race", "fault": site, "meaning": NEEDED.get(site, "")}
        for seed in range(TRIES if site in NEEDED else FEW_TRIES):
            title = cases[seed % len(cases)]
            row |= {"case": title, "num_seeds": seed + 1}
            try:
                results = trained(title, Disturbance(self.device, seed, site))
            except Exception as error:  # what a fault leads to is not known
                return row | {"outcome": "found", "raised": repr(error)[:300]}
            if not are_equal(results, self.reference(title)):
                return row | {"outcome": "found"}
        if site in NEEDED:
            raise AssertionError(
                f"without {site} ({NEEDED[site]}) all bits were right {TRIES} times"
            )
        return row | {"outcome": "no difference"}


def lines_of(races: Races) -> Iterator[tuple[str, Line]]:
    """All cases, then all planted faults, those that must be found first."""
    for title in (*CASES, DDP):
        yield title, partial(races.clean, title)
    sites = races.sites()
    for site in sorted(sites, key=lambda site: (site not in NEEDED, site)):
        yield f"without {site}", partial(races.planted, site)


def main() -> int:
    options, device = arguments(__doc__)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write where a race is
    races = Races(device)
    if has_streams(device):
        cycles_per_ms(device)  # is measured now and then known
    return run_lines(lines_of(races), device.type, options.after)


if __name__ == "__main__":
    sys.exit(main())
