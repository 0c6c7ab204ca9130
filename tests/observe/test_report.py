import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.observe import MetricsWriter, Recorder, RunInfo, read_metrics, write_report
from tests.worlds import run_world


def write_run(folder: Path, ranks: int, finished: bool = True) -> Path:
    """A run that needs no training."""
    folder.mkdir()
    summary = {
        "process_peak": 2**28,
        "memory": {"parameters": {"live": 4, "peak": 8 * 2**20}},
        "comm": {"all_reduce": {"calls": 7, "nbytes": 3 * 2**20, "wait_s": 0.25}},
    }
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.write(
            "start",
            version=1,
            name="a <run>",
            time="2026-01-02 03:04:05",
            ranks=ranks,
            backend="threads",
            device="cpu",
            total_steps=40,
            unit="nats",
            references={"unigram entropy": 4.25},
            config={"lr": "<0.1>"},
        )
        for step in range(1, 41):
            loss = float("nan") if step == 5 else 5.0 - step / 20
            writer.write("step", step=step, time_s=0.1 * step, loss=loss, tokens_per_s=1000.0)
        writer.write("evaluation", step=40, time_s=4.0, loss=3.125)
        timelines = {
            "planned": [[0, "0F0", 0.0, 0.25], [1, "1F0", 0.25, 0.5]],
            "measured": [[0, "0F0</script>", 0.0, 0.3], [1, "1B0", 0.3, 0.625]],
        }
        writer.write("timelines", step=40, timelines=timelines)
        writer.write("note", title="sample", text="<script>alert(1)</script>")
        if finished:
            rows = [{"rank": rank, "pid": 1, **summary} for rank in range(ranks)]
            writer.write("ranks", ranks=rows)
            writer.write("end", time_s=4.5, steps=40)
    return folder


def page_of(folder: Path) -> str:
    page = write_report(folder)
    assert page is not None
    return page.read_text()


def test_the_page_has_all_sections_and_numbers(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", ranks=2))
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Loss",
        "Throughput",
        "Memory per category",
        "Communication per operation",
        "Schedule of step 40",
        "sample",
        "Options",
    ]
    for text in (
        "3.125",
        "unigram entropy",
        "validation",
        "rank 1",
        "3.0 MiB",
        "0.250 s",
        "measured: 625 ms",
    ):
        assert text in page


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", ranks=2))
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page) == []
    assert "Plotly.newPlot" in page


def test_text_of_a_run_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", ranks=1))
    assert "alert(1)</script>" not in page
    assert "0F0</script>" not in page
    assert "&lt;0.1&gt;" in page


def test_a_run_that_did_not_finish_has_a_page_too(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", ranks=2, finished=False))
    assert "did not finish" in page
    assert re.findall(r"<h2>(.*?)</h2>", page)[:2] == ["Loss", "Throughput"]


def test_without_plotly_a_warning_names_the_extra(tmp_path: Path, monkeypatch: Any) -> None:
    folder, find = write_run(tmp_path / "run", ranks=1), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "plotly" else find(name)
    )
    with pytest.warns(UserWarning, match=r"echelon\[plots\]"):
        assert write_report(folder) is None


def test_a_file_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step"}\n')
    with pytest.raises(ec.ArgumentError, match="has no 'start' line"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("start", "name"), ("start", "total_steps"), ("step", "loss"), ("ranks", "ranks")],
)
@pytest.mark.parametrize("value", [..., [1]])
def test_a_line_of_another_format_is_refused_and_named(
    tmp_path: Path, kind: str, field: str, value: object
) -> None:
    folder = write_run(tmp_path / "run", ranks=2)
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    line = next(line for line in lines if line["kind"] == kind)
    del line[field]
    if value is not ...:
        line[field] = value
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ec.ArgumentError, match=f"{field}|this is no 'rank'"):
        write_report(folder)


# Memory of one step -----------------------------------------------------------------------------

LAYERS, UNIT = 4, (32 * 32 + 32) * 4


def train(world: ec.World, folder: Path, strategy: ec.Strategy) -> None:
    """Three steps, the last of which is watched."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(LAYERS)])
    rule = ec.units.by_type(nn.Linear)
    model = ec.FSDP(layers, world.group, units=rule, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    with Recorder(world, folder, RunInfo(total_steps=3)) as recorder:
        for step in range(1, 4):
            loss = model(torch.full((2, 32), world.rank + 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            recorder.step(step, loss.item(), num_tokens=2)
            optimizer.zero_grad()
            if step == 2:
                recorder.watch(lambda: model.memory_stats(optimizer).by_category())


@pytest.mark.parametrize(
    ("strategy", "most_whole"), [("FULL_SHARD", 2 * UNIT), ("SHARD_GRAD_OP", LAYERS * UNIT)]
)
def test_the_page_shows_what_a_step_of_fsdp_holds(tmp_path: Path, strategy, most_whole) -> None:
    folder = tmp_path / "run"
    run_world("gloo", train, 2, (folder, ec.Strategy[strategy]))
    [line] = [line for line in read_metrics(folder) if line["kind"] == "memory"]
    assert (line["step"], line["rank"]) == (3, 0)
    nbytes, part = line["nbytes"], LAYERS * UNIT // 2
    assert list(nbytes) == ["shards", "gathered", "gradients", "slots", "optimizer"]
    assert {len(values) for values in nbytes.values()} == {len(line["time_s"])}
    assert line["time_s"] == sorted(line["time_s"])
    assert set(nbytes["shards"]) == {part}
    assert set(nbytes["slots"]) == {UNIT}
    assert set(nbytes["optimizer"]) == {2 * part + 4 * 2 * LAYERS}
    assert (nbytes["gathered"][0], nbytes["gathered"][-1]) == (0, 0)
    assert max(nbytes["gathered"]) == most_whole
    page = (folder / "report.html").read_text()
    assert "<h2>Memory over step 3</h2>" in page
    assert re.search(r'"name":"gathered"', page)
