"""The benchmarks of trainers measure in turns, and all variants of a step have the same loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import test_benchmarks
from tests.children import environ
from tests.integrations.conftest import TIMEOUT_S

folder_on_path = test_benchmarks.folder_on_path


@pytest.mark.slow
@pytest.mark.parametrize("host", ["lightning", "accelerate", "transformers"])
def test_steps_of_trainers_are_measured_in_turns(host: str, tmp_path: Path) -> None:
    pytest.importorskip(host)
    import trainers

    options = {"rounds": 1, "steps": 2, "layers": 1, "ranks": 2, "variant": None}
    result = test_benchmarks.written(trainers.main, tmp_path, host=trainers.Host(host), **options)
    (samples,) = result["tasks"]
    assert {len(times) for times in samples["seconds"].values()} == {1}
    assert len({len(losses) for losses in result["settings"]["losses"].values()}) == 1
    assert len(result["bars"]) == 3


@pytest.mark.slow
def test_steps_in_ray_are_measured_and_their_losses_agree(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    output = tmp_path / "result.json"
    command = [
        sys.executable,
        str(test_benchmarks.FOLDER / "ray_train.py"),
        "--rounds",
        "1",
        "--layers",
        "1",
    ]
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
    variables["RAY_AUTH_TOKEN"] = "0" * 64
    result = subprocess.run(
        [*command, "--output", str(output)],
        env=environ(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S - 30,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    records = json.loads(output.read_text())
    assert {len(times) for times in records["tasks"][0]["seconds"].values()} == {1}
    assert len(records["bars"]) == 3
    assert records["settings"]["default_backend"] == "gloo"
