"""What names of ``torch.distributed`` mean to simulated ranks: stores without ports, our groups.

The names are state of each rank, so the caller's are back when the ranks have ended.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from functools import wraps
from typing import Any, final

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  # defaults to the default group of its import
from torch.distributed import device_mesh, distributed_c10d

from echelon.c10d import (  # register state
    library_globals,  # noqa: F401
    rank_limits,  # noqa: F401
    rank_saving,  # noqa: F401
    simulated_rank,
    torch_globals,  # noqa: F401
)
from echelon.c10d.process_group import check_p2p_op_list
from echelon.c10d.rank_variables import rank_variables, timeout_variable
from echelon.c10d.served_backends import FACTS_OF_CALLS, new_process_group, set_group_timeout
from echelon.c10d.simulated_store import (
    SimulatedFileStore,
    SimulatedHashStore,
    SimulatedTCPStore,
    hub_of,
)
from echelon.comm.threads import rank_profiler  # noqa: F401  # the same
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.replaced_names import register_replacements
from echelon.process.offered_debugger import open_debugger

# ``torch.distributed`` has a function of the same name.
rendezvous = importlib.import_module("torch.distributed.rendezvous")

_init_mesh = device_mesh.DeviceMesh.__init__


@wraps(_init_mesh)
def _init_mesh_of_rank(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make meshes of different ranks differ, or caches by meshes would give one that of another."""
    _init_mesh(self, *args, **kwargs)
    self._thread_id = threading.get_ident()


@final
class BreakpointOfRank:
    """Opens the debugger of all ranks where ``torch.distributed.breakpoint`` is called.

    Torch's own reads from a terminal, which each process would have for itself.
    """

    def message(self, text: str) -> None:
        """Leave out the advice to go up a frame, since this debugger stops in that frame."""

    def set_trace(self) -> None:
        """Stop in the line that has called ``torch.distributed.breakpoint``."""
        frame = sys._getframe(1).f_back  # its caller
        assert frame is not None
        open_debugger(frame)


register_replacements(
    "names of torch.distributed",
    (
        (distributed_c10d, "_new_process_group_helper", new_process_group),
        (distributed_c10d, "_set_pg_timeout", set_group_timeout),
        (device_mesh.DeviceMesh, "__init__", _init_mesh_of_rank),
        *FACTS_OF_CALLS,
        (dist, "_make_distributed_pdb", BreakpointOfRank),
        *(
            (module, name, value)
            for module in (dist, distributed_c10d, rendezvous)
            for name, value in (
                ("_check_p2p_op_list", check_p2p_op_list),
                ("TCPStore", SimulatedTCPStore),
                ("FileStore", SimulatedFileStore),
                ("HashStore", SimulatedHashStore),
            )
            if name in vars(module)
        ),
    ),
)


def start_rank(group: ThreadGroup) -> None:
    """Let the simulated rank that runs now be one for ``torch.distributed``, too.

    Args:
        group: of all ranks.
    """
    simulated_rank.set_world_group(group)
    variables = rank_variables(group.rank, group.size, hub_of(group).master_port)
    os.environ.update(variables | timeout_variable(group.timeout))
