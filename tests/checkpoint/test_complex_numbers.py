"""Models of complex numbers are saved, resharded, resumed and converted, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import echelon as ec
from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
from echelon.comm.world import World
from echelon.errors import ArgumentError, CheckpointMismatch
from tests.checkpoint.layouts import Trainee
from tests.checkpoint.whole import State, check_equal, whole_state


class Model(nn.Module):
    """Parameters and a buffer of complex numbers, beside real ones; the loss is real."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=dtype))
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))
        self.real = nn.Linear(3, 3, dtype=dtype.to_real())
        self.register_buffer("constant", torch.randn(2, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = self.real(x).to(self.weight.dtype) @ self.weight.T * self.scale
        return (y.abs() ** 2).mean() + self.constant.abs().sum()


WRAPPERS: dict[str, Any] = {
    "plain": lambda model, group: model,
    "ddp": ec.DDP,
    "flat": lambda model, group: ec.FSDP(model, group, units=ec.units.whole()),
    "rows": lambda model, group: ec.FSDP(model, group, units=ec.units.whole(), layout="rows"),
    "one parameter": lambda model, group: ec.FSDP(
        model, group, units=ec.units.whole(), use_orig_params=False
    ),
    "zero-2": lambda model, group: ec.FSDP(
        model, group, units=ec.units.whole(), strategy=ec.Strategy.SHARD_GRAD_OP
    ),
}


def trained(
    world: World, wrapper: str, dtype: torch.dtype, steps: range, folder: Path | None = None
) -> State:
    """The model and its Adam after steps on a batch of 12, of which ranks have equal parts."""
    model, optimizer = made(world, wrapper, dtype, steps.start)
    if steps.start:
        ec.load(folder, model=model, optimizer=optimizer, group=world.group)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 3, generator=generator, dtype=dtype.to_real())
        model(x[world.rank :: world.size]).backward()
        ec.clip_grad_norm_(model, 5.0)
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None and not steps.start:
        ec.save(folder, step=steps.stop, model=model, optimizer=optimizer, group=world.group)
    return whole_state(Trainee(model, optimizer, line=0, lines=1))


def loaded(world: World, wrapper: str, dtype: torch.dtype, folder: Path) -> State:
    model, optimizer = made(world, wrapper, dtype, seed=1)
    ec.load(folder, model=model, optimizer=optimizer, group=world.group)
    return whole_state(Trainee(model, optimizer, line=0, lines=1))


def made(
    world: World, wrapper: str, dtype: torch.dtype, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = WRAPPERS[wrapper](Model(dtype), world.group)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64], ids=str)
def test_complex_models_train_and_resume_on_other_ranks_as_in_one_process(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tolerance = {torch.complex128: 1e-12, torch.complex64: 1e-5}[dtype]  # sums in another order
    (expected,) = ec.run(trained, 1, args=("plain", dtype, range(4)))
    wrappers = [name for name in WRAPPERS if name != "plain"]
    for i, wrapper in enumerate(wrappers):
        folder = tmp_path / wrapper
        saved = ec.run(trained, 2, args=(wrapper, dtype, range(2), folder))
        for other, ranks in ((wrappers[i - 1], 3), ("plain", 1)):
            for state in ec.run(loaded, ranks, args=(other, dtype, folder)):
                check_equal(state["model"], saved[0]["model"])
                check_equal(state["optimizer"]["state"], saved[0]["optimizer"]["state"])
        for state in ec.run(trained, 3, args=(wrappers[i - 1], dtype, range(2, 4), folder)):
            torch.testing.assert_close(
                state["model"], expected["model"], rtol=tolerance, atol=tolerance
            )


def test_safetensors_opens_the_files_and_other_formats_keep_the_numbers(tmp_path: Path) -> None:
    model = Model(torch.complex128)
    values = {"array": np.array([1j, -0.0]), "number": np.complex128(1 + 2j)}
    step = ec.save(tmp_path / "run", step=1, model=model, values=values)
    assert json.loads((step / "manifest.json").read_bytes())["schema"] == 2
    with safe_open(step / "rank-00000.safetensors", framework="pt") as file:
        pairs = file.get_tensor("model/weight")
        assert torch.equal(pairs, torch.view_as_real(model.weight.detach()))
        assert file.get_tensor("model/scale").shape == (2,)
    found = ec.load(tmp_path / "run", model=Model(torch.complex128)).values["values"]
    assert found["array"].tobytes() == values["array"].tobytes()
    assert found["number"] == values["number"]

    for name, form in (("dcp", Form.DCP), ("model.pt", None)):
        convert(tmp_path / "run", tmp_path / name, ConvertOptions(to=form, weights_only=True))
        trust = ConvertOptions(to=Form.ECHELON, trust_pickle=True)
        convert(tmp_path / name, tmp_path / f"from {name}", trust)
        again = Model(torch.complex128)
        ec.load(tmp_path / f"from {name}", model=again)
        check_equal(dict(again.state_dict()), dict(model.state_dict()))
    with pytest.raises(ArgumentError, match=r"complex128, which safetensors does not have: .*\.pt"):
        convert(tmp_path / "run", tmp_path / "model.safetensors", ConvertOptions())


def test_a_checkpoint_without_complex128_is_of_the_schema_that_older_versions_read(
    tmp_path: Path,
) -> None:
    step = ec.save(tmp_path, step=1, model=Model(torch.complex64))
    assert json.loads((step / "manifest.json").read_bytes())["schema"] == 1


def test_complex_numbers_are_not_loaded_as_real_ones(tmp_path: Path) -> None:
    ec.save(tmp_path, step=1, model=nn.Linear(2, 2, dtype=torch.complex128))
    real = nn.Linear(2, 2, dtype=torch.float64)
    before = real.weight.detach().clone()
    with pytest.raises(CheckpointMismatch, match=r"complex128, here torch\.float64"):
        ec.load(tmp_path, model=real)
    ec.load(tmp_path, model=real, strict=False)
    assert torch.equal(real.weight, before)
