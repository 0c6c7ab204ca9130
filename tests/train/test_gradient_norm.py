import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.train.gradient_norm import grad_norm
from tests.worlds import KINDS, run_world


def model_with_gradients(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    model(torch.randn(4, 5, dtype=dtype)).square().sum().backward()
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_that_of_all_gradients_as_one_vector(norm_type: float) -> None:
    model = model_with_gradients()
    expected = torch.linalg.vector_norm(flat(model), norm_type)
    torch.testing.assert_close(grad_norm(model, norm_type), expected)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6, math.inf])
def test_clipping_is_torchs_own(max_norm: float, norm_type: float) -> None:
    model, torch_model = model_with_gradients(), model_with_gradients()
    norm = ec.clip_grad_norm_(model, max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(torch_model.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(flat(model), flat(torch_model))


def test_a_small_gradient_is_left_as_it_is() -> None:
    model = model_with_gradients()
    before = flat(model)
    ec.clip_grad_norm_(model, 1e6)
    assert torch.equal(flat(model), before)


def test_gradients_of_several_dtypes_make_one_norm() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).to(torch.float64)])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = ec.clip_grad_norm_(model, 1.0)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, torch.tensor(12.0, dtype=torch.float64).sqrt())


def test_parameters_without_a_gradient_do_not_count() -> None:
    model = nn.Linear(2, 2)
    assert ec.clip_grad_norm_(model, 1.0).item() == 0.0
    model.bias.grad = torch.tensor([3.0, 4.0])
    assert ec.clip_grad_norm_(model, math.inf).item() == 5.0


def test_all_ranks_of_a_data_parallel_model_see_the_norm_of_the_whole_batch() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(6, 5, dtype=torch.float64)

    def main(world: ec.World) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        plain = nn.Linear(5, 2).to(torch.float64)
        model = ec.DDP(plain, world.group)
        model(inputs[world.rank :: world.size]).square().mean().backward()
        return ec.clip_grad_norm_(model, 0.1), flat(model).clone()

    results = ec.run(main, 3)
    torch.manual_seed(0)
    alone = nn.Linear(5, 2).to(torch.float64)
    alone(inputs).square().mean().backward()
    expected = ec.clip_grad_norm_(alone, 0.1)
    for norm, gradients in results:
        assert torch.equal(norm, results[0][0])
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(gradients, flat(alone), rtol=1e-12, atol=1e-15)


def test_a_sparse_gradient_is_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ec.ArgumentError, match=r"gradient of 0\.weight"):
        ec.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "name"),
    [(-1.0, 2.0, "max_norm"), (math.nan, 2.0, "max_norm"), (1.0, 0.5, "norm_type")],
)
def test_bounds_that_mean_nothing_are_refused(max_norm: float, norm_type: float, name: str) -> None:
    with pytest.raises(ec.ArgumentError, match=name):
        ec.clip_grad_norm_(model_with_gradients(), max_norm, norm_type)


# --- The norm of complex gradients is real, and gradients are clipped by it --------------------


CLOSE = {"rtol": 1e-11, "atol": 1e-13}
ORDERS = (2.0, 1.0, 3.0, math.inf)


class Waves(nn.Module):
    """Complex weights, and real ones."""

    def __init__(self) -> None:
        super().__init__()
        phases = torch.arange(5, dtype=torch.float64)
        self.waves = nn.Parameter(torch.polar(phases + 1, phases))
        self.gain = nn.Parameter(phases + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.waves).abs() * self.gain


def rows(rank: int) -> Tensor:
    return torch.full((1, 5), rank + 1.0, dtype=torch.float64)


def plain_stages() -> nn.Sequential:
    return nn.Sequential(Waves(), Waves())


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def wrapped(world: ec.World, technique: str) -> nn.Module:
    model: Any
    if technique == "pipeline":
        model = ec.Pipeline([Waves(), Waves()], world.group, microbatches=2, loss_fn=mean)
        batch = torch.cat([rows(0), rows(1)])
        model.step(batch, target=batch)
        return model
    if technique == "ddp":
        model = ec.DDP(plain_stages(), world.group)
    else:
        layout = "rows" if technique == "fsdp by rows" else "flat"
        model = ec.FSDP(plain_stages(), world.group, min_num_params=0, layout=layout)
    model(rows(world.rank)).square().mean().backward()
    return model


def check(world: ec.World) -> None:
    for technique in ("ddp", "fsdp", "fsdp by rows", "pipeline"):
        for order in ORDERS:
            expected = plain_stages()
            expected(torch.cat([rows(0), rows(1)])).square().mean().backward()
            wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.5, order)
            model = wrapped(world, technique)
            norm = ec.clip_grad_norm_(model, 0.5, order)
            torch.testing.assert_close(norm, wanted, **CLOSE, msg=f"{technique} {order}")
            again = ec.clip_grad_norm_(model, math.inf, order)
            torch.testing.assert_close(again, wanted.new_tensor(0.5), rtol=1e-4, atol=0)
            if technique.startswith("fsdp"):
                model = wrapped(world, technique)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
                torch.testing.assert_close(norm, wanted, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_models_with_complex_weights_are_clipped_as_in_one_process(kind: str) -> None:
    run_world(kind, check, 2)
