"""What the ranks of a job train on simulated devices, each in a process with a device of its own.

    torchrun --nproc-per-node 2 -m tests.device.ranks OUTPUT

Each rank writes a line for each program into its file: what raced, or how it has failed. On two
ranks, each wait of rooms whose waits need peers, such as ``pipeline``, is left out once.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import echelon as ec
from echelon import Offload
from echelon.pipeline.schedules.families import FAMILIES
from echelon.testing.device.report import Frame
from echelon.testing.device.simulated import install
from echelon.testing.device.torch_module import DEVICE
from tests.cuda import test_ddp, test_fsdp, test_pipeline, training
from tests.cuda.training import assert_trained
from tests.device.programs import BF16, Block, Model, Training
from tests.device.waits import is_found, places, room, run, site

Program = Callable[[ec.World], object]


# Pipelines ---------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A block whose output is too large to be packed with others."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.scale = Block(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.scale


def trained_in_stages(schedule: str, chunks: int, world: ec.World) -> None:
    """The stages together have the numbers of one process."""
    state = test_pipeline.trained(world, schedule, chunks, microbatches=8)
    parts = world.group.all_gather_object({name: value.cpu() for name, value in state.items()})
    assert_trained({name: value for part in parts for name, value in part.items()}, ranks=2)


def steps_of_changing_sizes(
    schedule: str, chunks: int, stage: type[nn.Module], rows: int, world: ec.World
) -> None:
    with world.device:
        modules = [stage() for _ in range(chunks * world.size)]
    pipe = ec.Pipeline(
        modules, world.group, microbatches=6, schedule=schedule, loss_fn=nn.MSELoss()
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    for count in (rows, rows, rows // 2, rows):
        x = torch.ones(count, 8, device=world.device)
        pipe.step(x, target=torch.zeros_like(x))
        ec.clip_grad_norm_(pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        pipe(torch.ones(rows, 8, device=world.device))


def pipelines() -> Iterator[tuple[str, Program]]:
    for schedule, family in FAMILIES.items():
        if schedule == "forward-only":
            continue
        yield schedule, partial(trained_in_stages, schedule, family.chunks or 2)
        name = f"{schedule}, sizes that change"
        yield name, partial(steps_of_changing_sizes, schedule, family.chunks or 2, Block, 12)
    for schedule in ("gpipe", "zb-v"):
        chunks = FAMILIES[schedule].chunks or 1
        name = f"{schedule}, large messages"
        yield name, partial(steps_of_changing_sizes, schedule, chunks, Wide, 12288)


# Saves -------------------------------------------------------------------------------------------


def saves_beside_training(
    make: Callable[[nn.Module, ec.Group], nn.Module], world: ec.World
) -> None:
    with TemporaryDirectory() as own:
        folder = world.group.broadcast_object(own)
        with world.device:
            one = Training(make(Model(), world.group), world.group)
            one.step(1)
            for step in (1, 2):
                saving = ec.async_save(folder, step=step, model=one.model, optimizer=one.optimizer)
                one.step(2)
                saving.wait()
            ec.load(folder, model=one.model, optimizer=one.optimizer)
            one.step(1)
        world.group.barrier()


def saves() -> Iterator[tuple[str, Program]]:
    blocks = ec.units.by_type(Block)
    for name, make in {
        "DDP": ec.DDP,
        "FSDP": partial(ec.FSDP, units=blocks, min_num_params=20),
        "FSDP by rows": partial(ec.FSDP, units=blocks, min_num_params=20, layout="rows"),
        "FSDP offloaded": partial(ec.FSDP, units=blocks, offload=Offload.ALL, precision=BF16),
    }.items():
        yield f"saves of {name}", partial(saves_beside_training, make)


# A training of ``tests.cuda`` on all ranks of the job ---------------------------------------------


def trainings() -> Iterator[tuple[str, Program]]:
    for module in (test_ddp, test_fsdp):
        for name, case in module.CASES.items():
            test = partial(module.test_training_equals_one_process, DEVICE, case)
            yield f"{module.__name__.rpartition('_')[2]} {name}", partial(in_job, test)
    yield (
        "ddp, on request",
        partial(
            in_job,
            partial(test_ddp.test_gradients_that_are_reduced_on_request_equal_one_process, DEVICE),
        ),
    )
    yield (
        "fsdp, accumulated",
        partial(
            in_job, partial(test_fsdp.test_accumulation_without_sync_equals_one_backward, DEVICE)
        ),
    )


def in_job(test: Callable[[], None], world: ec.World) -> None:
    training.job = world
    test()


PROGRAMS: dict[str, Program] = {**dict(trainings()), **dict(pipelines()), **dict(saves())}
# Rooms whose waits need peers that answer; those of one rank are in ``test_each_wait_is_needed``.
ROOMS = ("pipeline", "checkpoint")
MOST = 4  # programs in which a wait is left out, before it counts as covered


def main(output: str) -> None:
    """Run all programs, and leave out each wait of ``ROOMS`` once."""
    install()
    world = ec.init()
    waits: dict[Frame, list[str]] = {}
    with Path(output, f"rank{world.rank}.jsonl").open("w") as file:

        def write(**line: Any) -> None:
            print(json.dumps(line), file=file, flush=True)

        for name, program in PROGRAMS.items():
            try:
                device = run(partial(program, world))
            except Exception:
                write(program=name, problem=traceback.format_exc())
                raise
            report = device.report()
            write(program=name, problem=str(report) if report else "")
            for place in places(device.waits):
                if room(place) in ROOMS:
                    waits.setdefault(place, []).append(name)
        if world.size > 2:
            return
        # The same ones on all ranks, or they would wait for one another.
        union: dict[Frame, list[str]] = {}
        for of_rank in world.group.all_gather_object([(tuple(f), n) for f, n in waits.items()]):
            for frame, names in of_rank:
                union.setdefault(Frame(*frame), []).extend(names)
        for place in sorted(union):
            names = list(dict.fromkeys(union[place]))[:MOST]
            found = [is_found(place, partial(PROGRAMS[name], world)) for name in names]
            write(wait=site(place), found=any(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
