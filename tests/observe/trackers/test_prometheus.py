import math
import os
import threading
import time
from pathlib import Path

import pytest

import echelon as ec
from echelon.observe.trackers.prometheus import PrometheusFile, PrometheusValues
from echelon.observe.trackers.tracker import TrackedRun
from tests.observe.trackers.recorded_run import record


def samples(text: str) -> dict[str, tuple[dict[str, str], float]]:
    """The samples of a text by name, with labels and value, by Prometheus' own parser."""
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="the extra 'hosts' is not installed"
    )
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.type == "gauge" for family in families)
    return {
        sample.name: (sample.labels, sample.value)
        for family in families
        for sample in family.samples
    }


def test_prometheus_reads_back_each_value_with_its_labels(tmp_path: Path) -> None:
    run = TrackedRun(folder=tmp_path, name='a "quoted"\\run', rank=1)
    values = PrometheusValues(run)
    values.update({"train/loss": 2.5, "comm/all-reduce bytes": 3e9}, step=7, now_s=123.5)
    values.update({"train/loss": 1 / 3, "nan": math.nan, "inf": -math.inf}, step=8, now_s=124.5)
    read = samples(values.text())
    labels = {"run": run.name, "rank": "1"}
    assert read["echelon_train_loss"] == (labels, 1 / 3)
    assert read["echelon_comm_all_reduce_bytes"] == (labels, 3e9)
    assert read["echelon_step"] == (labels, 8)
    assert read["echelon_last_step_timestamp_seconds"] == (labels, 124.5)
    assert math.isnan(read["echelon_nan"][1])
    assert read["echelon_inf"][1] == -math.inf


def test_names_that_become_the_same_are_one_sample(tmp_path: Path) -> None:
    values = PrometheusValues(TrackedRun(folder=tmp_path, name="a"))
    values.update({"a/b": 1.0, "a.b": 2.0}, step=1, now_s=0.0)
    assert values.text().count("echelon_a_b{") == 1


@pytest.mark.slow
def test_the_file_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    place = tmp_path / "gpt.prom"
    tracker = PrometheusFile(TrackedRun(folder=tmp_path, name="gpt"), str(place))
    many = {f"value/{number}": float(number) for number in range(200)}
    tracker.log(many, 1)
    end = threading.Event()

    def write() -> None:
        step = 1
        while not end.is_set():
            step += 1
            tracker.log(many, step)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until, texts = time.monotonic() + 0.5, set()
        while time.monotonic() < until:
            texts.add(place.read_text())
    finally:
        end.set()
        writer.join()
    assert len(texts) > 1
    assert {text.count("\n") for text in texts} == {2 * (len(many) + 2)}
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_has_the_file_while_it_goes_on_and_not_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.observe.run_output.write_report", lambda folder, live=False: None)
    texts: list[str] = []
    log = PrometheusFile.log

    def spy(self: PrometheusFile, values: dict[str, float], step: int) -> None:
        log(self, values, step)
        texts.append((tmp_path / "run" / "metrics.prom").read_text())

    monkeypatch.setattr(PrometheusFile, "log", spy)
    ec.run(record, 2, args=(tmp_path / "run", ["prometheus"]))
    read = samples(texts[-1])
    assert read["echelon_train_loss"] == ({"run": "run"}, 0.25)
    assert read["echelon_validation_loss"][1] == 0.7
    assert not (tmp_path / "run" / "metrics.prom").exists()


def test_each_rank_has_a_file_if_each_is_tracked(tmp_path: Path) -> None:
    place = str(tmp_path / "gpt.prom")
    for rank in (0, 1):
        run = TrackedRun(folder=tmp_path, name="gpt", rank=rank)
        PrometheusFile(run, place).log({"train/loss": rank}, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gpt-rank-0.prom",
        "gpt-rank-1.prom",
    ]


def _put(path: Path, kind: str) -> None:
    if kind == "a file":
        path.write_text("of a user")
    elif kind == "an empty file":
        path.touch()
    elif kind == "a link":
        (path.parent / "key").write_text("secret")
        path.symlink_to("key")
    elif kind == "a link to nothing":
        path.symlink_to("nothing")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


KINDS = ("a file", "an empty file", "a link", "a link to nothing", "a pipe", "a folder")


def _seen(folder: Path) -> list[tuple[str, int, int, bytes]]:
    return [
        (
            each.name,
            each.lstat().st_ino,
            each.lstat().st_mode,
            (each.is_file() and each.read_bytes()) or b"",
        )
        for each in sorted(folder.iterdir())
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_has_at_the_path_is_neither_written_nor_removed(
    kind: str, tmp_path: Path
) -> None:
    place = tmp_path / "gpt.prom"
    run = TrackedRun(folder=tmp_path, name="gpt")
    _put(place, kind)
    before = _seen(tmp_path)
    with pytest.raises(ec.errors.ArgumentError, match="it has not written"):
        PrometheusFile(run, str(place))
    assert _seen(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_puts_at_the_path_during_a_run_stays(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "gpt.prom"
    tracker = PrometheusFile(TrackedRun(folder=tmp_path, name="gpt"), str(place))
    tracker.log({"loss": 1.0}, 1)
    place.unlink()
    _put(place, kind)
    before = _seen(tmp_path)
    with pytest.raises(ec.errors.ArgumentError, match="it has not written"):
        tracker.log({"loss": 2.0}, 2)
    tracker.close()
    assert _seen(tmp_path) == before


def test_the_file_of_a_killed_run_is_replaced_and_removed(tmp_path: Path) -> None:
    place = tmp_path / "gpt.prom"
    run = TrackedRun(folder=tmp_path, name="gpt")
    PrometheusFile(run, str(place)).log({"loss": 1.0}, 1)
    later = PrometheusFile(run, str(place))
    later.log({"loss": 2.0}, 2)
    assert "echelon_loss{" in place.read_text()
    assert "2.0" in place.read_text()
    later.close()
    assert list(tmp_path.iterdir()) == []
