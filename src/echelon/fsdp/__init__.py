"""Fully sharded data parallelism: each rank keeps a shard of every unit. See ``api``.

An unshard passes from a hook in ``hooks`` through ``unsharder``, ``unit`` and ``storage_kinds`` to
the all-gather. A gradient passes from a hook in ``backward`` through ``gradient_reducer`` to the
reduction in ``gradients``.

``api``               the wrapper that trains
``policy``            the options: strategies, dtypes, offload, prefetch
``units``             which modules become units
``shard_layout``      which rank has which elements of a buffer; pure arithmetic
``hybrid_groups``     the shard group, and the replicas of each shard (HSDP)
``local_shard``       this rank's shard: in which memory it is, and which streams copy it
``shard_update``      values that users give for all shards of a rank in one tensor
``storage``           the memory of parameters of one kind: shards, and unsharded parameters
``storage_kinds``     the kinds of storage: shared, gathered, replicated
``storage_shardings``  which parts of which parameters a storage shows to users
``gradient_buffer``   the memory in which the unsharded gradients of one storage travel
``gradients``         from unsharded gradients to this rank's reduced shard of them
``unit``              the states of a unit: sharded, unsharding, unsharded, hidden
``execution_order``   in which order units are unsharded and reduced, the same on all ranks
``pass_state``        the state of one forward and of one backward, unit by unit
``unsharder``         unshards units when passes reach them, and ahead of that
``gradient_reducer``  collects gradients and launches their reductions
``backward``          which units a backward has reached, left and completed; ``no_sync``
``hooks``             the hooks on modules, and when shards may be written
``forward_writes``    writes of a forward into its parameters
``evaluation_rounds`` evaluation where some ranks have no rows
``build``             from a module to units with memory, dtypes and initial values, and back
``guards``            keeps code outside from taking shards for unsharded parameters
``sharded_module``    ``state_dict``, ``whole_state_dict``, loading and copying of a sharded model
``fsdp_view``         what ``ec.show`` says about a sharded model
``unit_info``         the units, shards and memory of a model, as users see them
``state_dict``        copies of parameters, parts of states, and the ranges of this rank

A new strategy is a member of ``Strategy`` with its row in the table of ``policy``. If its memory is
of a new kind, add a subclass of ``Storage`` with its condition in ``storage_kinds.make_storage``.
"""

import echelon.fsdp.fsdp_view  # noqa: F401  # gives FSDP its view
from echelon.fsdp.api import FSDP
from echelon.fsdp.policy import BackwardPrefetch, MixedPrecision, Offload, Strategy
from echelon.fsdp.shard_layout import ShardInfo

__all__ = ["FSDP", "BackwardPrefetch", "MixedPrecision", "Offload", "ShardInfo", "Strategy"]
