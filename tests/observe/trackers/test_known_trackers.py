import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.observe.trackers.known_trackers import KNOWN_TRACKERS, TrackerChoice
from echelon.observe.trackers.prometheus import PrometheusFile
from echelon.observe.trackers.tracker import TrackedRun
from tests.children import environ


def test_an_unknown_tracker_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ec.ArgumentError, match="there is no tracker 'comet'; use one of tensor"):
        TrackerChoice.parse("comet")
    with pytest.raises(ec.ArgumentError, match="the tracker is 3"):
        TrackerChoice.parse(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wheel"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow-skinny"),
        ("trackio", "trackio"),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_install_it(
    name: str, wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(package: str, *rest: Any) -> None:
        assert package == name

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ec.ArgumentError) as info:
        TrackerChoice.parse(f"{name}=place")
    assert "pip install 'echelon[trackers]'" in str(info.value)
    assert str(info.value).endswith(f"pip install {wheel}")


def test_a_place_that_cannot_be_one_is_refused_before_the_run() -> None:
    with pytest.raises(ec.ArgumentError, match="prometheus-http=door is no address"):
        TrackerChoice.parse("prometheus-http=door")


def test_the_place_is_what_follows_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    assert TrackerChoice.parse("mlflow=http://host/?a=b").place == "http://host/?a=b"
    assert TrackerChoice.parse("wandb=").place is None
    tracker = TrackerChoice.parse("prometheus").open(TrackedRun(folder=tmp_path, name="a"))
    assert isinstance(tracker, PrometheusFile)


def test_every_known_tracker_has_its_class() -> None:
    for known in KNOWN_TRACKERS.values():
        module, name = known.home
        assert hasattr(importlib.import_module(f"echelon.observe.trackers.{module}"), name)


@pytest.mark.slow
def test_no_package_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, echelon.observe; from echelon.observe.trackers import tensorboard, wandb, "
    code += "mlflow, trackio; print([m for m in ('tensorboard', 'wandb', 'mlflow', 'trackio') "
    code += "if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ(), capture_output=True, text=True, timeout=100
    )
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr
