"""Law *Memory* for pipelines: activations alive are those simulated; a step leaves nothing."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import echelon as ec
from echelon.comm.world import World
from echelon.pipeline.packed_message import MAX_PACKED_NBYTES
from tests.pipeline.models import Alive, Counted, batch, build, mse
from tests.pipeline.sizes import VARIANTS, make, pipeline
from tests.worlds import KINDS, run_world

MICROBATCHES = 8
# Of each shape; that a rank holds what was simulated, ``test_parity`` asks of all.
SOME = ["gpipe", "1f1b", "interleaved-v2", "zb-h2", "v-min", "dualpipe-v-fused"]


# --- how many ------------------------------------------------------------------------------------


def count(world: World, variant: str) -> tuple[int, int]:
    """Most graphs that autograd kept on this rank, and most microbatches that it held."""
    graphs = Alive()
    blocks = build("plain", world.size * VARIANTS[variant][1])
    stages = [Counted(block, graphs) for block in blocks]
    pipe = pipeline(variant, stages, world.group, MICROBATCHES, mse)
    x, y = batch(MICROBATCHES)
    pipe.step(x, target=y)
    assert graphs.now == 0
    return graphs.most, pipe.most_alive


def count_all(world: World, names: list[str]) -> list[tuple[int, int]]:
    return [count(world, name) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "names"),
    [("threads", 4, SOME), ("processes", 2, ["1f1b", "zb-v"]), ("gloo", 2, ["zb-h1"])],
)
def test_activations_alive_are_those_of_the_simulation(kind, ranks, names) -> None:
    by_rank = run_world(kind, count_all, ranks, (names,))
    for i, variant in enumerate(names):
        chunks, schedule = VARIANTS[variant][1], make(variant, ranks, MICROBATCHES)
        peaks = [round(one * chunks) for one in ec.pipeline.simulate(schedule).peak]
        if variant == "1f1b":
            assert peaks == [4, 3, 2, 1][4 - ranks :]
        for (graphs, held), peak in zip((found[i] for found in by_rank), peaks, strict=True):
            assert graphs <= peak, variant
            assert held == peak, variant


# --- how long ------------------------------------------------------------------------------------


class Watched:
    """The memory of tensors, without holding it; two that share memory count once."""

    def __init__(self) -> None:
        self._seen: dict[int, StorageWeakRef] = {}
        self.most = 0

    def add(self, tensor: Tensor) -> None:
        """Watch one, and count those that are alive with it."""
        ref = StorageWeakRef(tensor.untyped_storage())
        self._seen[ref.cdata] = ref
        self.most = max(self.most, self.num_alive)

    @property
    def num_alive(self) -> int:
        return sum(not ref.expired() for ref in self._seen.values())


class Passes(nn.Module):
    """A stage that saves its input and not its output, and watches both and their gradients."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_first = is_first
        self.inputs, self.outputs, self.gradients = Watched(), Watched(), Watched()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_first:  # the batch is the user's
            self.inputs.add(x)
            x.register_hook(self.gradients.add)
        output: Tensor = self.linear(x)
        self.outputs.add(output)
        output.register_hook(self.gradients.add)
        return output


WIDTH = 64
ROWS = 2 * MAX_PACKED_NBYTES // (8 * WIDTH)  # of a microbatch, which then is a message of its own


def watch(world: World, variant: str, rows: int) -> list[tuple[int, int, int]]:
    """Inputs, outputs and gradients of each stage of this rank that were alive at once."""
    num_stages = world.size * VARIANTS[variant][1]
    stages = [Passes(index == 0).double() for index in range(num_stages)]
    pipe = pipeline(variant, stages, world.group, MICROBATCHES, mse)
    x = torch.ones(rows * MICROBATCHES, WIDTH, dtype=torch.float64)
    gc.disable()  # nothing is left to the collector
    try:
        for _ in range(2):
            loss = pipe.step(x, target=x, loss_everywhere=True)
            del loss
            world.group.barrier()  # simulated ranks read the memory of others
            for stage in pipe.stages.values():
                for watched in (stage.inputs, stage.outputs, stage.gradients):
                    assert watched.num_alive == 0
    finally:
        gc.enable()
    return [
        (stage.inputs.most, stage.outputs.most, stage.gradients.most)
        for stage in pipe.stages.values()
    ]


def watch_all(world: World) -> list[Any]:
    return [watch(world, name, rows) for name in ("1f1b", "zb-v") for rows in (1, ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_outputs_and_gradients_are_freed_by_who_uses_them(kind) -> None:
    """Never more than activations, and one under way; also where no send says that it is done."""
    for rank, found in enumerate(run_world(kind, watch_all, 2)):
        for peak, by_stage in zip([2 - rank] * 2 + [4] * 2, found, strict=True):
            for mosts in by_stage:
                assert max(mosts) <= peak + 1
