"""Small configurations of the ``transformers`` library: models without a download, or dropout.

The library takes seconds to import, so it is imported when a test asks.
"""

from typing import Any

import pytest

VOCABULARY = 32


def of_llama(kind: str, *, width: int, layers: int, **options: Any) -> Any:
    """The configuration of a kind that is built as Llama is: two heads on one of keys and values.

    Args:
        kind: ``"Llama"``, ``"Mistral"``, ``"Qwen2"`` or ``"Qwen3"``.
    """
    library = pytest.importorskip("transformers")
    return getattr(library, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        **options,
    )


def of_gpt2(*, width: int, layers: int) -> Any:
    """The configuration of a GPT-2 with two heads."""
    return pytest.importorskip("transformers").GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=width,
        n_layer=layers,
        n_head=2,
        n_positions=16,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
