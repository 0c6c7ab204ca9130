import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.observe.trackers.recorded_run import (
    RANKS,
    Values,
    assert_same,
    recorded_in_child,
    values_in_metrics,
)

# Found, not imported: every worker collects this file, and the import takes a second.
pytestmark = pytest.mark.skipif(
    find_spec("wandb") is None, reason="the extra 'trackers' is not installed"
)

BLOCK = 32768


def records(path: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format after a header of seven bytes."""
    content = path.read_bytes()
    assert content.startswith(b":W&B")
    at, record = 7, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK  # the end of a block is empty
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def read(path: Path) -> tuple[Values, dict[str, object], str]:
    """The history of an offline run, its options and its name."""
    from wandb.proto.wandb_internal_pb2 import Record

    values: Values = defaultdict(list)
    config: dict[str, object] = {}
    name = ""
    for content in records(path):
        record = Record.FromString(content)
        row = {
            "".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for key, value in row.items():
            if not key.startswith("_"):
                values[key].append((record.history.step.num, float(value)))
        for item in (*record.config.update, *record.run.config.update):
            config["".join(item.nested_key) or item.key] = json.loads(item.value_json)
        name = record.run.display_name or name
    return values, config, name


def offline_runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_an_offline_run_has_what_metrics_jsonl_has(tmp_path: Path) -> None:
    recorded_in_child(tmp_path / "run", "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    (path,) = offline_runs(tmp_path / "run")
    values, config, name = read(path)
    assert_same(values, values_in_metrics(tmp_path / "run"))
    assert (config["lr"], config["ranks"], name) == (0.1, RANKS, "run")


@pytest.mark.slow
def test_each_rank_is_a_run_if_each_is_tracked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recorded_in_child(folder, "wandb", per_rank=True, WANDB_MODE="offline", WANDB_SILENT="true")
    runs = [read(path) for path in offline_runs(folder)]
    losses = {name: values["train/loss"][3][1] for values, _, name in runs}
    assert losses == {"run-rank-0": 0.25, "run-rank-1": 1.25}
