"""Numbers of the library from which on it does something in another way, set to tiny values.

A way that begins at 1 MiB is otherwise never taken by a small model. ``DRAWN`` has the values that
are drawn of each threshold; ``FIXED`` says why any other number of these packages is none. A number
that is in neither fails ``test_every_threshold_is_drawn``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.generated.trees import Dice

PACKAGES = ("comm", "ddp", "fsdp", "modules", "pipeline", "plans", "state")

DRAWN: dict[str, tuple[int, ...]] = {
    "comm.buffers:_LARGE_NBYTES": (0, 64),
    "comm.object_bytes:_SMALL_NBYTES": (0, 64),
    "comm.reduce_op:BLOCK_NUMEL": (1, 5),
    "comm.shm.collectives:SLOT_NBYTES": (0, 64, 512),  # the memory of the slots stays as it is
    "comm.shm.direct:_MAX_BLOCK_NBYTES": (64, 512),
    "comm.shm.direct:_SCRATCH_NBYTES": (256, 2048),
    "comm.shm.message_ring:_MAX_PIECE_NBYTES": (64, 192),
    "comm.shm.staged:HALF_NBYTES": (256, 4096),
    "comm.torch_dist.algorithms:FLAT_BROADCAST_NBYTES": (0, 64),
    "comm.torch_dist.algorithms:ONE_ROUND_NBYTES": (0, 64),
    "comm.torch_dist.algorithms:PIECE_NBYTES": (64, 1024),
    "comm.torch_dist.algorithms:SCRATCH_NBYTES": (256, 4096),
    "ddp.buckets:ALIGN_NUMEL": (1, 64),
    "fsdp.execution_order:MAX_FORWARDS": (1, 2),
    "fsdp.forward_writes:_EVERY": (1, 3),
    "fsdp.shard_layout:ALIGN_NBYTES": (16, 256),
    "fsdp.shard_layout:_LEAST_ALIGNED": (1, 4),
    "fsdp.unsharder:MAX_PREFETCHED": (1, 4),
    "modules.sharded_tensor:_MAX_ALIASES": (0, 1),
    "pipeline.packed_message:MAX_PACKED_NBYTES": (0, 64),
    "pipeline.schedules.passes:MAX_AHEAD": (0, 1),
    "pipeline.splitting.fake_tensors:_MAX_RESULTS": (0, 2),
    "pipeline.step_specs:_MAX_KINDS": (0, 1),
    "pipeline.weight_gradients:_MIN_NUMEL": (0, 8),
}

# Parts of names of numbers from which nothing depends but texts, times and formats.
FIXED: dict[str, str] = {
    ":_MOST_": "how much a text or a picture shows",
    ":_MAX_MESSAGE": "how long a text is",
    ":_NUM_LISTED": "how long a text is",
    ":_TEXT": "how long a text is",
    ":_WRITTEN": "a version that no tensor has",
    ":_MAX_FRAMES": "how far an error looks for the line of the user",
    "_S": "seconds",
    "comm.secret:": "the lengths of keys",
    "comm.shm.area:": "the form of shared memory, which all ranks and processes have to know",
    "comm.shm.rank_table:": "the form of shared memory",
    "comm.shm.segment:": "memory that is left for others",
    "comm.shm.peer_memory:": "a number that says that memory is ours",
    "comm.shm.futex:": "an argument of the system",
    "comm.shm.collectives:_WINDOW_SHIFT": "the form of a number",
    "comm.shm.message_ring:_": "the form of a message",
    "comm.object_bytes:_": "the form of a message",
    "comm.threads.": "simulated ranks: how they take turns, and the form of random streams",
    "comm.torch_dist.algorithms:_ALIGN": "the form of memory",
    "comm.torch_dist.peers:": "tags",
    "comm.torch_dist.proof:": "the tags of a start",
    "plans.plan_view:": "the form of a picture",
    "comm.torch_dist.stall_watch:": "how much is kept for a text",
    "comm.torch_dist.start:_TRIALS": "how often a start is tried",
    "ddp.buckets:": "the places of the notices",
    "modules.data_watch:": "which forwards are compared for a warning, which changes no number",
    "modules.optimizer_memory:": "how what an optimizer keeps is compared in its trial",
    "modules.optimizer_trial:": "what an optimizer is tried on: tests/modules/test_optimizer_trial",
    "modules.plain_steps:_KEY": "a key among the hooks of an optimizer",
    "modules.nested:_DEEPEST": "how deep tensors are found, which is documented",
    "pipeline.link:": "the form of a message",
    "pipeline.measure:": "how much is kept for a text",
    "pipeline.microbatch:_UNUSABLE": "a mark",
    "pipeline.packed_message:_ALIGNMENT": "the form of a message",
    "pipeline.recomputed_buffers:": "with less, statistics of fused kernels would seem unchanged",
    "pipeline.schedules.": "schedules are checked on their own: tests/pipeline/schedules",
    "pipeline.splitting.block_costs:_RUNS": "how often a time is measured",
    "pipeline.splitting.split:_NUM_COPIES": "a guess of memory",
    "pipeline.weight_gradients:_WEIGHT": "a place among arguments",
}


def numbers() -> Iterator[tuple[str, int | float]]:
    """Every number that a module of ``PACKAGES`` defines, as ``"module:NAME"``, and all drawn."""
    for package in PACKAGES:
        root = importlib.import_module(f"echelon.{package}")
        names = [root.__name__]
        names += [m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
        for name in names:
            module = importlib.import_module(name)
            source = inspect.getsource(module)
            for constant, value in vars(module).items():
                place = f"{name.removeprefix('echelon.')}:{constant}"
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_own = re.search(rf"^(\w+, )*{constant}\b[^=\n]* = ", source, re.MULTILINE)
                if is_number and constant.isupper() and (is_own or place in DRAWN):
                    yield place, value


def draw_thresholds(block: int) -> dict[str, int]:
    """Values for the cases of a block of seeds; in every other block the library's own.

    There parameters have real sizes: a large one in tiny pieces would take minutes.
    """
    dice = Dice(f"thresholds {block}")
    if block % 2:
        return {}
    return {name: dice.choice(values) for name, values in DRAWN.items() if dice.chance(0.5)}


@contextmanager
def thresholds_set(values: Mapping[str, int]) -> Iterator[None]:
    """Set them in this process, in the module that compares with them, while the body runs."""
    before = {}
    for place, value in values.items():
        name, _, constant = place.partition(":")
        module = importlib.import_module(f"echelon.{name}")
        before[place] = getattr(module, constant)
        setattr(module, constant, value)
    try:
        yield
    finally:
        for place, value in before.items():
            name, _, constant = place.partition(":")
            setattr(sys.modules[f"echelon.{name}"], constant, value)
