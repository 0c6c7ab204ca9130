"""Documents of tokens, cut into sequences of one length without padding between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from echelon.checks import integer
from echelon.errors import ArgumentError
from echelon.train.source_cursor import END, Source, SourceCursor

IGNORED = -100  # the target that cross_entropy leaves out


@final
class PackedSequences:
    """Sequences of ``length`` tokens from documents, end to end; a source for a ``SampleStream``.

    A document that does not fit is continued in the next sequence. Only the last sequence of an
    epoch is padded. Each sequence is a dict of tensors of ``length``:

    - ``tokens``;
    - ``targets``: the token after each, for ``cross_entropy``; ``IGNORED`` after the last token of
      a document and in padding;
    - ``loss_mask``: where there is a target;
    - ``positions``: 0, 1, … from the beginning of each document's part;
    - ``documents``: 0, 1, … by the document that a token is of; -1 in padding.

    Law: in each epoch every token of every document is in ``tokens`` once, and every token but the
    first of its document is a target once, however often the job is stopped and resumed.

    Args:
        source: of documents: 1D tensors, arrays or lists of integers, or dicts that have one under
            ``input_ids``; as for ``SampleStream`` otherwise.
        length: of a sequence, in tokens.
        pad: the token of the padding.

    Example:
        >>> packed = PackedSequences([[1, 2, 3], [4, 5, 6, 7]], 5)
        >>> for sequence in packed:
        ...     print(*(sequence[name].tolist() for name in ("tokens", "targets", "documents")))
        [1, 2, 3, 4, 5] [2, 3, -100, 5, 6] [0, 0, 0, 1, 1]
        [6, 7, 0, 0, 0] [7, -100, -100, -100, -100] [0, 0, -1, -1, -1]
    """

    def __init__(self, source: Source, length: int, *, pad: int = 0) -> None:
        self._length = integer("length", length, low=1)
        self._pad = integer("pad", pad)
        self._cursor = SourceCursor(source, "source of documents")
        self._rest = torch.empty(0, dtype=torch.long, device="cpu")  # of a document
        self._at_end = False  # whether the last sequence of an epoch was given

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self._cursor.begin_epoch(epoch)
        self._rest, self._at_end = self._rest[:0], False

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The sequences from the position to the end of the epoch."""
        while not self._at_end:
            parts: list[tuple[Tensor, Tensor]] = []  # tokens, and the one that follows
            room = self._length
            while room:
                if not self._rest.numel():
                    document = self._cursor.read()
                    if document is END:
                        self._at_end = True
                        break
                    self._rest = _tokens(document)
                    continue
                part, self._rest = self._rest[:room], self._rest[room:]
                parts.append((part, self._rest[:1]))
                room -= len(part)
            if parts:
                yield self._sequence(parts)
        self._at_end = False

    def _sequence(self, parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        length = self._length
        sequence = {
            "tokens": torch.full((length,), self._pad, device="cpu"),
            "targets": torch.full((length,), IGNORED, device="cpu"),
            "positions": torch.zeros(length, dtype=torch.long, device="cpu"),
            "documents": torch.full((length,), -1, device="cpu"),
        }
        start = 0
        for i, (part, following) in enumerate(parts):
            end = start + len(part)
            targets = torch.cat([part[1:], following])
            sequence["tokens"][start:end] = part
            sequence["targets"][start : start + len(targets)] = targets
            sequence["positions"][start:end] = torch.arange(len(part), device="cpu")
            sequence["documents"][start:end] = i
            start = end
        return {**sequence, "loss_mask": sequence["targets"] != IGNORED}

    def state_dict(self) -> dict[str, Any]:
        """The position in the source, and the rest of the document that is being cut."""
        return {
            "length": self._length,
            "rest": self._rest.clone(),
            "at_end": self._at_end,
            "source": self._cursor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ArgumentError: it is of sequences of another length.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            raise ArgumentError(f"state is {state!r:.80}; give what state_dict() returned")
        if state["length"] != self._length:
            raise ArgumentError(
                f"the state is of sequences of {state['length']!r} tokens, and here they have "
                f"{self._length}: use what it was saved with"
            )
        self._cursor.load_state_dict(state["source"])
        self._rest, self._at_end = state["rest"].clone(), state["at_end"]

    @staticmethod
    def attention_mask(documents: Tensor) -> Tensor:
        """Who may attend to whom: tokens before it in its document, and a token to itself.

        Args:
            documents: of shape ``[batch, length]``.

        Returns:
            A mask for ``scaled_dot_product_attention``, of shape ``[batch, 1, length, length]``.
        """
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same.tril()

    @staticmethod
    def cu_seqlens(documents: Tensor) -> Tensor:
        """Where documents begin in a batch that is flattened, as variable-length attention wants.

        Padding counts as a document of its own.

        Args:
            documents: of shape ``[batch, length]``.

        Returns:
            Starts of all documents, and the number of tokens; int32.

        Example:
            >>> PackedSequences.cu_seqlens(torch.tensor([[0, 0, 1], [0, 0, -1]]))
            tensor([0, 2, 3, 5, 6], dtype=torch.int32)
        """
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        return torch.cat([starts, starts.new_tensor([documents.numel()])]).to(torch.int32)


def _tokens(document: Any) -> Tensor:
    """The tokens of a document."""
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            raise ArgumentError(f"a document has {sorted(map(str, document))}, and no input_ids")
        document = document["input_ids"]
    tokens = torch.as_tensor(document, device="cpu")
    if tokens.dim() != 1 or (tokens.numel() and tokens.is_floating_point()):
        raise ArgumentError(
            f"a document is a {type(document).__name__} of shape {tuple(tokens.shape)} and "
            f"{tokens.dtype}; give tokens: one dim of integers"
        )
    return tokens.long()
