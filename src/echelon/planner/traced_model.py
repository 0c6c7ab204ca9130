"""``TracedModel``: any model as a planner needs it, from what its operations have been seen to do.

There is no formula for an architecture in it. A model that has grouped queries, gates, experts or
convolutions computes, moves and keeps what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import final

from echelon.errors import UnsupportedError
from echelon.planner.layout import Layout, Recompute
from echelon.planner.operations import Multiplication, Passes, RankWork


@final
@dataclass(frozen=True, kw_only=True)
class TracedPart:
    """A block, or what is before or after the blocks, for a number of sequences.

    Attributes:
        forward: its operations.
        backward: its operations.
        kept: bytes of each storage that its backward needs; parameters and buffers are not counted.
        output: elements that it gives to the next block, of those that have gradients.
    """

    forward: RankWork
    backward: RankWork
    kept: tuple[float, ...]
    output: float


@final
@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A forward and backward of all of a model for a number of sequences.

    Attributes:
        embedding: what runs before the blocks.
        blocks: in their order.
        head: what runs after the blocks, with the loss.
    """

    embedding: TracedPart
    blocks: tuple[TracedPart, ...]
    head: TracedPart


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """What ``step_time`` and ``step_memory`` ask of a model, counted for one and two sequences.

    All counts grow by the same amount with each sequence, so those of more are known. Blocks may
    differ: times and bytes are those of the mean block. The axes ``tp``, ``cp`` and ``ep`` have
    length 1, since how operations are divided over them is not known.

    Attributes:
        once: for one sequence.
        twice: for two sequences.
        parameters: elements of each block; what blocks share counts in each.
        embedding_parameters: elements that run before the blocks.
        head_parameters: elements that run after the blocks, without those of the embedding.
        shared_parameters: elements of the embedding that the head uses, too.
        num_parameters: of all; what is shared counts once.
        trained_share: the part of them that has gradients and states of the optimizer; the same is
            taken for every block.
        seq: tokens of a sequence.
        width: bytes of an element of the activations.
        rounding: an allocation takes a multiple of so many bytes.
    """

    once: TracedStep
    twice: TracedStep
    parameters: tuple[int, ...]
    embedding_parameters: int
    head_parameters: int
    shared_parameters: int
    num_parameters: int
    seq: int
    trained_share: float = 1.0
    width: int = 2
    rounding: int = 1

    heads = kv_heads = experts = active_experts = 1
    head_dim = 1.0
    expert_parameters = 0.0

    @property
    def layers(self) -> int:
        """The number of blocks."""
        return len(self.parameters)

    @property
    def hidden(self) -> float:
        """Elements that a block gives to the next one for each token."""
        return self.once.blocks[0].output / self.seq

    @property
    def vocab(self) -> float:
        """Elements of the output for each token."""
        return self.once.head.output / self.seq

    @property
    def tied(self) -> bool:
        """Whether the head uses parameters of the embedding."""
        return self.shared_parameters > 0

    @property
    def block_parameters(self) -> float:
        """Of the mean block."""
        return sum(self.parameters) / len(self.parameters)

    def flops(self, *, causal: bool = True) -> float:
        """Of one sequence in a forward and a backward, as they were counted.

        Args:
            causal: count only the half of fused attention that a causal mask leaves; what is
                not fused is computed in full, and is counted so.
        """
        parts = (self.once.embedding, *self.once.blocks, self.once.head)
        works = [work for part in parts for work in (part.forward, part.backward)]
        products = sum(product.flops for work in works for product in work.multiplications)
        return products + (1 if causal else 2) * sum(work.attention_flops for work in works)

    def block_work(self, layout: Layout) -> Passes:
        """Of the mean block for one microbatch."""
        _check(layout)
        return _block_work(self, layout.microbatch)

    def head_work(self, layout: Layout) -> RankWork:
        """Of what is before and after the blocks, in a forward and a backward together."""
        _check(layout)
        return _head_work(self, layout.microbatch)

    def block_activations(self, layout: Layout, recompute: Recompute) -> float:
        """Bytes that the mean block keeps of one microbatch for its backward.

        A block that is computed again keeps its input, which is as long as its output.
        """
        _check(layout)
        if recompute is Recompute.BLOCKS:
            return self._rounded(layout.microbatch * self.seq * self.hidden * self.width)
        pairs = zip(self.once.blocks, self.twice.blocks, strict=True)
        return sum(self._kept(pair, layout.microbatch) for pair in pairs) / self.layers

    def _kept(self, pair: tuple[TracedPart, TracedPart], sequences: int) -> float:
        once, twice = pair
        if len(once.kept) != len(twice.kept):
            return sum(map(self._rounded, twice.kept)) * sequences / 2
        pairs = zip(once.kept, twice.kept, strict=True)
        return sum(self._rounded(_at(first, second, sequences)) for first, second in pairs)

    def _rounded(self, nbytes: float) -> float:
        return -(-nbytes // self.rounding) * self.rounding


def _check(layout: Layout) -> None:
    for axis in ("tp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            raise UnsupportedError(
                f"{axis} is {getattr(layout, axis)}, and how the operations of a traced model are "
                f"divided over it is not known: leave {axis} at 1, or describe the model by its "
                "sizes"
            )


@cache
def _block_work(model: TracedModel, sequences: int) -> Passes:
    pairs = list(zip(model.once.blocks, model.twice.blocks, strict=True))
    forward = [_work_at(once.forward, twice.forward, sequences) for once, twice in pairs]
    backward = [_work_at(once.backward, twice.backward, sequences) for once, twice in pairs]
    return Passes(_mean(forward), _mean(backward))


@cache
def _head_work(model: TracedModel, sequences: int) -> RankWork:
    once, twice = model.once, model.twice
    pairs = (
        (once.embedding.forward, twice.embedding.forward),
        (once.embedding.backward, twice.embedding.backward),
        (once.head.forward, twice.head.forward),
        (once.head.backward, twice.head.backward),
    )
    return reduce(RankWork.plus, (_work_at(*pair, sequences) for pair in pairs))


def _at(once: float, twice: float, sequences: int) -> float:
    return once + (twice - once) * (sequences - 1)


def _work_at(once: RankWork, twice: RankWork, sequences: int) -> RankWork:
    """What grows by the same amount with each sequence."""
    pairs = _paired(once.multiplications, twice.multiplications)
    if pairs is not None:
        products = [
            Multiplication(*(_at(a, b, sequences) for a, b in zip(*pair, strict=True)))
            for pair in pairs
        ]
    else:  # such as a multiplication for each expert that some token was sent to
        products = [_longer(product, sequences / 2) for product in twice.multiplications]
    return RankWork(
        multiplications=tuple(products),
        attention_flops=_at(once.attention_flops, twice.attention_flops, sequences),
        moved=_at(once.moved, twice.moved, sequences),
        kernels=_at(once.kernels, twice.kernels, sequences),
    )


def _paired(
    once: Sequence[Multiplication], twice: Sequence[Multiplication]
) -> list[tuple[Multiplication, Multiplication]] | None:
    """Each product of one sequence with that of two, in which at most one size has grown.

    A backward may compute the gradients of an input and of a matrix in either order.
    """
    if len(once) != len(twice):
        return None
    rest, pairs = list(twice), []
    for product in once:
        grown = [_grown_sizes(product, other) for other in rest]
        if 1 not in grown and 0 not in grown:
            return None
        pairs.append((product, rest.pop(grown.index(1 if 1 in grown else 0))))
    return pairs


def _grown_sizes(small: Multiplication, large: Multiplication) -> int:
    """How many sizes have doubled; -1 if one has become anything else."""
    sizes = list(zip(small, large, strict=True))
    return sum(b == 2 * a for a, b in sizes) if all(b in (a, 2 * a) for a, b in sizes) else -1


def _mean(works: Sequence[RankWork]) -> RankWork:
    """The multiplications of the block that has most, with as many FLOPs as all have on average."""
    flops = [sum(product.flops for product in work.multiplications) for work in works]
    most = max(range(len(works)), key=flops.__getitem__)
    factor = sum(flops) / len(works) / flops[most] if flops[most] else 1.0
    return RankWork(
        multiplications=tuple(_longer(item, factor) for item in works[most].multiplications),
        attention_flops=sum(work.attention_flops for work in works) / len(works),
        moved=sum(work.moved for work in works) / len(works),
        kernels=sum(work.kernels for work in works) / len(works),
    )


def _longer(product: Multiplication, factor: float) -> Multiplication:
    return product if factor == 1.0 else product._replace(rows=product.rows * factor)
