"""Models that differ between ranks are refused on every rank, and the difference is named."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import ArgumentError, UnsupportedError
from echelon.modules.model_agreement import check_model
from tests.ddp.models import mlp


def named(*names):
    """A module with parameters of these names, registered in this order."""
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.zeros(1)))
    return module


def refused(build, ranks=3, **options):
    """The message that every rank gets when rank r wraps ``build(r)``."""

    def main(world):
        with pytest.raises(ec.ModelMismatch) as info:
            ec.DDP(build(world.rank), world.group, **options)
        return str(info.value)

    messages = ec.run(main, ranks)
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize(
    ("odd", "usual", "lines"),
    [
        (
            lambda: nn.Linear(2, 3),
            lambda: nn.Linear(2, 2),
            [
                "parameter 'weight'",
                "rank 0: float32[2, 2]\n",
                "rank 1: float32[3, 2]   <-- differs",
            ],
        ),
        (
            lambda: nn.Linear(2, 2).half(),
            lambda: nn.Linear(2, 2),
            ["parameter 'weight'", "rank 1: float16[2, 2]   <-- differs"],
        ),
        (
            lambda: nn.Linear(2, 2, bias=False),
            lambda: nn.Linear(2, 2),
            ["parameter 'bias'", "rank 1: not there   <-- differs"],
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            lambda: nn.Sequential(nn.Linear(2, 2)),
            ["parameter '1.weight'", "rank 1: float32[2, 2]   <-- differs"],
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)),
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            ["parameter '1.weight'", "rank 1: float32[2, 2] frozen   <-- differs"],
        ),
        (
            lambda: nn.BatchNorm1d(3),
            lambda: nn.BatchNorm1d(3, track_running_stats=False),
            ["buffer 'running_mean'", "rank 1: float32[3]   <-- differs"],
        ),
        (
            lambda: named("b", "a"),
            lambda: named("a", "b"),
            ["the order of their parameters, at position 0", "rank 1: 'b'   <-- differs"],
        ),
    ],
)
def test_the_first_difference_in_structure_is_named_with_its_rank(odd, usual, lines):
    message = refused(lambda rank: odd() if rank == 1 else usual(), init="trust")
    for line in lines:
        assert line in message


def test_options_that_differ_are_named():
    def main(world):
        with pytest.raises(ec.ModelMismatch, match="option 'reduction'"):
            ec.DDP(mlp(), world.group, reduction="sum" if world.rank else "mean")

    ec.run(main, 2)


def test_verify_names_the_parameter_whose_values_differ():
    def build(rank):
        model = mlp()
        with torch.no_grad():
            model[2].weight[0, 0] += rank * 1e-15
        return model

    assert "the values of parameter '2.weight'" in refused(build, init="verify")


def test_verify_names_the_buffer_whose_values_differ():
    def build(rank):
        model = nn.BatchNorm1d(2)
        model.num_batches_tracked += rank
        return model

    assert "the values of buffer 'num_batches_tracked'" in refused(build, init="verify")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_verify_accepts_equal_models(dtype):
    def main(world):
        model = nn.ParameterList(
            [torch.tensor(float("nan"), dtype=dtype), torch.ones(3, dtype=dtype)]
        )
        ec.DDP(model, world.group, init="verify")

    ec.run(main, 3)


def test_a_norm_that_would_silently_be_local_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
    with pytest.raises(UnsupportedError, match="module '1' is a SyncBatchNorm"):
        check_model(model, torch.device("cpu"), size=2, ignored=())


@pytest.mark.parametrize("wrapper", [ec.DDP, ec.FSDP])
def test_an_expanded_parameter_is_refused_by_its_name_on_every_rank(wrapper) -> None:
    def main(world):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].weight = torch.nn.Parameter(torch.ones(1, 2).expand(2, 2))
        with pytest.raises(ArgumentError, match=r"'1\.weight' was expanded") as info:
            wrapper(model, world.group)
        return str(info.value)

    assert len(set(ec.run(main, 2))) == 1
