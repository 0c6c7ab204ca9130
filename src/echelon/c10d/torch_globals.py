"""Globals of ``torch.distributed`` that each simulated rank has for itself, and why.

PyTorch keeps what a rank knows of its groups in globals, because a rank is a process. Simulated
ranks share a process and take turns, so these globals are exchanged at each turn, and the caller's
are put back when the ranks end. This is the only file that knows them.

Law: what a rank finds in a place of ``PLACES`` was put there by itself, or was there at first.

[Note: the registry in C++]
Functional collectives and ``DeviceMesh`` find a process group by its name in a registry of the
process. Ranks have groups of the same names. The registry has nothing but what ``_pg_names`` has,
so at a turn it is emptied and filled again; 6 groups take 2 µs. torch's own mode that makes it a
registry of each thread would hide it from threads that a rank starts.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from echelon.comm.threads.kept_by_threads import keep, kept
from echelon.comm.threads.process_state import register_state
from echelon.comm.threads.rank_threads import resume_if_overtaken
from echelon.comm.threads.replaced_names import Names, Place, Values, empty


class GroupsOfTurn(distributed_c10d._World):
    """What a rank finds behind ``_world``: its own groups, also if it was overtaken.

    A rank that has blocked outside of groups goes on while another has its turn. It takes its turn
    back here, before it could find the default group of the other. A thread that a rank has started
    never has its turn, and finds what that rank had then.
    """

    def __getattribute__(self, name: str) -> Any:
        """Read from the world of the rank that has its turn then."""
        resume_if_overtaken()
        if (groups := kept("groups")) is not None and name in groups:
            return groups[name]
        return object.__getattribute__(distributed_c10d._world, name)


def _always(value: Any) -> Callable[[Any], Any]:
    """What makes this value, whatever is there."""
    return lambda _: value


_none, _zero, _false = map(_always, (None, 0, False))
_copy = methodcaller("copy")

_C10D = "torch.distributed.distributed_c10d"
_TENSOR = "torch.distributed.tensor"
_CONTEXT = f"{_TENSOR}.experimental._context_parallel"
_CHECKPOINT = "torch.distributed.checkpoint"
_WRAP = "torch.distributed.fsdp.wrap"
_IN_WRAP = "set while the body of enable_wrap runs, in which FSDP may communicate"
_GROUPS = "each rank has process groups of its own, with the rank that it has in them"

PLACES: tuple[Place, ...] = (
    Place(_C10D, ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config"), empty, _GROUPS),
    Place(_C10D, ("_tags_to_pg", "_pg_to_tag"), empty, _GROUPS),
    Place(
        _C10D,
        ("_world",),
        lambda _: GroupsOfTurn(),
        "has the default group, and calls that are being coalesced",
    ),
    Place("sys", ("excepthook",), reason="init_process_group has it print this rank's number"),
    Place(_C10D, ("_group_count",), _zero, "names the next group, alike on all ranks"),
    Place(_C10D, ("_backend", "_default_pg_init_method"), _none, "of the default group"),
    Place(
        "torch.distributed._shard.api",
        ("_CURRENT_PROCESS_GROUP",),
        _none,
        "the group of load_with_process_group, while the body of the with statement runs",
    ),
    Place(
        "torch.distributed._shard.sharded_tensor.api",
        ("_sharded_tensor_map",),
        empty,
        "sharded tensors of this rank by numbers that all ranks count alike",
    ),
    Place(
        "torch.distributed._shard.sharded_tensor.api",
        ("_sharded_tensor_current_id",),
        _zero,
        "counts the sharded tensors of this rank",
    ),
    Place(
        "torch.nn.parallel.distributed",
        ("DistributedDataParallel._active_ddp_module",),
        _none,
        "the module whose forward runs, which may wait for other ranks",
    ),
    Place(
        f"{_TENSOR}._random",
        ("_rng_tracker",),
        _none,
        "the offsets of the random streams of this rank's shards",
    ),
    Place(
        f"{_TENSOR}._api",
        ("DTensor._op_dispatcher._custom_op_handlers",),
        _copy,
        "loss_parallel and context_parallel add operators while their bodies run",
    ),
    Place(
        f"{_TENSOR}._redistribute",
        ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN",),
        _none,
        "set while the body of a with statement runs",
    ),
    Place(
        f"{_TENSOR}._redistribute",
        ("_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",),
        _false,
        "set while the body of a with statement runs",
    ),
    Place(
        f"{_CONTEXT}._attention",
        ("_dispatch_mode", "_cp_options", "_compiled_create_block_mask"),
        reason="set while the body of context_parallel runs, and how it does",
    ),
    Place(
        f"{_CONTEXT}._attention",
        ("_replaced_functions",),
        _copy,
        "the functions that context_parallel has replaced while its body runs",
    ),
    Place(
        f"{_CONTEXT}._sharding_rules",
        ("_cp_strategy_contexts", "_original_strategies"),
        _copy,
        "the rules that context_parallel has replaced while its body runs",
    ),
    Place(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        ("_enable_fsdp_module_new_init",),
        reason="switched off while a module is copied",
    ),
    Place(
        "torch.distributed.fsdp._fsdp_extensions",
        ("_extensions",),
        _none,
        "tensor parallelism below FSDP of this rank's model, with its mesh",
    ),
    Place(_WRAP, ("_ConfigAutoWrap.in_autowrap_context",), _false, _IN_WRAP),
    Place(_WRAP, ("_ConfigAutoWrap.wrapper_cls",), _none, _IN_WRAP),
    Place(_WRAP, ("_ConfigAutoWrap.kwargs",), empty, _IN_WRAP),
    Place(
        "torch.distributed.fsdp._debug_utils",
        ("SimpleProfiler.profiling",),
        empty,
        "what FSDP measures while it makes a state dict of an optimizer",
    ),
    Place(
        "torch.distributed.fsdp._debug_utils",
        ("SimpleProfiler.results",),
        _copy,
        "the seconds of it",
    ),
    Place(
        "torch.nn.utils.parametrize",
        ("_cache_enabled",),
        _zero,
        "counts the bodies of parametrize.cached that run",
    ),
    Place(
        "torch.nn.utils.parametrize",
        ("_cache",),
        empty,
        "tensors that this rank has computed in the body of parametrize.cached",
    ),
    Place(
        f"{_CHECKPOINT}.planner",
        (
            "SavePlanner._cached_save_plan",
            "SavePlanner._cached_final_save_plan",
            "SavePlanner._cached_all_plans",
            "SavePlanner._cached_global_plan",
            "SavePlanner._cached_metadata",
        ),
        empty,
        "what this rank saves, by the class of the planner",
    ),
    Place(
        f"{_CHECKPOINT}._async_process_executor",
        ("_CHECKPOINT_PROCESS",),
        _none,
        "the process that writes this rank's shards",
    ),
    Place(
        f"{_CHECKPOINT}.state_dict",
        ("_patched_state_dict",),
        empty,
        "the methods of this rank's modules and optimizers that are replaced",
    ),
    Place(
        "torch.distributed._symmetric_memory",
        ("_group_name_to_store", "_group_name_to_workspace_tensor"),
        empty,
        "memory and stores of this rank by the names of its groups",
    ),
)

_globals = Names(PLACES)


def _restore(values: Values) -> None:
    had_groups = bool(distributed_c10d._pg_names)
    _globals.write(values)
    if had_groups or distributed_c10d._pg_names:  # see [Note: the registry in C++]
        c10d._unregister_all_process_groups()
        for group, name in distributed_c10d._pg_names.items():
            c10d._register_process_group(name, group)


register_state("torch.distributed", _globals.read, _restore, _globals.first_values)
# How much C++ code says of its calls, which torch reads from a variable.
register_state("debug level", c10d.get_debug_level, c10d.set_debug_level)
_OF_THREADS = (
    *("default_pg", "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
    *("tags_to_pg", "pg_to_tag", "pg_coalesce_state", "comms"),
)
keep("groups", lambda: {name: getattr(distributed_c10d._world, name) for name in _OF_THREADS})
