"""What runs on macOS and Windows, as a program: ``python -m tests.other_system``.

With ``darwin`` or ``win32`` as an argument, it runs as if this was such a system. With the
variables of torchrun it is a rank over gloo. It prints a line for each thing that works.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__: list[str] = []

RANKS, STEPS, ROWS = 4, 3, 8
# Only local processes, and what starts them, need these.
_OF_LINUX = (
    "echelon.__main__",
    "echelon.comm.shm",
    "echelon.integrations",  # the hosts load what was built for the system that is really there
    "echelon.launch.agent",
    "echelon.launch.attempt",
    "echelon.launch.local_job",
    "echelon.launch.processes",
    "echelon.launch.served_program",
    "echelon.process.die_with_parent",
)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(RANKS)]
    return nn.Sequential(*layers).double()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    data = torch.randn(2, ROWS, 6, generator=generator, dtype=torch.float64)
    return data[0], data[1]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> None:
    for step in range(STEPS):
        x, y = (tensor[rank::size] for tensor in _batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def _alone() -> dict[str, Tensor]:
    model = _model()
    _train(model, torch.optim.Adam(model.parameters(), 0.01), 0, 1)
    return model.state_dict()


def _equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


def _wrapped(world: Any, technique: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    import echelon as ec

    options: dict[str, Any] = {"units": ec.units.by_type(nn.Sequential)}
    wrapper = ec.FSDP if technique == "fsdp" else ec.DDP
    model = wrapper(_model(), world.group, **options if technique == "fsdp" else {})
    return model, torch.optim.Adam(model.parameters(), 0.01)


def _parallel(world: Any, technique: str, folder: str) -> dict[str, Tensor]:
    import echelon as ec

    model, optimizer = _wrapped(world, technique)
    _train(model, optimizer, world.rank, world.size)
    ec.save(folder, step=STEPS, model=model, optimizer=optimizer, group=world.group)
    ec.async_save(folder, step=STEPS + 1, model=model, group=world.group).wait()
    return dict(model.state_dict())


def _loaded(world: Any, folder: str) -> dict[str, Tensor]:
    import echelon as ec

    model, optimizer = _wrapped(world, "ddp")
    ec.load(folder, step=STEPS, model=model, optimizer=optimizer, group=world.group)
    return dict(model.state_dict())


def _pipeline(world: Any) -> dict[str, Tensor]:
    import echelon as ec

    stages = ec.pipeline.split(_model(), world.size)
    pipeline = ec.Pipeline(
        stages, world.group, microbatches=2, loss_fn=nn.functional.mse_loss, schedule="1f1b"
    )
    optimizer = torch.optim.Adam(pipeline.parameters(), 0.01)
    for step in range(STEPS):
        x, y = _batch(step)
        optimizer.zero_grad()
        pipeline.step(x, target=y)
        optimizer.step()
    return dict(pipeline.state_dict())


def _torch_program() -> float:
    dist.init_process_group("echelon")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def _stopped(world: Any) -> str:
    import echelon as ec

    with ec.StopSignals(world.group) as stop:
        while True:
            if world.rank == 1:
                signal.raise_signal(signal.SIGTERM)
            if stop.requested():
                assert stop.signal is not None
                return stop.signal.name


def _recorded(world: Any, folder: str) -> None:
    import echelon as ec

    model, optimizer = _wrapped(world, "fsdp")
    box = ec.Blackbox(folder, model=model, optimizer=optimizer)
    info = ec.observe.RunInfo(total_steps=STEPS)
    with ec.observe.Recorder(world, Path(folder) / "run", info, trace=True) as recorder:
        for step, (x, y) in box.steps([_batch(step) for step in range(STEPS)]):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            recorder.step(step, loss.item(), num_tokens=1)


def imports() -> None:
    """All modules but those of local processes."""
    import echelon

    root = Path(echelon.__path__[0])
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        if not name.startswith(_OF_LINUX):
            importlib.import_module(name.removesuffix(".__init__"))


def simulated_ranks() -> None:
    """All techniques on simulated ranks; processes are refused."""
    import echelon as ec

    expected = _alone()
    for technique in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory() as folder:
            for weights in ec.run(_parallel, RANKS, "threads", args=(technique, folder)):
                _equal(weights, expected)
            assert ec.steps(folder) == [STEPS, STEPS + 1]
            for weights in ec.run(_loaded, 2, "threads", args=(folder,)):
                _equal(weights, expected)
        print(technique, "and its checkpoint")
    stages = ec.run(_pipeline, RANKS, "threads")
    _equal({name: value for stage in stages for name, value in stage.items()}, expected)
    print("pipeline")
    import echelon.c10d

    assert ec.run(_torch_program, RANKS, "threads") == [6.0] * RANKS
    print("torch.distributed")
    with tempfile.TemporaryDirectory() as folder:
        ec.run(_recorded, 2, "threads", args=(folder,))
        assert (Path(folder) / "run" / "report.html").exists()
    print("recorder and black box")
    assert ec.run(_stopped, 2, "threads") == ["SIGTERM"] * 2
    print("stop signals")
    try:
        ec.run(_stopped, 2, "processes")
    except ec.UnsupportedError as error:
        print("refused:", error)


def gloo_rank() -> None:
    """One rank of a job that torchrun has started."""
    import echelon as ec

    if sys.platform != "linux":
        try:
            ec.init("shm")
        except ec.UnsupportedError as error:
            print("refused:", error)
    with ec.init() as world:
        model, optimizer = _wrapped(world, "fsdp")
        _train(model, optimizer, world.rank, world.size)
        _equal(dict(model.state_dict()), _alone())
        print(f"rank {world.rank} over {world.backend}")


if __name__ == "__main__":
    # No git: where a run comes from would ask it, by a subprocess of the real system.
    os.environ["PATH"] = ""
    if sys.argv[1:]:
        from tests.hidden_system import hide

        hide(sys.argv[1])
    if "RANK" in os.environ:
        gloo_rank()
    else:
        simulated_ranks()
        imports()
        print("imports")
