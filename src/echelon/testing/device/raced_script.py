"""A rank of ``echelon race``: runs a script on the simulated device and writes what was found.

python -m echelon.testing.device.raced_script FOLDER ORDER SEED SCRIPT [ARGUMENTS]...
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path
from threading import Event

import torch

from echelon.process.atomic_files import replace_file
from echelon.process.background_threads import run_in_background
from echelon.testing.device.cuda_names import served_cuda
from echelon.testing.device.simulated import (
    Order,
    SimulatedDevice,
    install,
    simulated_device,
)

_LOOK_S = 1.0


def main(folder: str, order: str, seed: str, script: str, *arguments: str) -> None:
    """Run the script as ``__main__``; what is found is written even if it raises."""
    rank = int(os.environ.get("RANK", "0"))
    install()
    torch.manual_seed(0)  # or a script without a seed would see other values in each run
    random.seed(0)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with simulated_device(Order[order], int(seed) + rank) as device, served_cuda():
        ends = Event()
        run_in_background("race", _look, device, ends, stop=ends.set)
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            ends.set()
            report = device.report()
            found = {
                "races": report.texts(),
                "digests": [f"{digest:x}" for digest in device.digests()],
            }
            path = Path(folder, f"rank{rank}.json")
            replace_file(path, json.dumps(found).encode(), sync=False)


def _look(device: SimulatedDevice, ends: Event) -> None:
    while not ends.wait(_LOOK_S):
        device.look()


if __name__ == "__main__":
    main(*sys.argv[1:])
