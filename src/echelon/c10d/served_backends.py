"""Process groups of torch's own backends, which echelon serves on ranks that it has started.

A program that calls ``init_process_group("gloo")`` or ``("nccl")`` gets a group of simulated ranks,
or of processes in shared memory, and goes on as if the backend were the one that it has asked for.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch.distributed import c10d_logger, distributed_c10d

from echelon.c10d import simulated_rank
from echelon.c10d.group_agreement import agree_on_group, is_made_by_all
from echelon.c10d.named_process_group import BACKEND
from echelon.c10d.process_group import ProcessGroupEchelon
from echelon.errors.message_text import say
from echelon.process.environment import timeout_wanted
from echelon.process.replacement import Replacement

SERVED = frozenset({"gloo", "nccl", "mpi", "ucc", "xccl", "undefined", BACKEND})

OWN_VARIABLE = "ECHELON_OWN_BACKENDS"

# What a group gets from torch if the program gives it no timeout.
_DEFAULT_TIMEOUTS = (
    None,
    distributed_c10d.default_pg_timeout,
    distributed_c10d.default_pg_nccl_timeout,  # type: ignore[attr-defined]  # not in its __all__
)

# Of torch, also where something that waits for the first group is in its place.
_helper = distributed_c10d._new_process_group_helper
_original = getattr(_helper, "__wrapped__", _helper)
_set_timeout = distributed_c10d._set_pg_timeout
_said = threading.Event()


def is_served(backend: str) -> bool:
    """Whether a name of a backend, or a list of them by devices, is one that we serve.

    Example:
        >>> is_served("cpu:gloo,cuda:nccl"), is_served("fake")
        (True, False)
    """
    return all(part.rpartition(":")[2].lower() in SERVED for part in backend.split(","))


def serves_processes() -> bool:
    """Whether groups of processes are ours: not if the user wants torch's own, or has a GPU."""
    return os.environ.get(OWN_VARIABLE, "0") in ("", "0") and not torch.cuda.is_available()


@wraps(_original)
def new_process_group(
    group_size: int,
    group_rank: int,
    global_ranks_in_group: list[int],
    backend: Any,
    store: Any,
    group_name: Any,
    **options: Any,
) -> Any:
    """Make a process group as torch does, but on our groups if its backend is one that we serve."""
    is_simulated = simulated_rank.world_group() is not None
    if not is_served(backend) or not (is_simulated or serves_processes()):
        return _original(
            group_size, group_rank, global_ranks_in_group, backend, store, group_name, **options
        )
    if backend == "mpi" and not global_ranks_in_group:
        group_size, group_rank, store = _mpi_world()
    options |= {"backend_options": _is_beside_nccl(backend), "device_id": None}  # for our creator
    seconds = timeout_wanted(os.environ)
    if seconds is not None and options.get("timeout") in _DEFAULT_TIMEOUTS:
        options["timeout"] = timedelta(seconds=seconds)
    if global_ranks_in_group and is_made_by_all(group_name):
        agree_on_group(store, group_name, global_ranks_in_group, options["timeout"].total_seconds())
    ours = distributed_c10d.Backend(BACKEND)
    group, prefix_store = _original(
        group_size, group_rank, global_ranks_in_group, ours, store, group_name, **options
    )
    if isinstance(group, ProcessGroupEchelon):
        world = distributed_c10d._world
        world.pg_map[group] = (backend, prefix_store)
        world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(backend))
    if not global_ranks_in_group and group_rank == 0:
        _say_once(backend)
    return group, prefix_store


def _is_beside_nccl(backend: str) -> bool:
    """Whether a group of this backend is a further one, and not NCCL's, in a job over NCCL."""
    default = distributed_c10d.GroupMember.WORLD
    is_nccl = default is not None and "nccl" in distributed_c10d._world.pg_map[default][0]
    return is_nccl and "nccl" not in backend


@wraps(_set_timeout)
def set_group_timeout(timeout: timedelta, group: Any = None) -> None:
    """Change the timeout of a group as torch does, which knows no groups but its own."""
    group = distributed_c10d._get_default_group() if group is None else group
    if isinstance(group, ProcessGroupEchelon):
        group.set_timeout(timeout)
    else:
        _set_timeout(timeout, group)


def facts_of_call(func_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What torch logs of a call that raises.

    Torch's own asks for the version of NCCL where a group says that it is NCCL's, and a torch
    without NCCL raises that it knows none, in place of the error of the call.
    """
    return {"func_name": func_name, "global_rank": os.environ.get("RANK", "")}


# What torch without NCCL asks for in groups that are served as NCCL's.
FACTS_OF_CALLS = (
    () if distributed_c10d.is_nccl_available() else ((c10d_logger, "_get_msg_dict", facts_of_call),)
)

_REPLACEMENTS = (
    Replacement(distributed_c10d, "_new_process_group_helper", new_process_group),
    Replacement(distributed_c10d, "_set_pg_timeout", set_group_timeout),
    *(Replacement(*each) for each in FACTS_OF_CALLS),
)


def serve_this_process() -> None:
    """Have this process make the process groups that it asks torch for."""
    for replacement in _REPLACEMENTS:
        replacement.put_in()


def _mpi_world() -> tuple[int, int, Any]:
    """The size and the rank that MPI would know by itself, and a store."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    return size, rank, distributed_c10d.PrefixStore("mpi", store)


def _say_once(backend: str) -> None:
    if backend == BACKEND or _said.is_set():
        return
    _said.set()
    world = simulated_rank.world_group()
    if world is None:
        how = f"echelon's groups over shared memory ({OWN_VARIABLE}=1 keeps torch's own)"
    else:
        how = f"{world.size} simulated ranks of echelon, threads that take turns in this process"
    asked = "its default backend" if backend == "undefined" else f'"{backend}"'
    cuda = "" if torch.cuda.is_available() or "nccl" not in backend else ", on CPU tensors"
    say(f"echelon: init_process_group asks for {asked} and gets {how}{cuda}")
