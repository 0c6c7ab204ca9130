"""Every feature once, with a small model: whether anything works at all, in half a minute.

Each line is on its own: what one raises does not keep the others from running. ``alone`` is the
world of a script that nobody launched, in which hooks run on autograd's thread for the device; all
other lines run on one rank over an engine of NCCL that echelon starts itself.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_device import arguments
from torch import Tensor, nn

import echelon as ec
from tests.cuda.lines import Line, run_lines
from tests.cuda.training import (
    Block,
    assert_trained,
    batch_on,
    build,
    on_one_rank,
    optimizer_of,
    train,
)

Check = Callable[[ec.World], Mapping[str, Any] | None]


def sharded(world: ec.World, **options: Any) -> ec.FSDP:
    """A new model in FSDP, with a unit for each block."""
    rule = ec.units.by_type(Block)
    return ec.FSDP(build(world.device), world.group, units=rule, min_num_params=0, **options)


def replicated(world: ec.World) -> ec.DDP:
    return ec.DDP(build(world.device), world.group)


def trains(wrap: Callable[[ec.World], nn.Module], world: ec.World) -> None:
    """Two steps give the weights of one process on the CPU in float64."""
    model = wrap(world)
    train(model, world)
    assert_trained(whole(model), 1)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all values."""
    state = model.whole_state_dict() if isinstance(model, ec.FSDP) else model.state_dict()
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def alone(wrap: Callable[[ec.World], nn.Module], device: str) -> Mapping[str, Any]:
    """The same in the world that ``ec.init()`` gives a script that nobody launched."""
    world = ec.init()
    if world.device.type != device:
        # On a machine with a device ``ec.init`` takes it; a try on the CPU is without one.
        raise AssertionError(f"ec.init() took {world.device}, not {device}")
    trains(wrap, world)
    return {"world": repr(world)}


def collectives(world: ec.World) -> None:
    """Every collective with one rank gives its input."""
    group, values = world.group, torch.arange(8.0, device=world.device)
    for op in ("sum", "mean", "max", "min", "product"):
        result = values.clone()
        group.all_reduce(result, op)
        assert torch.equal(result, values), op
    output = torch.empty_like(values)
    group.reduce_scatter_single(output, values)
    assert torch.equal(output, values)
    output.zero_()
    group.all_gather_single(output, values)
    assert torch.equal(output, values)
    group.broadcast(values, 0)
    assert group.all_gather_object({"rank": world.rank}) == [{"rank": 0}]
    group.barrier()


def saved(world: ec.World, *, in_background: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values that were saved, and those that a new model has loaded."""
    with tempfile.TemporaryDirectory() as folder:
        model = sharded(world)
        optimizer = train(model, world, steps=1)
        values = whole(model)
        options: Any = {"step": 1, "model": model, "optimizer": optimizer, "group": world.group}
        if in_background:
            pending = ec.async_save(folder, **options)
            train(model, world, steps=1)  # writes over what is being saved
            pending.wait()
        else:
            ec.save(folder, **options)
        other = sharded(world)
        ec.load(folder, model=other, optimizer=optimizer_of(other), group=world.group)
        return values, whole(other)


def saves_and_loads(world: ec.World, *, in_background: bool = False) -> None:
    before, after = saved(world, in_background=in_background)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def saves(world: ec.World) -> None:
    """A save by itself, so that a load that fails does not hide it."""
    with tempfile.TemporaryDirectory() as folder:
        model = sharded(world)
        optimizer = train(model, world, steps=1)
        ec.save(folder, step=1, model=model, optimizer=optimizer, group=world.group)


def gives_state(world: ec.World) -> None:
    """A state dict of FSDP has the values of the plain module, and goes back into it."""
    model, plain = sharded(world), build(world.device)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    model.load_state_dict(state)


def scales(world: ec.World) -> None:
    """A scaled step in half precision under autocast, and one that is skipped."""
    model = ec.FSDP(build(world.device).float(), world.group, min_num_params=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = ec.GradScaler(world.group, init_scale=1024.0)
    inputs, targets = (part.float() for part in batch_on(world.device, 0, 0))
    kind = world.device.type
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16
    for factor in (1.0, float("inf")):
        with torch.autocast(kind, dtype):
            loss = F.mse_loss(model(inputs).float(), targets)
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        ec.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0, scaler.get_scale()


def pipelines(world: ec.World) -> None:
    """One rank with one stage, one microbatch after the other."""
    pipe = ec.Pipeline(
        [build(world.device)], world.group, microbatches=2, schedule="1f1b", loss_fn=F.mse_loss
    )
    inputs, targets = batch_on(world.device, 0, 0)
    pipe.step(inputs, target=targets)
    optimizer_of(pipe).step()


def simulated(device: str) -> None:
    """Two simulated ranks on one device."""
    results = ec.run(lambda world: whole(_trained(world)), 2, device=device)
    for state in results:
        assert_trained(state, 2)


def _trained(world: ec.World) -> nn.Module:
    model = sharded(world)
    train(model, world)
    return model


CHECKS: dict[str, Check] = {
    "collectives over its own engine": collectives,
    "FSDP": partial(trains, sharded),
    "FSDP, optimizer offloaded": partial(trains, partial(sharded, offload=ec.Offload.OPTIMIZER)),
    "FSDP, all offloaded": partial(trains, partial(sharded, offload=ec.Offload.ALL)),
    "FSDP, rows": partial(trains, partial(sharded, layout="rows")),
    "DDP": partial(trains, replicated),
    "save": saves,
    "save and load": saves_and_loads,
    "async save and load": partial(saves_and_loads, in_background=True),
    "state dict": gives_state,
    "GradScaler": scales,
    "pipeline": pipelines,
}


def lines_of(device: str) -> list[tuple[str, Line]]:
    """All lines by name, the newcomer's first."""
    lines: list[tuple[str, Line]] = [
        ("ec.init() alone, FSDP", partial(alone, sharded, device)),
        ("ec.init() alone, DDP", partial(alone, replicated, device)),
    ]
    lines += [(title, partial(on_one_rank, device, check)) for title, check in CHECKS.items()]
    lines.append(("simulated ranks on one device", partial(simulated, device)))
    return lines


def main() -> int:
    options, device = arguments(__doc__)
    return run_lines(lines_of(device.type), device.type, options.after)


if __name__ == "__main__":
    sys.exit(main())
