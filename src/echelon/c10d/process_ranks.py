"""Programs of ``torch.distributed`` in the processes that ``echelon.run`` starts.

They find torchrun's variables and meet in a store in memory, so no port is opened.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch._C import _distributed_c10d as c10d

from echelon.c10d.rank_variables import rank_variables, timeout_variable
from echelon.c10d.served_backends import serve_this_process
from echelon.comm.torch_dist.stores import open_memory_store
from echelon.process.replacement import Replacement

# ``torch.distributed`` has a function of the same name.
rendezvous = importlib.import_module("torch.distributed.rendezvous")

_PORT = 29_500  # nothing listens there


def start_rank(rank: int, size: int, store_path: str, timeout: float) -> None:
    """Let this process be a rank for ``torch.distributed``, too, until it ends.

    Args:
        store_path: of the store that the ranks share.
        timeout: seconds that a rank waits for others in one call.
    """
    os.environ.update(rank_variables(rank, size, _PORT) | timeout_variable(timeout))
    numbers = count()

    def meet(
        url: str, timeout: timedelta | None = None, **_: Any
    ) -> Iterator[tuple[Any, int, int]]:
        """Find the other ranks, as ``env://`` does at a port."""
        query = parse_qs(urlparse(url).query)
        place = int(query.get("rank", [os.environ["RANK"]])[0])
        total = int(query.get("world_size", [os.environ["WORLD_SIZE"]])[0])
        store = open_memory_store(store_path)
        yield c10d.PrefixStore(f"torch.distributed {next(numbers)}", store), place, total

    handlers = {**rendezvous._rendezvous_handlers, "env": meet}
    Replacement(rendezvous, "_rendezvous_handlers", handlers).put_in()
    serve_this_process()
