"""Accelerate on ``DDP``, ``FSDP`` and plans: the weights of Accelerate in one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import echelon as ec
from tests.integrations.accelerate.accelerated_training import Training, train
from tests.integrations.jobs import run_job

pytest.importorskip("accelerate")
HERE = "tests.integrations.accelerate.test_accelerator"


def plain() -> Any:
    from accelerate import Accelerator

    return train(Accelerator, cpu=True)


def restarted() -> Any:
    """The class under test, with no state of one that was there before."""
    from accelerate.state import AcceleratorState, GradientState

    from echelon.integrations.accelerate import EchelonAccelerator

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return EchelonAccelerator


def ways() -> dict[str, dict[str, Any]]:
    small = {"min_num_params": 0}
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD")
    return {
        "ddp": {"plan": "ddp"},
        **{
            name: {"plan": "fsdp", "options": {**small, "strategy": ec.Strategy[name]}}
            for name in strategies
        },
        "units": {"plan": "fsdp", "options": small, "units": ec.units.by_type(nn.Linear)},
        "a plan": {"plan": ec.Plan(shard=2, fsdp=small)},
        "split": {"plan": "fsdp", "options": small, "loading": {"split_batches": True}},
        "dispatched": {
            "plan": "fsdp",
            "options": small,
            "loading": {"split_batches": True, "dispatch_batches": True},
        },
    }


def in_every_way() -> dict[str, Any]:
    return {name: train(restarted(), **options) for name, options in ways().items()}


def of_hybrid_plan() -> Any:
    return train(restarted(), plan=ec.Plan(dp=2, shard=2, fsdp={"min_num_params": 0}))


def check_equal(result: Any, expected: Any, *, has_weights: bool) -> None:
    losses, weights = result
    assert losses == pytest.approx(expected[0], rel=1e-12)
    if has_weights:
        assert weights.keys() == expected[1].keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[1][name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_every_plan_has_the_weights_of_accelerate_in_one_process() -> None:
    [expected] = run_job(f"{HERE}:plain", 1)
    for rank, results in enumerate(run_job(f"{HERE}:in_every_way", 2)):
        assert len(results) == 9
        for name, result in results.items():
            check_equal(result, expected, has_weights=rank == 0 or name == "ddp")
    for rank, result in enumerate(run_job(f"{HERE}:of_hybrid_plan", 4)):
        check_equal(result, expected, has_weights=rank == 0)


def of_uneven_and_kept_batches() -> Any:
    """The weights after batches that do not suffice for all ranks, and after a late reduction."""
    from accelerate.utils import DataLoaderConfiguration, InitProcessGroupKwargs

    waits = InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    accelerator = restarted()(plan="ddp", kwargs_handlers=[waits])
    assert accelerator.world.group.timeout == 77
    rows = torch.arange(5.0, dtype=torch.float64)[:, None]
    loader = accelerator.prepare(DataLoader(rows, batch_size=1))
    model = accelerator.prepare(nn.Linear(1, 1, bias=False).double())
    nn.init.zeros_(model.weight)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    count = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for row in loader:
            accelerator.backward(model(row).sum())
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    joined = model.weight.item()
    with accelerator.no_sync(model):
        kept = model(rows[:1] + 1).sum()
        accelerator.backward(model(rows[:1] + 1 + accelerator.process_index).sum())
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(kept)
    grad = model.weight.grad.item()
    refused = 0
    for plan in ("ddp", "fsdp"):
        loading = DataLoaderConfiguration(even_batches=False)
        other = restarted()(plan=plan, dataloader_config=loading)
        model = other.prepare(nn.Linear(1, 1).double())
        with pytest.raises(ec.errors.UnsupportedError, match="drop_last=True"):
            for row in other.prepare(DataLoader(rows, batch_size=1)):
                other.backward(model(row).sum())
        refused += 1
    with pytest.raises(ec.errors.UnsupportedError, match="even_batches=True"):
        other.join_uneven_inputs([model]).__enter__()
    return count, joined, grad, refused


@pytest.mark.slow
def test_ranks_without_batches_wait_and_kept_gradients_are_reduced() -> None:
    results = run_job(f"{HERE}:of_uneven_and_kept_batches", 2)
    assert [count for count, _, _, _ in results] == [3, 2]  # rank 0 has rows 0, 2 and 4
    # Means of rows 0 and 1, of rows 2 and 3, and of row 4 on the rank that has one.
    assert [joined for _, joined, _, _ in results] == [-7.0, -7.0]
    assert [grad for _, _, grad, _ in results] == [2.5, 2.5]  # 1 and 2 kept, and 1 on each rank
    assert [refused for _, _, _, refused in results] == [2, 2]  # before any rank waits


# --- one rank alone ------------------------------------------------------------------------------


def alone(plan: Any = "ddp", **options: Any) -> Any:
    return restarted()(plan=plan, **options)


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_it_works_without_a_launcher(plan: str) -> None:
    training = Training(restarted(), plan=plan)
    assert len(list(training.steps(1))) == 7
    plain_model = training.accelerator.unwrap_model(training.models[1])
    assert isinstance(plain_model, nn.Linear)


def test_what_accelerate_would_do_to_shards_is_refused() -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    compressed = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    refused = [
        ({"mixed_precision": "fp16"}, "use 'bf16'"),
        ({"dynamo_backend": "inductor"}, "compile its blocks"),
        ({"kwargs_handlers": [compressed]}, "has comm_hook"),
        ({"plan": "zero"}, "give 'ddp', 'fsdp' or an ec.Plan"),
        ({"plan": ec.Plan(shard=2)}, "for pp"),
        ({"units": ec.units.whole()}, "shards nothing"),
        ({"plan": ec.Plan(), "options": {"init": "trust"}}, "give them in the ec.Plan"),
    ]
    for options, message in refused:
        with pytest.raises(ec.ArgumentError, match=message):
            alone(**options)
    accelerator = alone()
    for call in (
        lambda: accelerator.register_save_state_pre_hook(print),
        lambda: accelerator.register_load_state_pre_hook(print),
        lambda: accelerator.save_state("x", safe_serialization=False),
        lambda: accelerator.load_state("x", load_kwargs={"map_location": "cpu"}),
    ):
        with pytest.raises(ec.errors.UnsupportedError):
            call()


def on_a_simulated_rank(world: ec.World) -> None:
    from echelon.integrations.accelerate import EchelonAccelerator

    with pytest.raises(ec.errors.UnsupportedError, match="--world processes"):
        EchelonAccelerator(cpu=True)


def test_simulated_ranks_are_refused_on_all_ranks() -> None:
    ec.run(on_a_simulated_rank, 2, world="threads")


def test_a_model_that_was_evaluated_before_is_shared_when_it_is_trained() -> None:
    accelerator = alone()
    model = nn.Linear(2, 1)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    assert isinstance(accelerator.prepare(model), ec.DDP)
    assert len(accelerator._models) == 1
