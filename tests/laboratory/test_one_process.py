import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from echelon.errors import UnsupportedError
from echelon.laboratory.batch_rows import checked_batches
from echelon.laboratory.one_process import OneProcess
from tests.laboratory.tasks import mlp, rows_of_numbers, sgd


def training(make_model: type[nn.Module] | None = None, clip: float | None = None) -> OneProcess:
    return OneProcess(
        make_model=make_model or mlp,
        batches=checked_batches(rows_of_numbers(), 3),
        loss_fn=mse_loss,
        optimizer=sgd,
        clip=clip,
    )


def test_one_process_trains_as_a_plain_loop_does() -> None:
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = sgd(model.parameters())
    for x, y in rows_of_numbers():
        mse_loss(model(x.double()), y.double()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    values = training(clip=0.5).train()
    for piece in values.parameters:
        assert torch.equal(piece.flat.view(piece.shape), model.get_parameter(piece.name).detach())
    assert len(values.steps) == 3


def test_the_random_stream_of_the_caller_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    training().train()
    assert torch.equal(before, torch.get_rng_state())


def test_the_perturbed_training_differs_by_rounding_only() -> None:
    exact, other = training().train(), training().perturbed().train()
    apart = [
        float((a.flat - b.flat).abs().max())
        for a, b in zip(exact.parameters, other.parameters, strict=True)
    ]
    assert 0 < max(apart) < 1e-11


class OnlyFloat32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.zeros(1)) @ torch.ones(1, 1)


def test_a_model_that_does_not_run_in_float64_is_refused_with_its_error() -> None:
    with pytest.raises(UnsupportedError, match="runs in float32 and not in float64"):
        training(OnlyFloat32).train()
