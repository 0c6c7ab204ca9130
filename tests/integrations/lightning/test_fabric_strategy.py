"""Fabric over our strategies: weights, checkpoints, what is refused, and the lines that change."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from tests.integrations.lightning.jobs import environment_of, result_of
from tests.integrations.lightning.test_trainer_strategy import apart

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "integrations"


@pytest.mark.slow
def test_two_models_train_to_the_weights_of_gloo_on_any_strategy(tmp_path: Path) -> None:
    runs = result_of(tmp_path, 2, "fabric_pairs", "gloo", "echelon", "echelon_ddp", "fsdp")
    for run in runs.values():
        assert apart(run["weights"], runs["gloo"]["weights"]) <= 1e-12
        assert run["norms"] == pytest.approx(runs["gloo"]["norms"], rel=1e-12)


@pytest.mark.slow
def test_a_save_of_one_strategy_goes_on_with_another_on_other_ranks(tmp_path: Path) -> None:
    whole = result_of(tmp_path, 2, "fabric_pair", "echelon_ddp", "whole.ckpt", 3)
    result_of(tmp_path, 2, "fabric_pair", "fsdp", "a.ckpt", 1)
    for ranks, strategy in ((3, "fsdp"), (1, "echelon_ddp")):
        run = result_of(tmp_path, ranks, "fabric_pair", strategy, "a.ckpt", ranks, True)
        num_epochs = len(run["norms"]) // 4
        done = {3: 2, 1: 0}[ranks]  # by three ranks: all that is left; then nothing is
        assert num_epochs == done
        assert apart(run["weights"], whole["weights"]) <= 1e-12
    assert sorted(os.listdir(tmp_path / "a.ckpt")) == [
        ".lock",
        ".written-by-lightning",
        "step-000000002",
    ]


@pytest.mark.slow
def test_what_cannot_work_is_refused_with_a_sentence(tmp_path: Path) -> None:
    refused = result_of(tmp_path, 2, "fabric_refusals", str(tmp_path / "a.ckpt"))
    wanted = {
        "filter": "UnsupportedError: filter of fabric.save",
        "no state": "UnsupportedError: a folder of ec.save is loaded into objects",
        "no value": "KeyError:",
        "file": "UnsupportedError: an optimizer over shards",
        "plain": "ArgumentError: no_backward_sync got a Linear",
    }
    assert {name: refused[name][: len(text)] for name, text in wanted.items()} == wanted


def code_of(name: str) -> list[str]:
    """The lines of an example behind its docstring."""
    return (EXAMPLES / name).read_text().partition('"""\n\nimport')[2].splitlines()


def test_two_lines_of_a_script_change() -> None:
    lines = difflib.ndiff(code_of("fabric_plain.py"), code_of("fabric.py"))
    changed = [line for line in lines if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) == 2, changed


@pytest.mark.slow
def test_the_examples_train_and_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    outputs = []
    for ranks, name in ((2, "fabric"), (2, "lightning_trainer"), (1, "lightning_trainer")):
        command = [sys.executable, "-m", "echelon", "run", "--ranks", str(ranks)]
        done = subprocess.run(
            [*command, str(EXAMPLES / f"{name}.py")],
            env=environment_of(), cwd=tmp_path, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(re.findall(r"epoch (\d): \w+ ([\d.]+)", done.stdout))
    assert [epoch for epoch, _ in outputs[0]] == ["0", "1", "2"]
    assert float(outputs[0][2][1]) < float(outputs[0][0][1])
    assert outputs[1] == outputs[2]  # the second run has nothing left to do
