"""What one block computes and moves for one microbatch: multiplications, attention, the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, final, runtime_checkable

from echelon.planner.layout import Layout, Recompute
from echelon.planner.software_stack import Attention, Rates, SoftwareStack
from echelon.planner.transformer import Transformer

WIDTH = 2  # bytes of an element in 16-bit training
# Kernels of one forward of a block, by how attention is computed; a backward launches 1.8 times as
# many. Counted for GPT: 2 norms, 4 multiplications with biases, 2 dropouts, 2 residual additions,
# an activation, splits and transpositions, and those of attention.
_KERNELS = {Attention.FUSED: 22, Attention.SOFTMAX: 29, Attention.UNFUSED: 29}
_BACKWARD_KERNELS = 1.8
_SOFTMAX_PASSES = 0.6  # of those of unfused attention: mask, scale and softmax are one kernel
_COMPILED_PASSES = 0.6  # of those without a compiler


class Multiplication(NamedTuple):
    """A product of matrices of ``rows`` x ``inner`` and ``inner`` x ``columns``."""

    rows: float
    inner: float
    columns: float

    @property
    def flops(self) -> float:
        """A multiplication and an addition are two."""
        return 2.0 * self.rows * self.inner * self.columns

    @property
    def nbytes(self) -> float:
        """Both inputs and the output, once."""
        rows, inner, columns = self
        return WIDTH * (rows * inner + inner * columns + rows * columns)


@final
@dataclass(frozen=True, kw_only=True)
class RankWork:
    """Of one rank.

    Attributes:
        multiplications: of matrices that are parameters with activations.
        attention_flops: of the scores and the values.
        moved: bytes that are read and written by all else.
        kernels: number of launches.
    """

    multiplications: tuple[Multiplication, ...]
    attention_flops: float
    moved: float
    kernels: float

    def plus(self, other: RankWork) -> RankWork:
        """Both, one after the other."""
        return RankWork(
            multiplications=self.multiplications + other.multiplications,
            attention_flops=self.attention_flops + other.attention_flops,
            moved=self.moved + other.moved,
            kernels=self.kernels + other.kernels,
        )


class Passes(NamedTuple):
    """The work of a forward and of a backward."""

    forward: RankWork
    backward: RankWork


@runtime_checkable
class CountedModel(Protocol):
    """A model that says itself what its blocks compute, move and keep, such as ``TracedModel``.

    The sizes mean what they do in ``Transformer``.
    """

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> float: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> float: ...
    @property
    def vocab(self) -> float: ...
    @property
    def seq(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def active_experts(self) -> int: ...
    @property
    def expert_parameters(self) -> float: ...
    @property
    def block_parameters(self) -> float: ...
    @property
    def embedding_parameters(self) -> float: ...
    @property
    def head_parameters(self) -> float: ...
    @property
    def num_parameters(self) -> float: ...
    @property
    def trained_share(self) -> float: ...

    def flops(self, *, causal: bool = True) -> float:
        """Of one sequence in a forward and a backward."""

    def block_work(self, layout: Layout) -> Passes:
        """Of one block for one microbatch on one rank."""

    def head_work(self, layout: Layout) -> RankWork:
        """Of what is before and after the blocks, in a forward and a backward together."""

    def block_activations(self, layout: Layout, recompute: Recompute) -> float:
        """Bytes that one block keeps of one microbatch for its backward."""


PlannedModel = Transformer | CountedModel


def block_work(model: PlannedModel, layout: Layout, stack: SoftwareStack) -> Passes:
    """Of one block for one microbatch on one rank, with its matrices divided over ``tp``.

    In a backward each multiplication becomes two of the same FLOPs. Fused attention computes the
    scores again, so its backward has 2.5 times the FLOPs of its forward (Dao, arXiv 2307.08691,
    section 4.1); it skips the half that a causal mask hides, which the others compute.
    """
    if not isinstance(model, Transformer):
        return model.block_work(layout)
    tokens = layout.microbatch * model.seq / layout.cp
    forward = _block_multiplications(model, layout, tokens)
    backward = _transposed(forward)
    scores = layout.microbatch * model.heads / layout.tp * model.seq * model.seq / layout.cp
    flops = 4.0 * scores * model.head_dim
    fused = stack.attention is Attention.FUSED
    moved = _moved(model, layout, stack, tokens)
    score_bytes = 0.0 if fused else _score_bytes(stack, scores)
    kernels = _KERNELS[stack.attention] + (5 * layout.ep if model.experts > 1 else 0)
    return Passes(
        RankWork(
            multiplications=forward,
            attention_flops=flops / 2 if fused else flops,
            moved=moved + score_bytes,
            kernels=kernels,
        ),
        RankWork(
            multiplications=backward,
            attention_flops=2.5 * flops / 2 if fused else 2 * flops,
            moved=1.6 * moved + 1.2 * score_bytes,
            kernels=_BACKWARD_KERNELS * kernels,
        ),
    )


def head_work(model: PlannedModel, layout: Layout, rates: Rates) -> RankWork:
    """Of the embedding, the head and the loss, in a forward and a backward together."""
    if not isinstance(model, Transformer):
        return model.head_work(layout)
    tokens = layout.microbatch * model.seq / layout.cp
    columns = model.vocab / layout.tp
    forward = Multiplication(tokens, model.hidden, columns)
    moved = 2 * tokens * columns * rates.logit_bytes + 16 * tokens * model.hidden
    return RankWork(
        multiplications=(forward, *_transposed((forward,))),
        attention_flops=0.0,
        moved=moved,
        kernels=30,
    )


def _block_multiplications(
    model: Transformer, layout: Layout, tokens: float
) -> tuple[Multiplication, ...]:
    tp, hidden, ffn = layout.tp, model.hidden, model.ffn
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = (
        Multiplication(tokens, hidden, (width + 2 * kv_width) / tp),
        Multiplication(tokens, width / tp, hidden),
    )
    local_experts = model.experts / layout.ep
    # Each expert has its share of all tokens of the ep ranks, as if they were dealt evenly.
    rows = tokens * model.active_experts * layout.ep / model.experts
    into = Multiplication(rows, hidden, ffn / tp)
    out = Multiplication(rows, ffn / tp, hidden)
    expert = (into, into, out) if model.gated else (into, out)
    return attention + expert * max(1, round(local_experts))


def _transposed(forward: tuple[Multiplication, ...]) -> tuple[Multiplication, ...]:
    """The gradients of the inputs and of the matrices."""
    inputs = (Multiplication(rows, columns, inner) for rows, inner, columns in forward)
    matrices = (Multiplication(inner, rows, columns) for rows, inner, columns in forward)
    return (*inputs, *matrices)


def _moved(model: Transformer, layout: Layout, stack: SoftwareStack, tokens: float) -> float:
    rates = stack.rates
    residual = tokens * model.hidden * WIDTH * rates.block_passes
    if layout.sequence_parallel:
        residual /= layout.tp
    inner = tokens * model.active_experts * model.ffn / layout.tp * WIDTH * rates.ffn_passes
    moved = residual + inner * (1.5 if model.gated else 1.0)
    return moved * (_COMPILED_PASSES if stack.compiled else 1.0)


def _score_bytes(stack: SoftwareStack, scores: float) -> float:
    part = _SOFTMAX_PASSES if stack.attention is Attention.SOFTMAX else 1.0
    return part * stack.rates.score_passes * WIDTH * scores
