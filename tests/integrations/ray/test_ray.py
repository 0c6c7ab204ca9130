"""echelon in the workers of Ray Train, on a cluster of this machine with two processors."""

import json
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

import echelon as ec
from tests.children import environ

# A cluster takes ten seconds to start, a trainer ten more, and a busy machine several times that.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 12
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine needs more than the 30 s of Ray
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or Ray would leave one in the home of the user
}


def outcome_of(case: str, folder: Path) -> Any:
    """What a case of ``ray_job`` has printed."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.integrations.ray.ray_job", case, str(folder)],
        env=environ(**VARIABLES),
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def test_torch_ddp_over_echelon_and_ec_ddp_give_the_weights_of_gloo(tmp_path: Path) -> None:
    outcome = outcome_of("same_weights", tmp_path)
    gloo, echelon = outcome["gloo"], outcome["echelon"]
    # ec.init() has found that the workers share a host, though Ray has made a group of gloo.
    assert gloo["backends"] == ["gloo", "shm"]
    assert echelon["backend"] == "echelon"
    for weights in (gloo["ours"], echelon["weights"]):
        assert weights == pytest.approx(gloo["theirs"], rel=1e-12, abs=0.0)


def test_ray_sees_why_workers_fail_and_restarts_resume(tmp_path: Path) -> None:
    outcome = outcome_of("failures", tmp_path)
    failures = outcome["raised"]["failures"]
    assert "ValueError: boom" in failures["1"]
    if "0" in failures:  # unless Ray has ended it first
        assert "rank 1 raised ValueError: boom" in failures["0"]
    expected = outcome["losses of one process"]
    killed, alone = outcome["killed"], outcome["one worker"]
    assert (killed["first"], killed["step"]) == (5, STEPS)
    assert killed["loss"] == pytest.approx(expected[0], rel=1e-12, abs=0.0)
    assert ec.steps(killed["checkpoint"]) == [STEPS]
    # The same run goes on with one worker in place of two.
    assert (alone["first"], alone["step"]) == (STEPS + 1, STEPS + 4)
    assert alone["loss"] == pytest.approx(expected[1], rel=1e-12, abs=0.0)


def test_the_example_trains_and_keeps_two_checkpoints(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[3] / "examples" / "integrations" / "ray_train.py"
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "storage")],
        env=environ(**VARIABLES),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert result.returncode == 0, result.stderr[-5000:]
    checkpoint = result.stdout.splitlines()[-1].partition("checkpoint ")[2]
    assert ec.steps(checkpoint) == [20]
    kept = [one for one in (tmp_path / "storage" / "example").glob("checkpoint_*") if one.is_dir()]
    assert len(kept) == 2


def test_a_storage_that_is_no_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train

    from echelon.integrations import ray as on_ray

    filesystem = SimpleNamespace(type_name="s3")
    storage = SimpleNamespace(storage_filesystem=filesystem, experiment_fs_path="bucket/run")
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)

    def main(world: ec.World) -> None:
        with pytest.raises(ec.UnsupportedError, match="is 's3', and a step is saved in a folder"):
            on_ray.report({}, step=1, values=[1])

    ec.run(main, 1)
