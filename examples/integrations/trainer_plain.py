"""A training with ``Trainer`` of transformers; ``trainer_echelon.py`` shares the model.

``python trainer_plain.py``, or ``torchrun --nproc-per-node 2 trainer_plain.py``.
"""

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

VOCABULARY = 64


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up, from a random start."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (starts + torch.arange(32)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    """Learn to count; a second start of the same folder goes on where the first one ended."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    arguments = TrainingArguments(
        "runs/trainer",
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
    )
    trainer = transformers.Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=rows(512, seed=1),
        eval_dataset=rows(64, seed=2),
    )
    trainer.train()
    trainer.save_model("runs/trainer-model")


if __name__ == "__main__":
    main()
