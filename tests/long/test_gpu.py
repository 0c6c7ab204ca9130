"""All parts of ``make gpu`` end to end, on the CPU and with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_every_part_of_the_driver_ends_well(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--tiny", "--minutes", "14", "--out", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *options],
        capture_output=True,
        text=True,
    )
    page = (tmp_path / "gpu.md").read_text()
    assert ended.returncode == 0, page
    assert "## What failed" not in page
    report = json.loads((tmp_path / "gpu.json").read_text())
    steps = [row for part in report["parts"] for row in part["results"] if "variant" in row]
    mixed = {row["last_loss"] for row in steps if "float32" in row["variant"]}
    assert len({row["last_loss"] for row in steps if "float32" not in row["variant"]}) == 1
    assert len(steps) == 12
    assert max(mixed) - min(mixed) < 1e-3
