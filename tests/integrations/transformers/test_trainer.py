"""``Trainer`` on ``FSDP``, ``DDP`` and pipelines: the weights of ``Trainer`` in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon as ec
from tests.integrations.jobs import run_job, start_job
from tests.integrations.transformers.gpt_training import (
    gpt2,
    losses_of,
    make,
    rows,
    train,
    weights_in,
)

transformers = pytest.importorskip("transformers")
HERE = "tests.integrations.transformers.test_trainer"


def kind_of(plan: Any, **options: Any) -> Any:
    """The class under test with a plan, as a class of its host."""
    from accelerate.state import AcceleratorState, GradientState

    from echelon.integrations.transformers import EchelonTrainer

    AcceleratorState._reset_state()
    GradientState._reset_state()

    def trainer(**kwargs: Any) -> Any:
        return EchelonTrainer(plan=plan, **options, **kwargs)

    return trainer


SMALL = {"min_num_params": 0}
STAGES = {"pp": 2, "microbatches": 3}


def plain(folder: str) -> Any:
    return {
        "plain": train(transformers.Trainer, f"{folder}/plain"),
        "bf16": train(transformers.Trainer, f"{folder}/plain bf16", **bf16()),
        "smoothed": train(transformers.Trainer, f"{folder}/plain smoothed", **smoothed()),
    }


def bf16() -> dict[str, Any]:
    options = {"bf16": True, "gradient_checkpointing": True, "max_steps": 6}
    return {**options, "model": gpt2(torch.float32), "own": {"compute_loss_func": None}}


def smoothed() -> dict[str, Any]:
    options: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_steps": 6}
    return {**options, "own": {"compute_loss_func": None, "eval_dataset": rows(24, seed=2)}}


def in_every_way(folder: str) -> dict[str, Any]:
    fsdp, stages = {"options": SMALL}, {"stages": 2}
    return {
        "ddp": train(kind_of("ddp"), f"{folder}/ddp"),
        "fsdp": train(kind_of("fsdp", **fsdp), f"{folder}/fsdp"),
        "pp": train(kind_of(ec.Plan(**STAGES)), f"{folder}/pp", **stages),
        "bf16": train(kind_of("fsdp", **fsdp), f"{folder}/fsdp bf16", **bf16()),
        "smoothed": train(kind_of("fsdp", **fsdp), f"{folder}/fsdp smoothed", **smoothed()),
        "pp smoothed": train(
            kind_of(ec.Plan(**STAGES)), f"{folder}/pp smoothed", **stages, **smoothed()
        ),
    }


def bf16_in_stages(folder: str) -> dict[str, Any]:
    """Losses of a pipeline under autocast that was evaluated before, and dtypes in its stages."""
    options = bf16()
    options["own"] |= {"eval_dataset": rows(24, seed=2)}
    trainer = make(kind_of(ec.Plan(**STAGES)), folder, stages=2, **options)
    evaluated = trainer.evaluate()["eval_loss"]
    dtypes: dict[int, set[torch.dtype]] = {}
    for index, block in enumerate(options["model"].transformer.h):
        block.mlp.c_fc.register_forward_hook(
            lambda module, args, output, at=index: dtypes.setdefault(at, set()).add(output.dtype)
        )
    trainer.train()
    results = {"losses": losses_of(trainer), "dtypes": dtypes, "evaluated": evaluated}
    return {**results, "evaluated after": trainer.evaluate()["eval_loss"]}


def bf16_in_one_process(folder: str) -> dict[str, Any]:
    options = bf16()
    options["own"] |= {"eval_dataset": rows(24, seed=2)}
    trainer = make(transformers.Trainer, folder, **options)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    results = {"losses": losses_of(trainer), "evaluated": evaluated}
    return {**results, "evaluated after": trainer.evaluate()["eval_loss"]}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], close: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=close, atol=close)


@pytest.mark.slow
def test_every_plan_has_the_weights_of_trainer_in_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path)
    [expected] = run_job(f"{HERE}:plain", 1, folder)
    weights = weights_in(f"{folder}/plain")
    for results in run_job(f"{HERE}:in_every_way", 2, folder):
        for name in ("ddp", "fsdp", "pp"):
            assert results[name]["norms"] == pytest.approx(expected["plain"]["norms"], rel=1e-10)
            # Trainer adds up losses in float32.
            assert results[name]["losses"] == pytest.approx(expected["plain"]["losses"], rel=1e-6)
            assert results[name]["flos"] == expected["plain"]["flos"]
        for name in ("smoothed", "pp smoothed"):
            losses = expected["smoothed"]["losses"]
            assert results[name]["losses"] == pytest.approx(losses, rel=1e-6)
        # Products in bfloat16 round by 2^-9.
        assert results["bf16"]["losses"] == pytest.approx(expected["bf16"]["losses"], rel=2e-3)
    for name in ("ddp", "fsdp", "pp"):
        assert_same(weights_in(f"{folder}/{name}"), weights, 1e-12)
    model = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/pp", dtype=torch.float64)
    assert torch.equal(model.lm_head.weight, weights_in(f"{folder}/pp")["transformer.wte.weight"])


@pytest.mark.slow
def test_stages_compute_under_autocast_and_train_as_trainer_in_one_process(tmp_path: Path) -> None:
    [expected] = run_job(f"{HERE}:bf16_in_one_process", 1, str(tmp_path / "plain"))
    ranks = run_job(f"{HERE}:bf16_in_stages", 2, str(tmp_path / "pp"))
    for rank, results in enumerate(ranks):
        assert results["dtypes"] == {rank: {torch.bfloat16}}
        for name, value in expected.items():
            # Products in bfloat16 round by 2^-9.
            assert results[name] == pytest.approx(value, rel=2e-3)


# --- checkpoints ---------------------------------------------------------------------------------

SAVES = {"save_strategy": "steps", "save_steps": 5}


def uninterrupted(folder: str) -> list[float]:
    trainer = make(transformers.Trainer, folder)
    trainer.train()
    return losses_of(trainer)


class Dies(transformers.TrainerCallback):
    """Kills rank 1 while it writes the checkpoint of step 15."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 15 and args.process_index == 1:
            os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(folder: str) -> None:
    make(
        kind_of("fsdp", options=SMALL), folder, **SAVES, save_total_limit=2, own=callbacks(Dies())
    ).train()


def callbacks(*them: Any) -> dict[str, Any]:
    return {"callbacks": list(them)}


def resume(folder: str, plan: str) -> list[float]:
    trainer = make(kind_of(plan), folder, **SAVES)
    trainer.train(resume_from_checkpoint=True)
    return losses_of(trainer)


@pytest.mark.slow
def test_a_job_killed_in_a_save_goes_on_from_the_checkpoint_before_on_other_ranks(
    tmp_path: Path,
) -> None:
    expected = uninterrupted(str(tmp_path / "plain"))
    folder = tmp_path / "run"
    job = start_job(f"{HERE}:save_and_die", 2, str(folder), folder=str(tmp_path))
    job.communicate(timeout=100)
    assert job.returncode != 0
    visible = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert visible == ["checkpoint-10", "checkpoint-5"]
    for ranks, plan in ((1, "ddp"), (3, "fsdp")):
        for number in (15, 20):  # of the other resumed job
            for path in folder.glob(f"checkpoint-{number}"):
                path.rename(tmp_path / f"{ranks}-{number}")
        for losses in run_job(f"{HERE}:resume", ranks, str(folder), plan):
            assert losses == pytest.approx(expected, rel=1e-6)
    assert not list(folder.glob(".checkpoint-*"))


class StopsOnRank1(transformers.TrainerCallback):
    """Asks one rank to stop."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4 and args.process_index == 1:
            control.should_training_stop = True


def evaluate_in_every_way(folder: str) -> dict[str, Any]:
    """Evaluations, the best checkpoint, generation, a stop on one rank, and a second training."""
    from echelon.integrations.transformers import EchelonSeq2SeqTrainer

    found: dict[str, Any] = {}
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    best |= {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1, "max_steps": 9}
    data = {"eval_dataset": rows(24, seed=2)}
    trainer = make(
        kind_of("fsdp", options=SMALL), f"{folder}/best", **best, learning_rate=0.3, own=data
    )
    trainer.train()
    found["best"] = trainer.evaluate()["eval_loss"]
    found["evaluations"] = [
        entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry
    ]
    found["predictions"] = trainer.predict(rows(7, seed=2)).predictions.shape
    assert trainer.train().global_step == 9
    unsaved = best | {"eval_steps": 1, "max_steps": 3, "load_best_model_at_end": False}
    unsaved |= {"metric_for_best_model": "loss", "greater_is_better": True}
    trainer = make(kind_of("fsdp", options=SMALL), f"{folder}/unsaved", **unsaved, own=data)
    trainer.train()
    found["unsaved"] = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    trainer = make(kind_of("fsdp"), f"{folder}/stop", own=callbacks(StopsOnRank1()))
    found["stopped"] = trainer.train().global_step
    trainer = make(kind_of(ec.Plan(**STAGES)), f"{folder}/pp", stages=2, max_steps=2, own=data)
    trainer.train()
    found["stages"] = trainer.evaluate()["eval_loss"]
    assert trainer.train().global_step == 2
    kind_of("fsdp")
    args = transformers.Seq2SeqTrainingArguments(
        f"{folder}/t5",
        use_cpu=True,
        max_steps=1,
        report_to=[],
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=6,
    )
    trainer = EchelonSeq2SeqTrainer(
        model=t5(), args=args, plan="fsdp", options=SMALL, train_dataset=rows(16)
    )
    trainer.train()
    found["generated"] = trainer.predict(rows(5, seed=2)).predictions.tolist()
    trainer.save_model()
    return found


def as_trainer_on_two_ranks(folder: str) -> dict[str, Any]:
    """Batches that do not fill the ranks, and samplers, by ``Trainer`` itself and under FSDP."""
    cases = {
        "uneven": {"eval_strategy": "steps", "eval_steps": 10},
        "by length": {"train_sampling_strategy": "group_by_length"},
        "dispatched": {"accelerator_config": {"dispatch_batches": True, "split_batches": True}},
    }
    results = {}
    for name, options in cases.items():
        own = {"train_dataset": rows(90), "eval_dataset": rows(31, seed=2)}
        for kind in (transformers.Trainer, kind_of("fsdp", options=SMALL)):
            trained = train(kind, f"{folder}/{name}", **options, own=own)
            kept = [
                {key: entry[key] for key in ("loss", "grad_norm", "eval_loss") if key in entry}
                for entry in trained["log"]
            ]
            results.setdefault(name, []).append(kept)
    return results


@pytest.mark.slow
def test_uneven_batches_and_samplers_are_those_of_trainer_on_as_many_ranks(tmp_path: Path) -> None:
    for results in run_job(f"{HERE}:as_trainer_on_two_ranks", 2, str(tmp_path)):
        assert len(results) == 3
        for expected, found in results.values():
            assert len(found) == len(expected) > 20
            for entry, other in zip(found, expected, strict=True):
                assert entry == pytest.approx(other, rel=1e-6)


class Fails(transformers.TrainerCallback):
    """Fails on one rank."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and args.process_index == 1:
            raise ValueError("a callback of rank 1 fails")


def fail_on_rank_1(folder: str) -> None:
    make(kind_of("fsdp", options=SMALL), folder, own=callbacks(Fails())).train()


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_the_job_and_is_named_first(tmp_path: Path) -> None:
    job = start_job(f"{HERE}:fail_on_rank_1", 2, str(tmp_path), folder=str(tmp_path))
    _, errors = job.communicate(timeout=100)
    assert job.returncode == 1
    assert "rank 1 raised ValueError: a callback of rank 1 fails" in errors


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
    config = transformers.T5Config(
        **sizes,
        num_layers=1,
        decoder_start_token_id=0,
        pad_token_id=0,
        dropout_rate=0.0,
        initializer_factor=3.0,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.slow
def test_evaluations_callbacks_and_generation_are_those_of_trainer(tmp_path: Path) -> None:
    results = run_job(f"{HERE}:evaluate_in_every_way", 2, str(tmp_path))
    assert results[0] == results[1]
    found = results[0]
    assert found["best"] == min(found["evaluations"][:3]) < max(found["evaluations"][:3])
    assert found["unsaved"] == (1, None)  # of the best step there is no checkpoint
    assert found["predictions"] == (7, 12, 32)
    assert found["stopped"] == 4
    trainer = make(
        transformers.Trainer,
        str(tmp_path / "plain"),
        max_steps=2,
        own={"eval_dataset": rows(24, seed=2)},
    )
    trainer.train()
    assert found["stages"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "t5")
    tokens = torch.stack([row["input_ids"] for row in rows(5, seed=2)])
    generated = model.generate(input_ids=tokens, max_length=6)
    assert len(set(generated.flatten().tolist())) > 2
    # Seq2SeqTrainer pads, and leaves the rows in that fill the last batch.
    assert [row[:6] for row in found["generated"][:5]] == generated.tolist()
