"""The Trainer over our strategies: weights, checkpoints, callbacks, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning")

from tests.integrations.lightning.jobs import finished, result_of

STRATEGIES = ("gloo", "echelon", "echelon_ddp", "fsdp", "fsdp SHARD_GRAD_OP",
              "fsdp SHARD_OPTIMIZER", "fsdp NO_SHARD", "plan shard=2")  # fmt: skip


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
def test_every_strategy_trains_to_the_weights_of_ddp_on_gloo(tmp_path: Path) -> None:
    """Accumulation of 2, clipping, a tied weight, a frozen layer, dropout, a short last batch."""
    runs = result_of(tmp_path, 2, "compare", *STRATEGIES)
    wanted = runs["gloo"]
    assert len(wanted["losses"]) == 40
    for run in runs.values():
        assert apart(run["weights"], wanted["weights"]) <= 1e-12
        assert torch.allclose(torch.tensor(run["losses"]), torch.tensor(wanted["losses"]), rtol=0)


@pytest.mark.slow
def test_shards_with_replicas_train_to_the_weights_of_ddp_on_gloo(tmp_path: Path) -> None:
    runs = result_of(tmp_path, 4, "compare", "gloo", "plan dp=2,shard=2", "plan dp=4")
    for run in runs.values():
        assert apart(run["weights"], runs["gloo"]["weights"]) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "dies_at"), [("echelon_ddp", 4), ("fsdp", 5)])
def test_a_job_killed_in_a_save_goes_on_with_the_losses_of_one_that_was_not(
    strategy: str, dies_at: int, tmp_path: Path
) -> None:
    """Saves 1 and 2 are of the first epoch; 4 replaces ``last.ckpt``, 5 is the first at a path."""
    whole = result_of(tmp_path, 2, "fit_and_save", strategy, "whole")
    assert whole["files"] == ["epoch=2-step=12.ckpt", "epoch=3-step=16.ckpt", "last.ckpt"]
    assert (len(whole["losses"]), whole["step"]) == (32, 16)
    for ranks in (1, 3):
        folder = f"resumed on {ranks}"
        code, output = finished(tmp_path, 2, "fit_and_save", strategy, folder, False, dies_at)
        assert code != 0
        assert "SIGKILL" in output or "killed" in output.lower(), output[-2000:]
        run = result_of(tmp_path, ranks, "fit_and_save", strategy, folder, True)
        num_epochs = (dies_at - 1) // 2  # complete in last.ckpt, each second save
        assert len(run["losses"]) == 32 - 8 * num_epochs
        for loss, wanted in zip(run["losses"], whole["losses"][8 * num_epochs :], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-12)
        assert apart(run["weights"], whole["weights"]) <= 1e-12
        assert {"last.ckpt", os.path.basename(whole["best"])} <= set(run["files"])
        assert not any(name.endswith(".saving") for name in run["files"])


@pytest.mark.slow
def test_manual_optimization_of_two_optimizers_trains_to_the_weights_of_gloo(
    tmp_path: Path,
) -> None:
    weights = result_of(tmp_path, 2, "train_pairs", "gloo", "echelon_ddp")
    assert apart(weights["gloo"], weights["echelon_ddp"]) <= 1e-12


@pytest.mark.slow
def test_a_layer_that_a_callback_thaws_later_trains_to_the_weights_of_one_rank(
    tmp_path: Path,
) -> None:
    wanted = result_of(tmp_path, 1, "finetune")
    weights = result_of(tmp_path, 2, "finetune")
    assert apart(weights, wanted) <= 1e-12


@pytest.mark.slow
def test_what_cannot_work_is_refused_with_a_sentence(tmp_path: Path) -> None:
    refused = result_of(tmp_path, 2, "refusals", str(tmp_path))
    wanted = {
        "hook": "UnsupportedError: a hook has changed state_dict",
        "storage": "UnsupportedError: storage_options are for a CheckpointIO",
        "remote": "UnsupportedError: memory://a.ckpt",
        "manual": "UnsupportedError: automatic_optimization=False",
        "averaging": "UnsupportedError: StochasticWeightAveraging copies the model",
        "pruning": "UnsupportedError: ModelPruning ranks the elements of whole parameters",
        "argument": "ArgumentError: hyper_parameters.root is a pathlib.PosixPath",
        "finetuning": "UnsupportedError: BaseFinetuning compares parameters by their values",
        "devices": "ArgumentError: devices is 3, and 2 ranks were started",
        "batchnorm": "UnsupportedError: sync_batchnorm=True",
        "io": "UnsupportedError: AsyncCheckpointIO",
        "before": "UnsupportedError: AsyncCheckpointIO",
    }
    assert {name: refused[name][: len(text)] for name, text in wanted.items()} == wanted


@pytest.mark.slow
def test_a_fit_is_evaluated_and_files_of_lightning_go_on(tmp_path: Path) -> None:
    results: dict[str, Any] = result_of(tmp_path, 2, "odd_cases", str(tmp_path))
    for strategy in ("echelon_ddp", "fsdp"):
        assert apart(results[strategy], results["plain"]) <= 1e-12
        one_more = results[f"{strategy}, one more epoch"]
        assert apart(one_more, results["plain, one more epoch"]) <= 1e-12
        validation, test, num_batches, of_other, is_link = results[f"{strategy}, evaluated"]
        assert validation == pytest.approx(test, rel=1e-12)
        assert of_other == pytest.approx(validation, rel=1e-12)
        assert (num_batches, is_link) == (12, True)
    assert results["echelon_ddp, after the fit"] == "nothing was refused"
    assert results["fsdp, after the fit"].startswith("StateError")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["echelon_ddp", "fsdp"])
def test_mixed_precision_of_float16_skips_steps_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    name = result_of(tmp_path, 2, "mixed", strategy)
    assert name.split()[0].startswith("echelon.train.scaling" if strategy == "fsdp" else "torch")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_lower_precision_trains_to_the_weights_of_gloo(precision: str, tmp_path: Path) -> None:
    strategies = ["gloo", "echelon_ddp", "fsdp"]
    runs = result_of(tmp_path, 2, "compare_in", precision, *strategies)
    for run in runs.values():
        # Sums of two numbers are the same in any order; only the norm for clipping differs.
        assert apart(run["weights"], runs["gloo"]["weights"]) <= 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["echelon_ddp", "fsdp"])
def test_an_error_on_one_rank_ends_all_and_is_named(strategy: str, tmp_path: Path) -> None:
    code, output = finished(tmp_path, 2, "fail_on_one_rank", strategy)
    assert code != 0
    assert "rank 1 at step 1 raised ValueError: this batch is broken" in output, output[-3000:]
