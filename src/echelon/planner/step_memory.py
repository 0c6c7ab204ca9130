"""What a rank keeps at the peak of a step, by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.operations import WIDTH
from echelon.planner.software_stack import Attention, SoftwareStack
from echelon.planner.stage_time import blocks_of_stages
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
        gathered: whole parameters of the blocks that run and are prefetched.
        activations: what the backward needs, of all microbatches that are under way.
        working: what one block has besides while it is computed again, and buffers of reductions.
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
        return sum(self.categories().values())

    def categories(self) -> dict[str, float]:
        """Bytes by category."""
        names = [name for name in self.__dataclass_fields__ if name != "rank_stage"]
        return {name: getattr(self, name) for name in names}


def step_memory(
    model: Transformer, layout: Layout, stack: SoftwareStack, blocks: Sequence[int] | None = None
) -> StepMemory:
    """The memory of the rank that needs most.

    Args:
        blocks: of each stage; None: cut evenly.
    """
    counts = blocks_of_stages(model.layers, layout.pp) if blocks is None else list(blocks)
    stages = (stage_memory(model, layout, stack, counts, stage) for stage in range(layout.pp))
    return max(stages, key=lambda memory: memory.total)


def stage_memory(
    model: Transformer, layout: Layout, stack: SoftwareStack, blocks: Sequence[int], stage: int
) -> StepMemory:
    """The memory of the ranks of one stage."""
    elements = _elements(model, layout, blocks, stage)
    sharded, shard = layout.sharded, layout.shard
    block_bytes = WIDTH * _block_elements(model, layout)
    tokens = layout.microbatch * model.seq / layout.cp
    whole_parameters = sharded is not ShardedStates.PARAMETERS
    keep = block_activations(model, layout, stack)
    under_way = microbatches_under_way(layout, stage)
    activations = under_way * blocks[stage] * keep / layout.chunks
    inside = block_activations(model, layout, stack, recompute=Recompute.NOTHING)
    gradient_bytes = stack.gradient_bytes
    divided = shard if sharded in (ShardedStates.GRADIENTS, ShardedStates.PARAMETERS) else 1
    is_last = stage == layout.pp - 1
    return StepMemory(
        rank_stage=stage,
        parameters=WIDTH * elements / (1 if whole_parameters else shard),
        gradients=gradient_bytes * elements / divided,
        optimizer=_OPTIMIZER_BYTES * elements / (1 if sharded is ShardedStates.NOTHING else shard),
        gathered=0.0 if whole_parameters or shard == 1 else 2 * block_bytes,
        activations=activations,
        working=(inside - keep) + (gradient_bytes / WIDTH * block_bytes if divided > 1 else 0.0),
        logits=tokens * model.vocab / layout.tp * (WIDTH + 2 * _FLOAT32) if is_last else 0.0,
    )


def microbatches_under_way(layout: Layout, stage: int) -> float:
    """Microbatches whose activations a stage of 1F1B keeps at its peak, in shares of a rank.

    With ``chunks`` stages for a rank the first rank keeps (p - 1) / (p v) more (Korthikanti et al.,
    arXiv 2205.05198, section 4.2.3).

    Example:
        >>> layout = Layout(pp=4, microbatches=8)
        >>> [microbatches_under_way(layout, stage) for stage in range(4)]
        [4.0, 3.0, 2.0, 1.0]
    """
    ahead = layout.pp - stage
    if layout.chunks > 1:
        ahead = layout.pp * layout.chunks + (layout.pp - 1) - 2 * stage
    return float(min(layout.microbatches * layout.chunks, ahead))


def block_activations(
    model: Transformer,
    layout: Layout,
    stack: SoftwareStack,
    recompute: Recompute | None = None,
) -> float:
    """Bytes that one block keeps of one microbatch for its backward, on one rank.

    Each linear layer and each norm keeps its input, an activation function its input, attention its
    queries, keys, values and output; attention that is not fused the scores, too.
    """
    recompute = layout.recompute if recompute is None else recompute
    tokens = layout.microbatch * model.seq / layout.cp
    tp = layout.tp
    stream = tokens * model.hidden * WIDTH / (tp if layout.sequence_parallel else 1)
    if recompute is Recompute.BLOCKS:
        return stream
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    heads = tokens * (2 * width + 2 * kv_width) / tp * WIDTH
    inner = tokens * model.active_experts * model.ffn / tp * WIDTH * (4 if model.gated else 2)
    kept = 4 * stream + heads + inner  # two norms: their inputs and what they give
    if stack.attention is not Attention.FUSED and recompute is Recompute.NOTHING:
        scores = layout.microbatch * model.heads / tp * model.seq * model.seq / layout.cp
        kept += scores * (2 * WIDTH + 1)  # the softmax, what a dropout gives, and its mask
    return kept


def _block_elements(model: Transformer, layout: Layout) -> float:
    experts = model.experts * model.expert_parameters / layout.ep if model.experts > 1 else 0.0
    dense = model.block_parameters - (
        model.experts * model.expert_parameters if model.experts > 1 else 0
    )
    return (dense + experts) / layout.tp


def _elements(model: Transformer, layout: Layout, blocks: Sequence[int], stage: int) -> float:
    elements = blocks[stage] * _block_elements(model, layout)
    is_first, is_last = stage == 0, stage == layout.pp - 1
    if is_first:
        elements += model.embedding_parameters / layout.tp
    if is_last:
        shares = model.tied and not is_first  # a tied head has a copy of the embedding's matrix
        elements += (model.head_parameters + shares * model.vocab * model.hidden) / layout.tp
    return elements
