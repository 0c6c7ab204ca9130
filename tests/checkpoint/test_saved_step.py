"""A damaged tensor is named, and the difference of two steps is said in full."""

from pathlib import Path

import torch
from torch import nn
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_verify_names_the_damaged_tensor_and_fails(tmp_path: Path) -> None:
    path = ec.save(tmp_path, step=1, model=nn.Linear(2, 2), rng=False)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, text = invoke("verify", tmp_path)
    assert code == 1
    assert "'model/bias'" in text
    # The manifests alone are the same.
    code, text = invoke("diff", path, path)
    assert code == 2
    assert "'model/bias'" in text


def test_diff_says_which_tensors_differ_and_by_how_much(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    one = ec.save(tmp_path, step=1, model=model, epoch=1, rng=False)
    same = ec.save(tmp_path, step=2, model=model, epoch=1, rng=False)
    with torch.no_grad():
        model.bias[1] += 0.5
    other = ec.save(tmp_path, step=3, model=model, epoch=2, rng=False)
    assert invoke("diff", one, same) == (0, "the same\n")
    code, text = invoke("diff", one, other)
    assert code == 1
    assert "model/bias: 1 of 2 elements differ, by at most 0.5" in text
    assert "epoch: 1 and 2" in text
