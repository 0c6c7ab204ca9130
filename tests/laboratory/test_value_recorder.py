import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.comm.world import World
from echelon.laboratory.value_recorder import TrainingValues, ValueRecorder
from tests.laboratory.tasks import mlp, rows_of_numbers, sgd


def recorded(model: nn.Module, steps: int = 2) -> TrainingValues:
    recorder = ValueRecorder(model)
    optimizer = sgd(model.parameters())
    with recorder.recording():
        for x, y in rows_of_numbers()[:steps]:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder.finish(None)


def test_a_training_is_recorded_step_by_step_under_plain_names() -> None:
    torch.manual_seed(0)
    model = mlp()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    values = recorded(model)
    assert len(values.steps) == 2
    first = values.steps[0]
    assert list(first.outputs) == ["0", "1", "2", ""]
    assert [piece.name for piece in first.gradients] == list(start)
    assert all(torch.equal(p.flat, start[p.name].view(-1)) for p in first.parameters)
    assert {piece.name for piece in first.states} == {f"momentum_buffer of {n}" for n in start}
    assert [len(step.roots) for step in values.steps] == [1, 1]
    assert first.roots[0].output_gradients[0] is not None
    ending = {piece.name: piece.flat for piece in values.parameters}
    assert all(torch.equal(ending[n], p.detach().view(-1)) for n, p in model.named_parameters())


def test_nothing_is_left_on_the_model_after_recording() -> None:
    model = mlp()
    recorded(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_simulated_ranks_record_themselves_alone() -> None:
    def main(world: World) -> int:
        torch.manual_seed(world.rank)
        return len(recorded(mlp(), steps=1 + world.rank).steps)

    assert ec.run(main, 3) == [1, 2, 3]


def test_a_forward_that_is_computed_again_in_backward_is_recorded_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return output

    values = recorded(Checkpointed(), steps=1)
    assert len(values.steps[0].outputs["inner.0"]) == 1


def test_a_model_that_draws_random_numbers_is_noticed() -> None:
    assert recorded(nn.Sequential(nn.Dropout(0.5), mlp())).steps[0].roots[0].is_random
    assert not recorded(mlp()).steps[0].roots[0].is_random


def test_modules_that_the_loop_calls_one_by_one_are_one_forward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    recorder = ValueRecorder(model)
    optimizer = sgd(model.parameters())
    [(x, y)] = rows_of_numbers()[:1]
    with recorder.recording():
        for part in (slice(0, 4), slice(4, 8)):
            mse_loss(model[2](model[1](model[0](x[part]))), y[part]).backward()
        optimizer.step()
    [step] = recorder.finish(None).steps
    assert [
        torch.equal(root.inputs[0], x[part])
        for root, part in zip(step.roots, (slice(0, 4), slice(4, 8)), strict=True)
    ] == [True, True]
    assert all(root.is_random for root in step.roots)
    assert list(step.outputs) == ["0"]  # what the others take is no row of a batch


def test_a_forward_that_fails_is_over() -> None:
    model = mlp()
    recorder = ValueRecorder(model)
    [(x, _)] = rows_of_numbers()[:1]
    with recorder.recording():
        with pytest.raises(RuntimeError, match="shapes"):
            model(x[:, :2])
        model(x)
    assert len(recorder.current.roots) == 2
