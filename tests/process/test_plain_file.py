"""A pipe, a link or an endless file in the place of a file holds up and misleads nobody."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from echelon.observe.metrics import MetricsWriter
from echelon.observe.trackers.prometheus import PrometheusFile
from echelon.observe.trackers.tracker import TrackedRun
from echelon.process.plain_file import open_plain, read_plain

MANY = 30 << 30  # bytes of a sparse file, which takes none on the disk


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def put_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, MANY)


PUT: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a symbolic link": lambda path: path.symlink_to(__file__),
    "a folder": Path.mkdir,
    "a socket": put_socket,
    "more than": put_sparse,
}


@pytest.mark.parametrize("kind", PUT)
def test_what_is_no_ordinary_file_of_its_size_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    PUT[kind](tmp_path / "file")
    with pytest.raises(OSError, match=kind) as caught:
        open_plain(tmp_path / "file", 100)
    assert str(tmp_path / "file") in str(caught.value)


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_plain(tmp_path / "link", 100, follows=True) == b"data"


@pytest.mark.parametrize("kind", ["prometheus", "metrics"])
def test_a_link_in_a_shared_folder_leads_to_no_file_of_the_user(kind: str, tmp_path: Path) -> None:
    shared, key = tmp_path / "shared", tmp_path / "key"
    shared.mkdir()
    key.write_text("secret")
    for name in ("gpt.prom", f".gpt.prom.{os.getpid()}.part", "metrics.jsonl", "report.part"):
        (shared / name).symlink_to(key)
    if kind == "prometheus":
        run = TrackedRun(folder=tmp_path, name="gpt")
        with pytest.raises(ec.ArgumentError, match="something is there that it"):
            PrometheusFile(run, str(shared / "gpt.prom"))
    else:
        with MetricsWriter(shared / "metrics.jsonl") as writer:
            writer.write("note", title="", text="")
        with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
            MetricsWriter(shared / "report.part", append=True)
    assert key.read_text() == "secret"


def make_run(folder: Path) -> None:
    def main(world: ec.World) -> None:
        for _ in ec.Blackbox(folder).steps([1]):
            pass
        ec.save(folder / "saved", step=1, model=nn.Linear(1, 1))

    ec.run(main, 1)


READERS = {
    "blackbox/*/job.json": ("replay", "RUN", "--list"),
    "blackbox/*/*/*.steps": ("replay", "RUN", "--step", "1", __file__),
    "blackbox/*/*/checkpoint/*/manifest.json": ("checkpoint", "verify", "PARENT"),
    "saved/*/manifest.json": ("checkpoint", "ls", "RUN/saved"),
    "metrics.jsonl": ("report", "RUN"),
    "model.json": ("plan", "FILE", "--cluster", "8 H100", "--global-batch", "8"),
    "cluster.json": ("plan", "RUN/ok.json", "--cluster", "FILE", "--global-batch", "8"),
    "schedule.csv": ("schedule", "check", "FILE"),
}


@pytest.mark.parametrize("kind", ["a pipe", "more than"])
@pytest.mark.parametrize("pattern", READERS)
def test_no_command_hangs_on_what_is_no_ordinary_file_or_reads_an_endless_one(
    pattern: str, kind: str, tmp_path: Path
) -> None:
    if "/" in pattern:
        make_run(tmp_path)
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64, "intermediate_size": 99}
    (tmp_path / "ok.json").write_text(json.dumps(sizes))
    file = next(tmp_path.glob(pattern), tmp_path / pattern)
    file.unlink(missing_ok=True)
    PUT[kind](file)
    names = {"RUN": tmp_path, "FILE": file, "PARENT": file.parent.parent}
    words = [
        str(names[word]) if word in names else word.replace("RUN", str(tmp_path))
        for word in READERS[pattern]
    ]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code in (1, 2), result.output
    assert not isinstance(result.exception, MemoryError | TypeError)
    assert file.name in result.output.replace("\n", "") or "damaged" in result.output
