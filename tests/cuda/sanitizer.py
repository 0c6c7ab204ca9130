"""The tests of this folder on one rank under torch's CUDA sanitizer, CSAN.

CSAN sees operators of this thread and of its backwards, and what streams wait for. It sees the
collectives of a process group, but not those of an engine that is called directly, so there is a
default process group here, which ``connect`` takes over. Simulated ranks are threads of their own,
which it does not see: they are left out.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.cuda import training
from tests.cuda.lines import LeftOut, Line
from tests.processes import free_port


def under_sanitizer(device: str, lines: list[tuple[str, Line]]) -> list[tuple[str, Line]]:
    """Have the sanitizer watch from now on; instead of ``lines``, one that says why it cannot."""

    def lacking() -> None:
        raise LeftOut("torch's CUDA sanitizer, which needs a CUDA device")

    if device != "cuda":
        return [("CUDA sanitizer", lacking)]
    from torch.cuda._sanitizer import enable_cuda_sanitizer

    enable_cuda_sanitizer()
    place = torch.device("cuda", 0)
    torch.cuda.set_device(place)
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1, device_id=place)
    training.with_simulated_ranks = False
    return [(title, line) for title, line in lines if "hybrid" not in title]  # four simulated ranks
