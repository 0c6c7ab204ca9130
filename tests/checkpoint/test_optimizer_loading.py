"""The state of an optimizer is loaded for all of a parameter or for none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from tests.checkpoint.manifests import edited
from tests.checkpoint.whole import check_equal


def trained(model: nn.Module, make: Any) -> torch.optim.Optimizer:
    """An optimizer after one step of a model that takes rows of 4 or 5 numbers."""
    optimizer = make(model.parameters())
    x = torch.arange(10.0).view(2, 5)[:, : next(model.parameters()).shape[-1]]
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def check_separate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No state shares memory with a parameter or with another state."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert len(set(places)) == len(places)


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_parameter_whose_shape_changed_has_no_state(kind: str, tmp_path: Path) -> None:
    saved = nn.Linear(4, 3)
    first = trained(saved, OPTIMIZERS[kind])
    ec.save(tmp_path, step=1, model=saved, optimizer=first)
    model = nn.Linear(5, 3)
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = model.weight.detach().clone()
    loaded = ec.load(tmp_path, model=model, optimizer=optimizer, strict=False)
    assert loaded.differing["model/weight"] == "saved as [3, 4], here [3, 5]"
    assert any(name.startswith("optimizer/model/weight/") for name in loaded.differing)
    assert model.weight not in optimizer.state
    check_equal(dict(optimizer.state[model.bias]), dict(first.state[saved.bias]))
    assert torch.equal(model.weight, before)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    check_separate(model, optimizer)


def test_the_state_of_another_optimizer_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    saved = nn.Linear(4, 3)
    ec.save(tmp_path, step=1, model=saved, optimizer=trained(saved, torch.optim.AdamW))
    model = nn.Linear(4, 3)
    before = model.weight.detach().clone()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ec.CheckpointMismatch, match="optimizer: saved from AdamW, here SGD"):
        ec.load(tmp_path, model=model, optimizer=sgd)
    assert torch.equal(model.weight, before)
    assert not sgd.state
    adam = torch.optim.Adam(model.parameters())  # which has the same options
    ec.load(tmp_path, model=model, optimizer=adam)
    assert torch.equal(model.weight, saved.weight)


def test_a_state_of_the_new_shape_stays_where_the_saved_one_does_not_fit(tmp_path: Path) -> None:
    saved = nn.Linear(4, 3)
    ec.save(tmp_path, step=1, model=saved, optimizer=trained(saved, torch.optim.AdamW))
    model = nn.Linear(5, 3)
    optimizer = trained(model, torch.optim.AdamW)
    expected = optimizer.state[model.weight]["exp_avg"].clone()
    ec.load(tmp_path, model=model, optimizer=optimizer, strict=False)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], expected)
    check_separate(model, optimizer)


def flat_with_a_misfit(world: World, folder: Path) -> int:
    model = ec.FSDP(nn.Linear(5, 3), world.group, use_orig_params=False, min_num_params=0)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = ec.load(folder, model=model, optimizer=optimizer, strict=False)
    assert not optimizer.state
    assert loaded.differing["optimizer/model/weight/exp_avg"] == "saved as [3, 4], here [3, 5]"
    assert "part of a flat parameter" in loaded.differing["optimizer/model/weight"]
    return sum(ec.local_shard(parameter).numel() for parameter in model.parameters())


def test_a_flat_parameter_of_which_one_part_does_not_fit_has_no_state(tmp_path: Path) -> None:
    saved = nn.Linear(4, 3)
    ec.save(tmp_path, step=1, model=saved, optimizer=trained(saved, torch.optim.AdamW))
    assert ec.run(flat_with_a_misfit, 2, args=(tmp_path,)) == [9, 9]


def test_a_state_whose_dtype_cannot_be_converted_is_left_out(tmp_path: Path) -> None:
    saved = nn.Linear(4, 3)
    first = trained(saved, torch.optim.AdamW)
    manifest = ec.save(tmp_path, step=1, model=saved, optimizer=first) / "manifest.json"

    def edit(members: Any) -> None:
        states = members["sections"]["optimizer"]["state"]["values"]
        states["model/weight"]["exp_avg"] = {"$like": "I64"}

    manifest.write_bytes(edited(manifest.read_bytes(), edit))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = ec.load(tmp_path, model=model, optimizer=optimizer, strict=False)
    problem = "saved as torch.float32, here torch.int64"
    assert loaded.differing == {"optimizer/model/weight/exp_avg": problem}
    assert list(optimizer.state) == [model.bias]
    check_equal(dict(optimizer.state[model.bias]), dict(first.state[saved.bias]))
    assert torch.equal(model.weight, saved.weight)


def test_a_state_that_cannot_be_written_is_exchanged(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = trained(model, torch.optim.Adam)
    ec.save(tmp_path, step=3, model=model, optimizer=optimizer)
    expected = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    optimizer.state[model.weight]["exp_avg"] = torch.ones(1).expand(2, 2)
    ec.load(tmp_path, model=model, optimizer=optimizer)
    check_equal(optimizer.state[model.weight]["exp_avg"], expected)


def test_what_was_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = trained(model, torch.optim.Adam)
    ec.save(tmp_path, step=3, model=model, optimizer=optimizer)
    optimizer.state.clear()
    with torch.inference_mode():
        ec.load(tmp_path, model=model, optimizer=optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def grouped(model: nn.Module, lrs: dict[str, float]) -> torch.optim.Optimizer:
    """An optimizer with a group for each start of names of parameters."""
    named = [*model.named_parameters()]
    return torch.optim.AdamW(
        [
            {"params": [param for name, param in named if name.startswith(start)], "lr": lr}
            for start, lr in lrs.items()
        ]
    )


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def loaded_lrs(world: World, folder: Path, strict: bool, lrs: dict[str, float]) -> Any:
    """The learning rates after a load in one process or in stages, and what does not fit."""
    model: nn.Module = layers()
    if world.size > 1:
        model = ec.Pipeline([*layers()], world.group, microbatches=1, loss_fn=nn.MSELoss())
    optimizer = grouped(model, lrs)
    try:
        differing = ec.load(folder, model=model, optimizer=optimizer, strict=strict).differing
    except ec.CheckpointMismatch as error:
        differing = error.differing
    return [group["lr"] for group in optimizer.param_groups], sorted(differing)


SAVED = {"0": 0.1, "1": 0.2}
GROUPS = "optimizer.param_groups"
CASES: dict[str, tuple[dict[str, float], dict[str, float], list[float], list[str]]] = {
    "fewer groups": (SAVED, {"": 9.0}, [9.0], [GROUPS, f"{GROUPS}[0]"]),
    "more groups": (
        {"": 0.1},
        {"0": 8.0, "1": 9.0},
        [8.0, 9.0],
        [GROUPS, f"{GROUPS}[0]", f"{GROUPS}[1]"],
    ),
    "another order": (SAVED, {"1": 8.0, "0": 9.0}, [0.2, 0.1], []),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_load_the_options_of_the_group_that_was_saved_or_keep_their_own(
    case: str, strict: bool, tmp_path: Path
) -> None:
    saved, here, lrs, differing = CASES[case]
    model = layers()
    ec.save(tmp_path, step=1, model=model, optimizer=grouped(model, saved))
    for size in (1, 2):
        found = ec.run(loaded_lrs, size, args=(tmp_path, strict, here))
        assert found == [(lrs, differing)] * size
