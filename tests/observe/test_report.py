import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.observe import Recorder, RunInfo, read_metrics, write_comparison, write_report
from echelon.process import atomic_files
from tests.observe.runs import write_run
from tests.worlds import run_world


def page_of(folder: Path) -> str:
    return write_report(folder).read_text()


def test_the_page_has_its_numbers(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", ranks=2))
    for text in (
        "3.125",
        "unigram entropy",
        "validation",
        "rank 1",
        "1.5 MiB",
        "0.250 s",
        "measured: 625 ms",
        "python &lt;train&gt;.py",
        "abc",
    ):
        assert text in page


def test_the_page_is_small_and_needs_no_network(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", ranks=2))
    assert re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page) == []
    assert re.findall(r"https?:|url\(", page) == []
    assert len(page) < 100_000


def test_text_of_a_run_cannot_become_part_of_the_page(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run", ranks=1))
    assert "alert(1)</script>" not in page
    assert "0F0</script>" not in page
    assert "&lt;0.1&gt;" in page


def test_a_run_that_did_not_finish_has_a_page_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=2, finished=False)
    assert "did not finish" in page_of(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "failure", "text": "KeyError: <boom>"}\n')
    assert "did not finish: KeyError: &lt;boom&gt;" in page_of(folder)


def test_only_the_page_of_a_run_that_goes_on_loads_itself_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=2, finished=False)
    live = write_report(folder, live=True).read_text()
    assert "location.reload()" in live
    assert "running" in live
    assert "location.reload()" not in page_of(folder)


def test_a_reader_never_sees_half_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", ranks=2)
    before = page_of(folder)

    def fail(fd: int, data: bytes) -> None:
        os.write(fd, data[:100])
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(atomic_files, "write_all", fail)
    with pytest.raises(OSError, match="no space"):
        write_report(folder)
    assert (folder / "report.html").read_text() == before


def test_two_runs_are_compared_on_a_page_beside_the_second(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, ranks=2) for name in "ab")
    page = write_comparison(first, second)
    assert page == second / "compared-with-a.html"
    text = page.read_text()
    assert "Numbers" in text
    assert re.findall(r"https?:|url\(", text) == []
    assert write_comparison(first, second, tmp_path / "two.html") == tmp_path / "two.html"


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


@pytest.mark.slow
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
    assert set(nbytes["slots"]) == {0, UNIT}  # they have memory in backward only
    assert set(nbytes["optimizer"]) == {2 * part + 4 * 2 * LAYERS}
    assert (nbytes["gathered"][0], nbytes["gathered"][-1]) == (0, 0)
    assert max(nbytes["gathered"]) == most_whole
    page = (folder / "report.html").read_text()
    assert "<h2>Memory over step 3</h2>" in page
    assert '["gathered",[0' in page
    units = [unit for unit, *_ in line["units"]]
    assert sorted(set(units) - {"root"}) == [str(i) for i in range(LAYERS)]  # the root is empty
    assert {nbytes for unit, *_, nbytes in line["units"] if unit != "root"} == {UNIT}
    assert all(0 <= start <= end for _, start, end, _ in line["units"])
