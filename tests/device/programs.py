"""The configurations that run on the simulated device: each is a name and a function.

Those of ``PROGRAMS`` are one rank of a job whose other ranks are not there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon import MixedPrecision, Offload, Strategy
from echelon.comm.group import Group
from echelon.comm.torch_dist.engines import Engine
from echelon.fsdp.policy import BackwardPrefetch
from echelon.testing.device.collectives import SimulatedGroup
from echelon.testing.device.torch_module import DEVICE
from tests.rank_zero import fake_engine, group_of

WIDTH = 8
BF16 = MixedPrecision(compute=torch.bfloat16, reduce=torch.float32)
ALL_BF16 = MixedPrecision(compute=torch.bfloat16, reduce=torch.bfloat16)


class Block(nn.Module):
    """A norm, a layer with a bias, a residual; perhaps with a checkpoint of its activations."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.recomputes = recomputes

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if not self.recomputes:
            return self.inner(x)
        recomputed: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return recomputed


class Model(nn.Module):
    """Three blocks, a small layer that stays whole, a head, a buffer."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(3))
        self.small = nn.Linear(WIDTH, 2, bias=False)
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.used = range(3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift.to(x.dtype)
        for i in self.used:
            x = self.blocks[i](x)
        return self.head(x).square().mean() + self.small(x).square().mean()


class Normed(nn.Module):
    """Layers with buffers that a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@dataclass
class Training:
    """A wrapped model with its optimizer."""

    model: Any
    group: Group
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def loss(self) -> Tensor:
        loss: Tensor = self.model(torch.ones(4, WIDTH))
        return loss

    def step(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class OverAtOnce:
    """An engine whose works are over when they are issued, so a program runs the same each time."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._engine, name)

        @wraps(method)
        def issue(*args: Any) -> CompletedWork:
            method(*args)
            return CompletedWork()

        return issue


class CompletedWork:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def rank_of(size: int, rank: int = 0) -> Group:
    """A group on the device as one of its ranks sees it; the others are not there."""

    def engine(rank: int, size: int) -> Engine:
        return cast(Engine, SimulatedGroup(OverAtOnce(fake_engine(rank, size)), rank, size))

    return group_of(size, torch.device(DEVICE, 0), engine, rank)[0]


def fsdp(
    size: int = 4,
    replicas: int = 1,
    rank: int = 0,
    model: Callable[[], nn.Module] = Model,
    **options: Any,
) -> Training:
    group = rank_of(size * replicas, rank)
    shard: Group = group if replicas == 1 else part_of(group, range(size))
    if replicas > 1:
        options["replicate"] = part_of(group, range(0, size * replicas, size))
    options = {"min_num_params": 20, "units": ec.units.by_type(Block), **options}
    return Training(ec.FSDP(model(), shard, **options), shard)


def part_of(group: Group, ranks: range) -> Group:
    part = group.subgroup(ranks)
    assert part is not None
    return part


def ddp(rank: int = 0, model: Callable[[], nn.Module] = Model, **options: Any) -> Training:
    group = rank_of(4, rank)
    return Training(ec.DDP(model(), group, **options), group)


# What a training does ----------------------------------------------------------------------------


def steps(training: Training) -> None:
    training.step()


def accumulates(training: Training) -> None:
    for _ in range(2):
        with training.model.no_sync():
            training.loss().backward()
        training.loss().backward()
        training.loss().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def keeps_gradients(training: Training) -> None:
    for _ in range(3):
        training.loss().backward()
        training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    training.step(1)


def evaluates(training: Training) -> None:
    training.step(1)
    training.model.eval()
    with torch.no_grad():
        training.loss()
        training.loss()
    training.model.train()
    training.step(2)


def clips(training: Training) -> None:
    for _ in range(3):
        training.loss().backward()
        ec.clip_grad_norm_(training.model, 0.1)
        training.optimizer.step()
        training.optimizer.zero_grad()


def scales(training: Training) -> None:
    scaler = ec.GradScaler(training.group, init_scale=8.0)
    for _ in range(3):
        scaler.scale(training.loss()).backward()
        scaler.unscale_(training.optimizer)
        ec.clip_grad_norm_(training.model, 0.1)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()


def guards(training: Training) -> None:
    guard = ec.FiniteGuard(training.model, training.group)
    for _ in range(3):
        loss = training.loss()
        loss.backward()
        if guard.allows_step(loss):
            training.optimizer.step()
        training.optimizer.zero_grad()


def aborts(training: Training) -> None:
    training.step(1)
    handle = training.model.module.blocks[1].register_full_backward_hook(_fail)
    with pytest.raises(KeyError):
        training.loss().backward()
    handle.remove()
    training.optimizer.zero_grad()
    training.step(2)


def shows_full(training: Training) -> None:
    training.step(1)
    with training.model.full_parameters(writeback=True):
        for param in training.model.parameters():
            with torch.no_grad():
                param.mul_(0.5)
    training.step(1)
    with training.model.full_parameters():
        sum(param.sum().item() for param in training.model.parameters())
    training.step(1)


def gives_states(training: Training) -> None:
    training.step(1)
    state = training.model.whole_state_dict()
    optimizer = training.model.optimizer_state_dict(training.optimizer)
    training.step(1)
    training.model.load_state_dict(state)
    training.model.load_optimizer_state_dict(training.optimizer, optimizer)
    training.step(1)


def gives_sharded_states(training: Training) -> None:
    training.step(1)
    state = training.model.sharded_state_dict()
    training.step(1)
    training.model.load_sharded_state_dict(state)
    training.step(1)


def stays_unsharded(training: Training) -> None:
    training.step(1)
    training.model.gather_parameters()
    for _ in range(2):
        with training.model.no_sync():
            training.loss().backward()
    training.model.sync_gradients()
    training.model.release_parameters()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step(1)


def skips_units(training: Training) -> None:
    for used in ([0, 1, 2], [0, 2], [1], [2, 0], [0, 1, 2]):
        training.model.module.used = used
        training.step(1)


def runs_twice(training: Training) -> None:
    for _ in range(2):
        first, second = training.loss(), training.loss()
        (first + second).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def on_a_stream_of_the_user(training: Training) -> None:
    from echelon.comm.streams import device_of

    device = device_of(training.group.device)
    stream = device.side_stream()
    for _ in range(2):
        stream.wait_for_current()
        with stream.as_current():
            training.step(2)
        stream.record_event().wait()
        training.step(1)
    stream.wait_for_current()  # what was allocated on the stream is freed now


def freezes(training: Training) -> None:
    training.step(1)
    training.model.module.blocks[1].requires_grad_(False)
    training.step(2)


def drops_the_model_in_a_forward(training: Training) -> None:
    training.step(1)
    training.model.module.blocks[0].register_forward_hook(_fail)
    with pytest.raises(KeyError):
        training.loss()
    training.model = training.optimizer = None
    gc.collect()


def _fail(*_: object) -> None:
    raise KeyError("a hook of the user")


def drops_the_model(training: Training) -> None:
    training.step(1)
    loss = training.loss()
    training.model = training.optimizer = None
    del loss
    gc.collect()


def drops_the_model_before_backward(training: Training) -> None:
    training.step(1)
    loss = training.loss()
    training.model = training.optimizer = None
    gc.collect()
    loss.backward()
    del loss
    gc.collect()


# The matrix --------------------------------------------------------------------------------------

Program = Callable[[], None]


def _one_rank(make: Callable[[], Training], act: Callable[[Training], None]) -> Program:
    def run() -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            act(make())

    return run


def _fsdp_programs() -> Iterator[tuple[str, Program]]:
    plain = [strategy for strategy in Strategy if not strategy.hybrid]
    for strategy, layout, offload, precision, depth in product(
        plain, ("flat", "rows"), Offload, (None, BF16), (0, 2)
    ):
        whole = strategy is Strategy.NO_SHARD
        if whole and (layout == "rows" or depth):
            continue  # FSDP refuses options without an effect
        if whole and offload is Offload.ALL:
            continue
        options: dict[str, Any] = {"strategy": strategy, "offload": offload}
        options |= {"min_num_params": 0} if whole else {"layout": layout}
        options |= {"forward_prefetch": depth} if depth else {}
        options |= {} if precision is None else {"precision": precision}
        name = f"{strategy.name} {layout} {offload.name} {'bf16' if precision else 'f32'} {depth}"
        yield name, _one_rank(partial(fsdp, **options), steps)
    hybrid = [strategy for strategy in Strategy if strategy.hybrid]
    for strategy, layout, offload, precision in product(
        hybrid, ("flat", "rows"), Offload, (None, ALL_BF16)
    ):
        options = {"strategy": strategy, "offload": offload, "layout": layout, "replicas": 2}
        options |= {} if precision is None else {"precision": precision}
        name = f"{strategy.name} {layout} {offload.name} {'bf16' if precision else 'f32'}"
        yield name, _one_rank(partial(fsdp, **options), accumulates)


ACTS = {
    act.__name__: act
    for act in (
        accumulates, keeps_gradients, evaluates, clips, scales, guards, aborts, shows_full,
        gives_states, gives_sharded_states, stays_unsharded, skips_units, runs_twice,
        on_a_stream_of_the_user, freezes, drops_the_model, drops_the_model_before_backward,
        drops_the_model_in_a_forward,
    )
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "rows, prefetched": {"layout": "rows", "forward_prefetch": 2},
    "offloaded": {"offload": Offload.ALL, "precision": BF16},
}
MORE_OPTIONS: dict[str, dict[str, Any]] = {
    "unlimited": {"forward_prefetch": 3, "limit_all_gathers": False},
    "POST": {"backward_prefetch": BackwardPrefetch.POST},
    "no backward prefetch": {"backward_prefetch": BackwardPrefetch.NONE},
    "flat parameters": {"use_orig_params": False, "units": ec.units.whole()},
    "7 ranks": {"size": 7},
    "rank 2": {"rank": 2},
    "rank 2, rows": {"rank": 2, "layout": "rows"},
    "7 ranks, rows, prefetched": {"size": 7, "layout": "rows", "forward_prefetch": 1},
    "low gradients": {"precision": ALL_BF16},
    "sum": {"reduction": "sum"},
    "checkpoints": {"model": partial(Model, recomputes=True)},
    "checkpoints, rows": {"model": partial(Model, recomputes=True), "layout": "rows"},
    "checkpoints, offloaded": {"model": partial(Model, recomputes=True), "offload": Offload.ALL},
    "mirrored, bf16": {"offload": Offload.OPTIMIZER, "precision": BF16, "forward_prefetch": 1},
}
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "rank 1": {"rank": 1, "bucket_bytes": 64, "first_bucket_bytes": 64},
    "rank 1, batch norm": {"rank": 1, "model": Normed},
    "small buckets": {"bucket_bytes": 256, "first_bucket_bytes": 64},
    "bf16": {"gradient_dtype": torch.bfloat16, "bucket_bytes": 512},
    "sum": {"reduction": "sum"},
    "batch norm": {"model": Normed},
    "batch norm, small buckets": {"model": Normed, "bucket_bytes": 64, "first_bucket_bytes": 64},
    "buffers stay": {"model": Normed, "broadcast_buffers": False},
}


def _act_programs() -> Iterator[tuple[str, Program]]:
    for (which, options), (name, act) in product(OPTIONS.items(), ACTS.items()):
        yield f"FSDP {which}: {name}", _one_rank(partial(fsdp, **options), act)
    for which, options in MORE_OPTIONS.items():
        yield f"FSDP {which}", _one_rank(partial(fsdp, **options), steps)
    for which, options in DDP_OPTIONS.items():
        yield f"DDP {which}", _one_rank(partial(ddp, **options), steps)
    for act in (accumulates, keeps_gradients, clips, scales, guards, aborts, runs_twice, freezes):
        yield f"DDP: {act.__name__}", _one_rank(partial(ddp, bucket_bytes=256), act)


PROGRAMS: dict[str, Program] = {**dict(_fsdp_programs()), **dict(_act_programs())}
