"""``Transformer``: the sizes of a decoder, from which its parameters and operations follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from echelon.checks import flag, integer
from echelon.errors import ArgumentError


@final
@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder of equal blocks: attention and a feed-forward part, each behind a norm.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: heads of queries.
        kv_heads: heads of keys and values; as many as ``heads`` without grouped queries.
        head_dim: width of a head.
        ffn: inner width of the feed-forward part, of one expert where there are experts.
        gated: whether it has a gate (SwiGLU, GeGLU), so three matrices instead of two.
        vocab: rows of the embedding.
        seq: tokens of a sequence.
        tied: whether the head uses the embedding's matrix.
        positions: rows of a learned table of positions; 0 without one.
        biases: whether linear layers have biases, and norms, too.
        experts: of each feed-forward part; 1: no mixture.
        active_experts: that each token is sent to.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    seq: int
    tied: bool
    positions: int = 0
    biases: bool = False
    experts: int = 1
    active_experts: int = 1

    trained_share: ClassVar[float] = 1.0  # of the parameters

    def __post_init__(self) -> None:
        names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq")
        for name in (*names, "experts", "active_experts"):
            integer(name, getattr(self, name), low=1)
        integer("positions", self.positions)
        for name in ("gated", "tied", "biases"):
            flag(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"kv_heads is {self.kv_heads}, which does not divide heads, {self.heads}"
            )
        if self.active_experts > self.experts:
            raise ArgumentError(
                f"active_experts is {self.active_experts} of {self.experts} experts"
            )

    @property
    def attention_parameters(self) -> int:
        """Of one block, with its norm."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * width + 2 * kv_width)
        biases = width + 2 * kv_width + self.hidden if self.biases else 0
        return matrices + biases + self._norm

    @property
    def expert_parameters(self) -> int:
        """Of one expert, or of the feed-forward part without a mixture."""
        matrices = (3 if self.gated else 2) * self.hidden * self.ffn
        return matrices + ((2 if self.gated else 1) * self.ffn + self.hidden) * self.biases

    @property
    def block_parameters(self) -> int:
        """Of one block."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        ffn = self.experts * self.expert_parameters + router
        return self.attention_parameters + ffn + self._norm

    @property
    def embedding_parameters(self) -> int:
        """Of the tables of tokens and positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the head and the norm before it."""
        return self._norm + (0 if self.tied else self.vocab * self.hidden)

    @property
    def num_parameters(self) -> int:
        """All of them.

        Example:
            >>> gpt2 = Transformer(
            ...     layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=3072,
            ...     gated=False, vocab=50257, seq=1024, tied=True, positions=1024, biases=True,
            ... )
            >>> gpt2.num_parameters
            124439808
        """
        blocks = self.layers * self.block_parameters
        return blocks + self.embedding_parameters + self.head_parameters

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.biases else 1)

    def flops(self, *, causal: bool = True) -> float:
        """Of one sequence in a forward and a backward; a multiplication and an addition are two.

        Args:
            causal: count only the half of the attention matrix that a causal mask leaves. NVIDIA's
                newer tables do, most others do not.
        """
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * width + 2 * kv_width)
        matrices += (3 if self.gated else 2) * self.hidden * self.ffn * self.active_experts
        attention = 2 * self.seq * width * (0.5 if causal else 1.0)
        per_token = 2 * self.layers * (matrices + attention) + 2 * self.hidden * self.vocab
        return 3.0 * per_token * self.seq
