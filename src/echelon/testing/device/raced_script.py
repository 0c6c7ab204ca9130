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

import torch

from echelon.process.atomic_files import replace_file
from echelon.testing.device.collectives import register_backend
from echelon.testing.device.cuda_names import served_cuda
from echelon.testing.device.simulated import Order, install, simulated_device


def main(folder: str, order: str, seed: str, script: str, *arguments: str) -> None:
    """Run the script as ``__main__``; what is found is written even if it raises."""
    rank = int(os.environ.get("RANK", "0"))
    install()
    register_backend()
    torch.manual_seed(0)  # or a script without a seed would see other values in each run
    random.seed(0)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with simulated_device(Order[order], int(seed) + rank) as device, served_cuda():
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            report = device.report()
            found = {
                "races": report.texts(),
                "digests": [f"{digest:x}" for digest in device.digests()],
            }
            path = Path(folder, f"rank{rank}.json")
            replace_file(path, json.dumps(found).encode(), sync=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
