"""Libraries that keep in globals which rank a process is train on simulated ranks."""

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec

RANKS = 3


def trained(world: ec.World) -> tuple[int, int, torch.Tensor, bool]:
    """A loop with Accelerate, over rows that it hands out."""
    library = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = nn.Linear(4, 1, dtype=torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(24, 4, dtype=torch.float64)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight.detach()
    return accelerator.process_index, accelerator.num_processes, weight, accelerator.is_main_process


def test_accelerate_trains_on_simulated_ranks_as_on_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = pytest.importorskip("accelerate")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    results = ec.run(trained, RANKS)
    assert [result[0] for result in results] == list(range(RANKS))
    assert {result[1] for result in results} == {RANKS}
    assert [result[3] for result in results] == [True, False, False]
    assert all(torch.equal(result[2], results[0][2]) for result in results)
    torch.testing.assert_close(results[0][2], on_one_process(), rtol=0, atol=1e-12)
    state = library.state
    for kind in (state.PartialState, state.AcceleratorState, state.GradientState):
        assert kind._shared_state == {}  # of the caller, who has none


def on_one_process() -> torch.Tensor:
    """The weights of steps over the rows that all ranks have between two steps of theirs."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(24, 4, dtype=torch.float64)
    for batch in rows.split(2 * 2 * RANKS):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()
