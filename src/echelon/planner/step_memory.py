"""What a rank keeps at the peak of a step, by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.operations import PlannedModel
from echelon.planner.software_stack import Attention, SoftwareStack
from echelon.planner.stage_schedule import microbatches_under_way
from echelon.planner.stage_time import blocks_of_ranks
from echelon.planner.transformer import Transformer

# AdamW in mixed precision: a master weight and two moments in float32 (ZeRO, arXiv 1910.02054,
# section 3.1: K = 12).
_OPTIMIZER_BYTES = 12
_FLOAT32 = 4


@final
@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of one rank, in the moment when it has most.

    Attributes:
        rank_stage: the stage of ``pp`` that this is; all its ranks have as much.
        parameters: weights of 16 bits, or the rank's part of them.
        gradients: as long as the weights.
        optimizer: master weights and moments.
        gathered: whole parameters of the blocks that run and are prefetched, and the gradients of
            one before they are reduced.
        activations: what the backward needs, of all microbatches that are under way.
        working: what one block has besides while it is computed again.
        logits: of the last stage and their gradients.
    """

    rank_stage: int
    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    working: float
    logits: float

    @property
    def total(self) -> float:
        """All bytes that are allocated."""
        states = self.parameters + self.gradients + self.optimizer + self.gathered
        return states + (self.activations + self.working + self.logits)

    def categories(self) -> dict[str, float]:
        """Bytes by category."""
        names = [name for name in self.__dataclass_fields__ if name != "rank_stage"]
        return {name: getattr(self, name) for name in names}


def step_memory(
    model: PlannedModel, layout: Layout, stack: SoftwareStack, blocks: Sequence[int] | None = None
) -> StepMemory:
    """The memory of the rank that needs most.

    Args:
        blocks: of each rank of ``pp``; None: stages are cut evenly.
    """
    counts = blocks_of_ranks(model.layers, layout) if blocks is None else list(blocks)
    stages = (stage_memory(model, layout, stack, counts, stage) for stage in range(layout.pp))
    return max(stages, key=lambda memory: memory.total)


def stage_memory(
    model: PlannedModel, layout: Layout, stack: SoftwareStack, blocks: Sequence[int], stage: int
) -> StepMemory:
    """The memory of the ranks of one stage."""
    parts = RankParts.of(layout, blocks, stage)
    under_way = microbatches_under_way(layout, stage) / layout.chunks
    activations = rank_activations(microbatch_bytes(model, layout, stack), parts, under_way)
    states = rank_states(model, layout, stack, parts)
    return StepMemory(rank_stage=stage, **states._asdict(), **activations._asdict())


class RankParts(NamedTuple):
    """What a rank has of the model: blocks, and perhaps the embedding and the head."""

    blocks: int
    has_embedding: bool
    has_head: bool

    @classmethod
    def of(cls, layout: Layout, blocks: Sequence[int], rank: int) -> RankParts:
        """Those of a rank of ``pp``."""
        return cls(blocks[rank], rank == 0, rank == layout.head_rank)


class RankStates(NamedTuple):
    """Bytes that are there during the whole step; the same for all schedules and microbatches."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


class MicrobatchBytes(NamedTuple):
    """Bytes that a microbatch keeps in one block, that one block has besides, and of logits."""

    keep: float
    working: float
    logits: float


class RankActivations(NamedTuple):
    """Bytes of microbatches; the same for all ``shard`` and ``sharded``."""

    activations: float
    working: float
    logits: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)


def rank_states(
    model: PlannedModel, layout: Layout, stack: SoftwareStack, parts: RankParts
) -> RankStates:
    """Parameters, gradients and optimizer of a rank, and what it gathers and reduces of blocks."""
    elements = _elements(model, layout, parts)
    sharded, shard = layout.sharded, layout.shard
    width = stack.parameter_bytes
    block_bytes = width * _block_elements(model, layout)
    whole_parameters = sharded is not ShardedStates.PARAMETERS
    gradient_bytes = stack.gradient_bytes
    divided = shard if layout.shards_gradients else 1
    gathered = 0.0 if whole_parameters or shard == 1 else 2 * block_bytes
    trained = model.trained_share * elements
    reduced_bytes = model.trained_share * gradient_bytes / width * block_bytes
    parameters = width * elements / (1 if whole_parameters else shard)
    gradients = gradient_bytes * trained / divided
    # In 32 bits the parameters are what the optimizer updates, without a copy of them.
    kept = _OPTIMIZER_BYTES if stack.in_16_bits else _OPTIMIZER_BYTES - _FLOAT32
    optimizer = kept * trained / (1 if sharded is ShardedStates.NOTHING else shard)
    if layout.offload is not HostStates.NOTHING:
        optimizer = 0.0
        if divided > 1:  # else they are whole on the device until they are reduced
            gradients = 0.0
        if whole_parameters:
            parameters += width * elements / shard  # the 16-bit shards, beside what is gathered
        elif layout.offload is HostStates.ALL:
            parameters = 0.0
    return RankStates(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered + (reduced_bytes if divided > 1 else 0.0),
    )


def microbatch_bytes(model: PlannedModel, layout: Layout, stack: SoftwareStack) -> MicrobatchBytes:
    """What one microbatch needs; it is the same for all schedules and all that may be sharded."""
    keep = block_activations(model, layout, stack)
    inside = block_activations(model, layout, stack, recompute=Recompute.NOTHING)
    tokens = layout.microbatch * model.seq / layout.cp
    logits = tokens * model.vocab / layout.tp * (stack.parameter_bytes + 2 * _FLOAT32)
    return MicrobatchBytes(keep, inside - keep, logits)


def rank_activations(sizes: MicrobatchBytes, parts: RankParts, under_way: float) -> RankActivations:
    """What a rank keeps of microbatches.

    Args:
        under_way: so many microbatches in all its blocks, at its peak.
    """
    return RankActivations(
        activations=under_way * (parts.blocks * sizes.keep),
        working=sizes.working,
        logits=sizes.logits if parts.has_head else 0.0,
    )


def block_activations(
    model: PlannedModel,
    layout: Layout,
    stack: SoftwareStack,
    recompute: Recompute | None = None,
) -> float:
    """Bytes that one block keeps of one microbatch for its backward, on one rank.

    Each linear layer and each norm keeps its input, an activation function its input, attention its
    queries, keys, values and output; attention that is not fused the scores, too.
    """
    recompute = layout.recompute if recompute is None else recompute
    if not isinstance(model, Transformer):
        return model.block_activations(layout, recompute)
    tokens = layout.microbatch * model.seq / layout.cp
    tp, nbytes = layout.tp, stack.parameter_bytes
    stream = tokens * model.hidden * nbytes / (tp if layout.sequence_parallel else 1)
    if recompute is Recompute.BLOCKS:
        return stream
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    heads = tokens * (2 * width + 2 * kv_width) / tp * nbytes
    inner = tokens * model.active_experts * model.ffn / tp * nbytes * (4 if model.gated else 2)
    kept = 4 * stream + heads + inner  # two norms: their inputs and what they give
    if stack.attention is not Attention.FUSED and recompute is Recompute.NOTHING:
        scores = layout.microbatch * model.heads / tp * model.seq * model.seq / layout.cp
        kept += scores * (2 * nbytes + 1)  # the softmax, what a dropout gives, and its mask
    return kept


def _block_elements(model: PlannedModel, layout: Layout) -> float:
    experts = model.experts * model.expert_parameters / layout.ep if model.experts > 1 else 0.0
    dense = model.block_parameters - (
        model.experts * model.expert_parameters if model.experts > 1 else 0
    )
    return (dense + experts) / layout.tp


def _elements(model: PlannedModel, layout: Layout, parts: RankParts) -> float:
    elements = parts.blocks * _block_elements(model, layout)
    if parts.has_embedding:
        elements += model.embedding_parameters / layout.tp
    if parts.has_head:
        # On another rank, a tied head has a copy of the embedding's matrix.
        shares = model.tied and not parts.has_embedding
        elements += (model.head_parameters + shares * model.vocab * model.hidden) / layout.tp
    return elements
