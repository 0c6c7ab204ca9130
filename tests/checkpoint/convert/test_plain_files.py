"""Files of somebody else end in a sentence: they run nothing, lead nowhere and take no memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import echelon as ec
from echelon.checkpoint.convert import plain_files
from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
from echelon.checkpoint.convert.plain_files import INDEX
from tests.bomb import Bomb

TO_ECHELON = ConvertOptions(to=Form.ECHELON)
Edit = Callable[[bytes], bytes]


# --- files of torch.save -------------------------------------------------------------------------


def torch_file(path: Path, edit: Edit = bytes, *, packed: bool = False) -> Path:
    """A file of ``torch.save`` with one tensor, whose pickle was edited."""
    made, edited = io.BytesIO(), io.BytesIO()
    torch.save({"model": {"w": torch.arange(4.0)}}, made)
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(made) as source, zipfile.ZipFile(edited, "w", kind) as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, edit(data) if name.endswith("data.pkl") else data)
    path.write_bytes(edited.getvalue())
    return path


SHAPE = b"K\x04\x85q\nK\x01"  # in the pickle: (4,), and the stride (1,)
NO_FILE = r"is no file of torch\.save"
BILLIONS = b"J\xff\xff\xff\x7f"


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda data: data.replace(SHAPE, BILLIONS + b"\x85q\nK\x00"),
            "lies in 16 bytes",
        ),
        (
            lambda data: data.replace(SHAPE, BILLIONS + b"\x85q\nK\x01"),
            NO_FILE,
        ),
        (
            lambda data: data.replace(b"cpuq\x08K\x04", b"cpuq\x08" + BILLIONS),
            NO_FILE,
        ),
        (
            lambda data: data.replace(b"cpuq\x08K\x04", b"cpuq\x08J\xff\xff\xff\xff"),
            NO_FILE,
        ),
        (lambda data: b"\x80\x02.", "a damaged one: pop from empty list"),
        (lambda data: b"\x80\x02]q\x00.", "holds a list, not a dict"),
    ],
)
def test_a_torch_file_with_other_sizes_than_it_has_is_refused(
    edit: Edit, sentence: str, tmp_path: Path
) -> None:
    source = torch_file(tmp_path / "a.pt", edit)
    with pytest.raises(ec.CheckpointCorrupt, match=sentence):
        convert(source, tmp_path / "run", TO_ECHELON)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_with_code_runs_nothing(legacy: bool, tmp_path: Path) -> None:
    bomb = Bomb(str(tmp_path / "ran"))
    torch.save({"model": bomb}, tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ec.CheckpointCorrupt, match=r"holds a .*, which only unpickling could make"):
        convert(tmp_path / "a.pt", tmp_path / "run", TO_ECHELON)
    (tmp_path / "b.pt").write_bytes(pickle.dumps(bomb))
    with pytest.raises(ec.CheckpointCorrupt, match=NO_FILE):
        convert(tmp_path / "b.pt", tmp_path / "run", TO_ECHELON)
    assert not (tmp_path / "ran").exists()


def test_an_archive_that_grows_when_it_is_read_is_refused_before_that(tmp_path: Path) -> None:
    source = torch_file(tmp_path / "a.pt", packed=True)
    with pytest.raises(ec.CheckpointCorrupt, match="is compressed, which torch"):
        convert(source, tmp_path / "run", TO_ECHELON)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"param_groups": 3},
        {"param_groups": [3]},
        {"param_groups": [{"lr": 1.0}]},
        {"param_groups": [{"params": [[1]]}]},
        {"param_groups": [{"params": [0], "param_names": ["w", "v"]}]},
        {"param_groups": [{"params": [0], "param_names": ["w"]}], "state": {0: 5}},
        {"param_groups": [{"params": [0], "param_names": ["w"]}], "state": {7: {}}},
    ],
)
def test_an_optimizer_of_another_form_is_a_sentence(optimizer: Any, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "a.pt")
    with pytest.raises(ec.CheckpointCorrupt, match="its optimizer has another form"):
        convert(tmp_path / "a.pt", tmp_path / "run", TO_ECHELON)


@pytest.mark.parametrize(
    "found",
    [
        {1: torch.ones(2), "w": torch.ones(2)},
        {"model": {"a." * 400 + "w": torch.ones(2)}},
        {"model": {"\x1b[2J": torch.ones(2)}},
        {"model": {"w": torch.eye(2).to_sparse()}},
        {"model": {"w": torch.empty(2, device="meta")}},
        {"model": {"a": torch.ones(1), "a.b": torch.ones(1)}},
        {"model": {"../../x": torch.ones(2)}},
        {"model": {"x" * 5000: torch.ones(2)}},
        {"w": 1},
        {},
    ],
    ids=lambda found: str([*found])[:20],
)
def test_a_torch_file_of_odd_things_is_a_sentence_or_stays_in_its_place(
    found: Any, tmp_path: Path
) -> None:
    torch.save(found, tmp_path / "a.pt")
    with pytest.raises((ec.errors.ArgumentError, ec.CheckpointError)):
        convert(tmp_path / "a.pt", tmp_path / "run", TO_ECHELON)
    assert not list(tmp_path.glob("run/step-*"))


def test_names_that_look_like_paths_name_tensors_and_no_files(tmp_path: Path) -> None:
    torch.save({"model": {"/etc/passwd": torch.ones(2)}}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "in" / "run", TO_ECHELON)
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "in"}


def test_a_dcp_is_read_by_pickle_only_where_the_user_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(str(tmp_path / "ran"))))
    with pytest.raises(ec.errors.ArgumentError, match="say --trust-pickle"):
        convert(folder, tmp_path / "run", TO_ECHELON)
    assert not (tmp_path / "ran").exists()


# --- safetensors ---------------------------------------------------------------------------------


def plain_file(path: Path, header: str, data: bytes = bytes(8)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)
    return path


ENTRY = '"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (f"{{{ENTRY},{ENTRY}}}", "the key 'w' is there twice"),
        (f'{{"__metadata__":{{}},{ENTRY},"__metadata__":{{}}}}', "'__metadata__' is there twice"),
        (ENTRY.join("{}").replace("[2]", "[2,1099511627776]"), "and it has 8796093022208 bytes"),
        (ENTRY.join("{}").replace("[0,8]", "[0,80000000000]"), "and it has 8 bytes"),
        (ENTRY.join("{}").replace("8]", "4]").replace("[2]", "[1]"), "has 70 bytes instead of 66"),
        (ENTRY.join("{}").replace("F32", "PICKLE"), "the dtype 'PICKLE' is not known"),
        ("[" * 500, "its header does not begin as one"),
    ],
    ids=lambda text: text[-30:],
)
def test_a_safetensors_file_that_readers_could_take_in_two_ways_is_refused(
    header: str, sentence: str, tmp_path: Path
) -> None:
    source = plain_file(tmp_path / "a.safetensors", header)
    with pytest.raises(ec.CheckpointCorrupt, match=sentence):
        convert(source, tmp_path / "run", TO_ECHELON)


def test_a_file_larger_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 1 << 40
    header = f'{{"w":{{"dtype":"F32","shape":[{numel}],"data_offsets":[0,{4 * numel}]}}}}'
    source = plain_file(tmp_path / "a.safetensors", header)
    with open(source, "ab") as file:
        file.truncate(8 + len(header) + 4 * numel)  # a file with holes takes no room
    with pytest.raises(ec.CheckpointError, match="takes 4194304 MiB of memory"):
        convert(source, tmp_path / "run", TO_ECHELON)
    monkeypatch.setattr(plain_files, "available_nbytes", lambda: 100)
    with pytest.raises(ec.CheckpointError, match="MiB are available"):
        convert(torch_file(tmp_path / "a.pt"), tmp_path / "run", TO_ECHELON)


def sharded(folder: Path, index: str | None = None, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    weights = json.dumps({"weight_map": {"w": file}}) if index is None else index
    (folder / INDEX).write_text(weights)
    return folder


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a\0b", "fifo"],
)
def test_an_index_that_names_files_elsewhere_is_refused(file: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = sharded(tmp_path / "model", file=file)
    (folder / "sub").mkdir()
    os.mkfifo(folder / "fifo")
    with pytest.raises(ec.CheckpointCorrupt, match="which is no file of the folder"):
        convert(folder, tmp_path / "run", TO_ECHELON)


@pytest.mark.parametrize("has_index", [True, False])
def test_links_out_of_the_folder_are_refused_and_those_of_the_cache_are_not(
    has_index: bool, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, secret)
    folder = sharded(tmp_path / "model")
    if not has_index:
        (folder / INDEX).unlink()
    (folder / "model.safetensors").symlink_to(secret)
    with pytest.raises(ec.CheckpointCorrupt, match=r"is a link to .*secret\.safetensors, which is"):
        convert(folder, tmp_path / "run", TO_ECHELON)
    blobs = tmp_path / "models--x" / "blobs"
    cached = sharded(tmp_path / "models--x" / "snapshots" / "main")
    blobs.mkdir()
    secret.rename(blobs / "0123")
    (cached / "model.safetensors").symlink_to("../../blobs/0123")
    assert len(convert(cached, tmp_path / "run", TO_ECHELON).written) == 1


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"w": 5}}',
        '{"weight_map": {"w": "model.safetensors", "w": "model.safetensors"}}',
        '{"weight_map": {"v": "model.safetensors"}}',
        '{"weight_map": ' + "[" * 100_000,
        '{"weight_map": {"w": ' + "9" * 100_000 + "}}",
    ],
    ids=lambda text: text[:60],
)
def test_an_index_that_is_none_is_a_sentence(index: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model", index)
    safetensors.torch.save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ec.CheckpointCorrupt):
        convert(folder, tmp_path / "run", TO_ECHELON)
