"""Odd files of torch end in a sentence to read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
from echelon.checkpoint.convert.torch_files import read_torch


def test_an_archive_that_says_it_spans_several_disks_is_a_sentence(tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2)}, source)
    data = bytearray(source.read_bytes())
    at = data.rindex(b"PK\x06\x07")  # where zip has the end of a large archive
    data[at + 16] = 2
    source.write_bytes(data)
    with pytest.raises(ec.CheckpointCorrupt, match="span multiple disks"):
        convert(source, tmp_path / "run", ConvertOptions(to=Form.ECHELON))


def test_what_a_terminal_would_obey_in_a_step_is_escaped_in_errors_and_warnings(
    tmp_path: Path,
) -> None:
    backwards, red = "w\u202eeht si lla", "\x1b[31mred\nfine"
    layer, odd = nn.Linear(2, 2), nn.Module()
    odd.register_parameter(backwards, nn.Parameter(torch.ones(1)))
    ec.save(tmp_path, model=odd, step=1)
    with pytest.raises(ec.CheckpointMismatch) as mismatch:
        ec.load(tmp_path, model=layer)
    ec.save(tmp_path, model=layer, step=2)
    (tmp_path / "step-000000002" / red).touch()
    with pytest.raises(ec.CheckpointCorrupt) as corrupt:
        ec.load(tmp_path, model=layer)
    with pytest.warns(UserWarning, match="was passed over") as warned:
        ec.load(tmp_path, model=odd, fallback=True)
    assert "unexpected: model/w\\u202eeht" in str(mismatch.value)
    for text in (str(corrupt.value), str(warned[0].message)):
        assert "\x1b" not in text
        assert "/\\x1b[31mred\\nfine: the checkpoint has no such file" in text


def test_a_file_that_is_none_of_torch_is_told_so_without_advice_to_unpickle_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text("print('hello')\n")
    with pytest.raises(ec.CheckpointCorrupt, match=r"is no file of torch.save") as caught:
        convert(tmp_path / "script.py", tmp_path / "run", ConvertOptions(to=Form.ECHELON))
    assert "weights_only" not in str(caught.value)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ec.ArgumentError, match="is neither a file nor a folder"):
        convert(tmp_path / "pipe", tmp_path / "run", ConvertOptions(to=Form.ECHELON))


def test_a_truncated_archive_is_called_damaged_and_a_failing_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1000)}, source)
    whole = source.read_bytes()
    source.write_bytes(whole[:-200])
    with pytest.raises(ec.CheckpointCorrupt, match=r"a\.pt: is no file .* or a damaged one"):
        read_torch(source)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(torch, "load", fail)
    source.write_bytes(whole)
    with pytest.raises(OSError, match="Input/output error") as failed:
        read_torch(source)
    assert failed.value.filename == str(source)
