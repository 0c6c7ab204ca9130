"""A load beside a job that removes or replaces its step reads one version, or says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint import api
from echelon.comm.world import World
from echelon.errors import CheckpointError

REAL = api.load_step


def filled(value: float) -> nn.Linear:
    model = nn.Linear(40, 40)
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def loads(world: World, folder: str) -> float:
    model = ec.DDP(filled(0.0), world.group)
    ec.load(folder, model=model)
    (value,) = {*torch.cat([param.flatten() for param in model.parameters()]).tolist()}
    return float(value)


@pytest.mark.parametrize("how", ["overwrite", "keep"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_load_whose_step_goes_meanwhile_has_the_new_one(
    how: str, is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec.save(tmp_path, step=1, model=filled(1.0))
    times = 0

    def go(coordinator: object, items: object, request: object, folder: object) -> object:
        """Read a step that the other job takes away before, or after, it is read."""
        nonlocal times
        given = coordinator, items, request, folder
        loaded = REAL(*given) if is_late else None  # type: ignore[arg-type]
        if coordinator.rank == 0 and times == 0:  # type: ignore[attr-defined]
            times += 1
            options = {"step": 1, "overwrite": True} if how == "overwrite" else {"step": 2}
            ec.save(tmp_path, model=filled(2.0), keep=1, **options)  # type: ignore[arg-type]
        coordinator.run_on_first("the other job", lambda: None)  # type: ignore[attr-defined]
        return loaded or REAL(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(api, "load_step", go)
    expected = 1.0 if (how, is_late) == ("keep", True) else 2.0  # it had been read as a whole
    assert ec.run(loads, 2, args=(str(tmp_path),)) == [expected] * 2


def test_a_load_that_never_finds_its_step_again_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(*given: object) -> object:
        loaded = REAL(*given)  # type: ignore[arg-type]
        ec.save(tmp_path, step=1, value=len(saved), overwrite=True)
        saved.append(1)
        return loaded

    saved: list[int] = []
    ec.save(tmp_path, step=1, value="first")
    monkeypatch.setattr(api, "load_step", go)
    with pytest.raises(CheckpointError, match="during each of 10 tries"):
        ec.load(tmp_path)
