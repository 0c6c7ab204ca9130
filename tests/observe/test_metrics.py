from pathlib import Path

import pytest

import echelon as ec
from echelon.observe import MetricsWriter, read_metrics


def test_each_line_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    lines = [{"kind": "start", "name": "a", "config": {"lr": 1e-3}}, {"kind": "step", "step": 1}]
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for i, line in enumerate(lines, start=1):
            writer.write(**line)
            assert read_metrics(tmp_path) == lines[:i]
        writer.write("step", loss=float("nan"), norms=[1.0, float("inf")])
    assert read_metrics(tmp_path)[2:] == [{"kind": "step", "loss": None, "norms": [1.0, None]}]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    assert read_metrics(tmp_path) == [{"kind": "step", "step": 1}]


def test_a_broken_line_and_a_missing_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match="give the folder of a run"):
        read_metrics(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step"}\nnonsense\n{"kind": "step"}\n')
    with pytest.raises(ec.ArgumentError, match=r"metrics\.jsonl:2 is not JSON"):
        read_metrics(tmp_path)


def test_lines_are_appended_after_what_a_kill_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    with MetricsWriter(file, append=True) as writer:
        writer.write("step", step=2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
