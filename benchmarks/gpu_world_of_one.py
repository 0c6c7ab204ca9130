"""Every technique in a world of one rank, in one process: are the losses the same, bit for bit.

It also shows what a technique adds to a step by itself: its Python, its copies and its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import arguments, forget, joined
from gpu_step import WARM_UP, config_of, measure
from gpu_variants import MIXED, Wrap, wrappers

from tests.cuda.lines import run_lines

STEPS = 20
ROUGHLY = 3  # timed steps of a try on a CPU
LINE_S = 40.0


def deterministic() -> None:
    """Have torch choose kernels whose sums have one order; warn of those that have none."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would take time of each step


def main() -> int:
    options, device = arguments(__doc__)
    deterministic()
    config = config_of(options.tiny)
    num_steps = ROUGHLY if options.tiny else STEPS - WARM_UP

    def line(variant: str, wrap: Wrap) -> Mapping[str, Any]:
        facts = {"kind": "step", "ranks": 1, "network": None, "model": "llama"}
        is_mixed = MIXED in variant
        return facts | measure(variant, config, wrap, device, num_steps=num_steps, float32=is_mixed)

    with joined(device) as world:
        lines = [
            (variant, partial(line, variant, wrap))
            for variant, wrap in wrappers(world, device).items()
        ]
        code = run_lines(lines, device.type, options.after, LINE_S)
    forget(device)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
