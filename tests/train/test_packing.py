"""Packed sequences: every token once, every target once, no attention between documents."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import echelon as ec
from echelon.train.packing import IGNORED

DOCUMENTS = st.lists(st.lists(st.integers(1, 1000), max_size=12), min_size=1, max_size=8)


def tokens_and_pairs(sequences: list[Any]) -> tuple[list[int], list[tuple[int, int]]]:
    tokens, pairs = [], []
    for sequence in sequences:
        is_real = sequence["documents"] >= 0
        tokens += sequence["tokens"][is_real].tolist()
        mask = sequence["loss_mask"]
        assert torch.equal(mask, sequence["targets"] != IGNORED)
        pairs += list(
            zip(sequence["tokens"][mask].tolist(), sequence["targets"][mask].tolist(), strict=True)
        )
    return tokens, pairs


@pytest.mark.slow
@settings(max_examples=80)
@given(DOCUMENTS, st.integers(1, 7))
def test_every_token_and_every_pair_of_a_document_is_there_once(
    documents: list[list[int]], length: int
) -> None:
    sequences = list(ec.PackedSequences(documents, length))
    tokens, pairs = tokens_and_pairs(sequences)
    assert tokens == [token for document in documents for token in document]
    assert pairs == [pair for d in documents for pair in pairwise(d)]
    for sequence in sequences[:-1]:
        assert (sequence["documents"] >= 0).all()
    for sequence in sequences:
        for document in sequence["documents"].unique().tolist():
            positions = sequence["positions"][sequence["documents"] == document]
            if document >= 0:
                assert positions.tolist() == list(range(len(positions)))


@pytest.mark.slow
@settings(max_examples=80)
@given(DOCUMENTS, st.integers(1, 7), st.integers(0, 10), st.integers(1, 3))
def test_a_stream_that_is_stopped_and_resumed_has_the_same_sequences(
    documents: list[list[int]], length: int, stop: int, ranks: int
) -> None:
    if not any(documents):
        return

    def stream(rank: int, size: int) -> ec.SampleStream:
        packed = ec.PackedSequences(documents, length)
        return ec.SampleStream(packed, 3, (rank, size), collate=list)

    whole = [s for batch in islice(stream(0, 1).batches(None), stop + 5) for s in batch]
    first = stream(0, 1)
    seen = [s for batch in islice(first.batches(None), stop) for s in batch]
    state = first.state_dict()
    later = [stream(rank, ranks) for rank in range(ranks)]
    for part in later:
        part.load_state_dict(state)
    for parts in islice(zip(*(part.batches(None) for part in later), strict=True), 5):
        seen += [s for part in parts for s in part or ()]
    assert len(seen) == len(whole)
    for actual, expected in zip(seen, whole, strict=True):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_documents_come_in_the_forms_of_tokenizers() -> None:
    forms = [[1, 2], np.array([3]), torch.tensor([4, 5], dtype=torch.int32), {"input_ids": [6]}]
    sequences = list(ec.PackedSequences(forms, 4, pad=9))
    assert [s["tokens"].tolist() for s in sequences] == [[1, 2, 3, 4], [5, 6, 9, 9]]
    for document, message in (
        ({"text": "a"}, "and no input_ids"),
        ([[1]], r"of shape \(1, 1\)"),
        ([0.5], "give tokens: one dim of integers"),
    ):
        with pytest.raises(ec.ArgumentError, match=message):
            next(iter(ec.PackedSequences([document], 4)))


def attended(tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    table, places, out = torch.randn(3, 20, 8, dtype=torch.float64)
    x = (table[tokens] + places[positions])[:, None]
    return (scaled_dot_product_attention(x, x, x, mask)[:, 0]) @ out.T


def test_with_the_mask_the_loss_is_that_of_the_documents_one_by_one() -> None:
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    batch = torch.utils.data.default_collate(list(ec.PackedSequences(documents, 12)))
    mask = ec.PackedSequences.attention_mask(batch["documents"])
    logits = attended(batch["tokens"], batch["positions"], mask)
    loss = cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    expected = torch.zeros((), dtype=torch.float64)
    for document in documents:
        tokens = torch.tensor([document])
        n = len(document)
        causal = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
        alone = attended(tokens, torch.arange(n)[None], causal)
        expected += cross_entropy(alone[0, :-1], tokens[0, 1:], reduction="sum")
    torch.testing.assert_close(loss, expected)  # attention over 12 keys sums in another order


def test_the_starts_of_documents_are_those_of_variable_length_attention() -> None:
    batch = torch.utils.data.default_collate(list(ec.PackedSequences([[1, 2, 3], [4, 5]], 4)))
    starts = ec.PackedSequences.cu_seqlens(batch["documents"])
    assert (starts.tolist(), starts.dtype) == ([0, 3, 4, 5, 8], torch.int32)


def test_states_of_another_length_are_refused() -> None:
    packed = ec.PackedSequences([[1, 2, 3]], 2)
    with pytest.raises(ec.ArgumentError, match="sequences of 4 tokens, and here they have 2"):
        packed.load_state_dict(ec.PackedSequences([[1]], 4).state_dict())
    with pytest.raises(ec.ArgumentError, match="give what state_dict"):
        packed.load_state_dict({})
