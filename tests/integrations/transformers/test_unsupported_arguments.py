"""Options that do not work raise, and say what does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

import echelon as ec

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_to_hub": True}, "upload the folder"),
        ({"fp16": True}, "use bf16"),
        ({"auto_find_batch_size": True}, "go back alone"),
        ({"optim": "adafactor"}, "more of a parameter than a shard"),
        ({"ddp_bucket_cap_mb": 5}, "bucket_bytes"),
        ({"torch_compile": True}, "compile its blocks"),
        ({"save_on_each_node": True}, "all hosts"),
    ],
)
def test_arguments_that_do_not_work_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from tests.integrations.transformers.test_trainer import kind_of, make

    with pytest.raises(ec.errors.UnsupportedError, match=message):
        make(kind_of("fsdp"), str(tmp_path), **options)


@pytest.mark.parametrize(
    ("num_rows", "num_batches", "options", "refused"),
    [
        (10, 3, {}, True),
        (10, 2, {}, False),  # the training ends before
        (10, 3, {"drop_last": True}, False),
        (11, 3, {}, False),
        (12, 3, {}, False),
        (10, 3, {"shuffle": True}, True),
    ],
)
def test_a_last_batch_that_a_pipeline_cannot_split_is_refused_before_the_first_step(
    num_rows: int, num_batches: int, options: dict[str, Any], refused: bool
) -> None:
    from echelon.integrations.transformers.unsupported_arguments import refuse_short_batch

    loader = DataLoader(list(range(num_rows)), 4, **options)
    sentence = "the last batch of an epoch has 2 of 4 rows, too few for microbatches=3"
    with pytest.raises(ec.ArgumentError, match=sentence) if refused else nullcontext():
        refuse_short_batch(loader, 3, num_batches)


def test_logits_of_a_pipeline_are_refused_wherever_they_are_asked_for(tmp_path: Path) -> None:
    from tests.integrations.transformers.test_trainer import kind_of, make

    trainer = make(kind_of("ddp"), str(tmp_path))

    def ask(world: ec.World) -> None:
        pipe = ec.Pipeline([nn.Linear(2, 2)], world.group, microbatches=1)
        trainer.prediction_step(pipe, {}, False)

    with pytest.raises(ec.errors.UnsupportedError, match="compute_metrics needs logits"):
        ec.run(ask, 1)


def test_the_best_model_needs_the_state_of_the_training(tmp_path: Path) -> None:
    from tests.integrations.transformers.test_trainer import kind_of, make, rows

    steps = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    with pytest.raises(ec.errors.UnsupportedError, match="save_only_model"):
        make(
            kind_of("ddp"),
            str(tmp_path),
            save_only_model=True,
            **steps,
            own={"eval_dataset": rows(4)},
        )
