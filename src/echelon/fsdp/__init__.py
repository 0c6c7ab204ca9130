"""Fully sharded data parallelism: each rank keeps a shard of every unit. See ``api``.

A parameter goes from ``hooks`` over ``unsharder``, ``unit`` and ``storages`` to its all-gather, and
its gradient from ``backward`` over ``gradient_reducer`` to the reduction in ``gradients``.

``api``               the wrapper that trains
``policy``            what can be chosen: strategies, dtypes, offload, prefetch
``units``             which modules become units
``shard_layout``      which rank has what of a buffer; pure arithmetic
``hybrid_groups``     the ranks that a model is sharded over, and those with the same shard
``local_shard``       this rank's shard: in which memory it lies, and on which streams it moves
``storage``           the memory of parameters of one kind: shards, and unsharded parameters
``storages``          the kinds of storage: shared, gathered, replicated
``gradients``         from unsharded gradients to this rank's reduced shard of them
``unit``              the states of a unit: sharded, unsharding, unsharded, hidden
``execution_order``   in which order units are unsharded and reduced, the same on all ranks
``pass_state``        what one forward and one backward know of the units
``unsharder``         unshards units when passes reach them, and ahead of that
``gradient_reducer``  collects gradients and launches their reductions
``backward``          which units a backward has reached, left and completed
``hooks``             when units are unsharded in forward, and when shards may be written
``build``             from a module to units with memory and initial values, and back
``guards``            what code outside may not do with shards
``sharded_module``    what a sharded model is when it does not train
``unit_info``         what a user can ask about units and memory
``state_dict``        copies of parameters, hooks that load them, and what this rank holds

To add a strategy: a member of ``Strategy`` with its row in the table of ``policy``, and, if its
memory is none of the known ones, a kind of storage with its condition in ``storages.make_storage``.
"""

from echelon.fsdp.api import FSDP
from echelon.fsdp.policy import BackwardPrefetch, MixedPrecision, Offload, Strategy

__all__ = ["FSDP", "BackwardPrefetch", "MixedPrecision", "Offload", "Strategy"]
