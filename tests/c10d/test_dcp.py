"""Checkpoints of torch.distributed.checkpoint are read and written by one process."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import echelon as ec
from echelon.c10d.dcp import is_dcp, read_dcp, write_dcp
from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
from tests.checkpoint.layouts import make_model
from tests.checkpoint.whole import check_equal


@pytest.mark.filterwarnings("error")
def test_a_nested_state_comes_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3, "names": {"a": "b"}}
    assert not is_dcp(tmp_path)
    write_dcp(state, tmp_path / "dcp")
    assert is_dcp(tmp_path / "dcp")
    check_equal(read_dcp(tmp_path / "dcp"), state)
    assert os.listdir(tmp_path) == ["dcp"]


def test_a_damaged_checkpoint_is_an_error_with_its_path(tmp_path: Path) -> None:
    write_dcp({"w": torch.ones(3)}, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(ec.CheckpointCorrupt, match="dcp: DCP cannot read it: "):
        read_dcp(tmp_path / "dcp")
    assert os.listdir(tmp_path) == ["dcp"]


def test_a_dcp_of_pytorchs_own_is_taken(tmp_path: Path) -> None:
    model = make_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    write_dcp(states, tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "run", ConvertOptions(trust_pickle=True))
    other = make_model(torch.float32, seed=1)
    loaded = torch.optim.AdamW(other.parameters())
    ec.load(tmp_path / "run", model=other, optimizer=loaded)
    check_equal(other.state_dict(), model.state_dict())
    check_equal(loaded.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_dcp_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    ec.save(tmp_path / "run", model=nn.Linear(2, 2), step=1)
    (tmp_path / "file").touch()
    with pytest.raises(ec.CheckpointError, match="file: File exists"):
        convert(tmp_path / "run", tmp_path / "file" / "dcp", ConvertOptions(to=Form.DCP))


def test_a_pipe_in_a_dcp_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    ec.save(tmp_path / "run", model=nn.Linear(2, 2), step=1)
    convert(tmp_path / "run", tmp_path / "dcp", ConvertOptions(to=Form.DCP))
    for file in (tmp_path / "dcp").glob("*.distcp"):
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(ec.CheckpointCorrupt, match=r"distcp: is no ordinary file"):
        convert(tmp_path / "dcp", tmp_path / "a.pt", ConvertOptions(trust_pickle=True))
