"""A save or a whole state that only rank 0 asks for: the error says that all ranks do."""

from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world


def wrapped(world: ec.World, technique: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if technique == "FSDP":
        return ec.FSDP(model, world.group, units=ec.units.by_type(nn.Linear))
    return ec.Pipeline(list(model), world.group, microbatches=2, loss_fn=nn.functional.mse_loss)


def calls_alone(world: ec.World, technique: str, call: str, folder: str, goes_on: bool) -> str:
    model = wrapped(world, technique)
    try:
        if world.rank == 0:
            if call == "save":
                ec.save(Path(folder), model=model, step=1)
            elif call == "optimizer":
                model.optimizer_state_dict(torch.optim.SGD(model.parameters(), lr=0.1))
            else:
                model.whole_state_dict()
        if goes_on and technique == "FSDP":
            model(torch.ones(4, 2)).sum().backward()
        elif goes_on:
            model.step(torch.ones(4, 2), target=torch.ones(4, 2))
    except ec.errors.CommError as error:
        return str(error)
    return ""


SENTENCES = {
    "save": "a request to save, which all ranks make",
    "state": "whole_state_dict(), which all ranks call",
    "optimizer": "optimizer_state_dict(), which all ranks call",
}


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_the_call_of_one_rank_is_named_as_one_of_all_ranks(kind, goes_on, tmp_path):
    for technique in ("FSDP", "Pipeline"):
        for call, sentence in SENTENCES.items():
            if kind != "threads" and call == "optimizer":
                continue  # as the other two; each takes a start of processes
            args = technique, call, str(tmp_path / f"{technique}-{call}"), goes_on
            try:
                first = run_world(kind, calls_alone, 2, args, timeout=5.0)[0]
            except ec.errors.CommError as error:  # of simulated ranks, whose failure is one
                first = str(error)
            assert sentence in first, (technique, call, first)
