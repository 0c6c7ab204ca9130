"""The schedules that tests go through, with the options that change them."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from echelon import Group, Pipeline
from echelon.pipeline import Schedule, schedule

# Name of the file in tests/golden: name of the schedule, chunks, options.
VARIANTS: dict[str, tuple[str, int, dict[str, int | bool]]] = {
    "gpipe": ("gpipe", 1, {}),
    "1f1b": ("1f1b", 1, {}),
    "interleaved-v2": ("interleaved", 2, {}),
    "interleaved-v2-factor1": ("interleaved", 2, {"factor": 1}),
    "interleaved-v4": ("interleaved", 4, {}),
    "looped-bfs-v2": ("looped-bfs", 2, {}),
    "zb-v2": ("zb", 2, {}),
    "zb-v2-k2": ("zb", 2, {"k": 2}),
    "zb-v4": ("zb", 4, {}),
    "zb-h1": ("zb-h1", 1, {}),
    "zb-h2": ("zb-h2", 1, {}),
    "zb-v": ("zb-v", 2, {}),
    "v-half": ("v-half", 2, {}),
    "v-min": ("v-min", 2, {}),
    "dualpipe-v": ("dualpipe-v", 2, {}),
    "dualpipe-v-fused": ("dualpipe-v", 2, {"fused": True}),
    "forward-only": ("forward-only", 1, {}),
    "forward-only-v2": ("forward-only", 2, {}),
}

# Those that train; four stages a rank show nothing that two do not.
TRAINING = [v for v, (name, chunks, _) in VARIANTS.items() if name != "forward-only" and chunks < 4]


def make(variant: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule of a variant."""
    name, chunks, options = VARIANTS[variant]
    return schedule(name, ranks * chunks, microbatches, ranks, **options)


def pipeline(
    variant: str, stages: Sequence[nn.Module], group: Group, microbatches: int, loss_fn: Any
) -> Pipeline:
    """A pipeline on the schedule of a variant."""
    name, _, options = VARIANTS[variant]
    return Pipeline(
        stages, group, microbatches=microbatches, schedule=name, loss_fn=loss_fn, **options
    )


def fewest(variant: str, ranks: int) -> int:
    """With how many microbatches a variant begins to run."""
    return 2 * ranks if variant.startswith("dualpipe") else 1


def every(ranks: range, microbatches: range) -> Iterator[Schedule]:
    """All variants of all these sizes that exist."""
    for variant in VARIANTS:
        for p in ranks:
            for m in microbatches:
                if m >= fewest(variant, p):
                    yield make(variant, p, m)
