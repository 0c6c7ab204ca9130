"""Averages of a model under every technique: those of one process, saved and loaded across them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import echelon as ec
from echelon.comm.world import World
from tests.checkpoint.layouts import LAYOUTS, Trainee, batch, make_model
from tests.worlds import run_world

DECAY, STEPS = 0.75, 3
ORDER = [*LAYOUTS]
OTHER_WORLDS = ["ddp2", "fsdp2", "fsdp2-flat", "fsdp3-rows", "pp2-shard2"]


@cache
def expected(steps: int = STEPS) -> Mapping[str, Tensor]:
    """The averages of one process, by PyTorch's own class."""

    def train(world: World) -> Mapping[str, Tensor]:
        job = LAYOUTS["plain"].trainee(world, "sgd")
        average = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        average.n_averaged += 1  # the values of the beginning are the first averages
        for step in range(steps):
            job.train(step)
            average.update_parameters(job.model)
        state: dict[str, Tensor] = average.module.state_dict()
        return state

    found: Mapping[str, Tensor] = ec.run(train, 1)[0]
    return found


def whole(model: nn.Module) -> Mapping[str, Tensor]:
    gather = getattr(model, "whole_state_dict", model.state_dict)
    return {name: value.clone() for name, value in gather().items()}


def check_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def train(job: Trainee, ema: ec.EMA, first: int, stop: int) -> None:
    for step in range(first, stop):
        job.train(step)
        ema.update()


def check_averages(job: Trainee, ema: ec.EMA, wanted: Mapping[str, Tensor]) -> None:
    """They are in the model inside the block, for an evaluation and an export, and not after it."""
    before = whole(job.model)
    with ema.average_parameters():
        check_equal(whole(job.model), wanted)
        x, _ = batch(9)
        if isinstance(job.model, ec.Pipeline):
            output = job.model(x, outputs_everywhere=True)
        else:
            with torch.no_grad():
                output = job.model(x)
        plain = make_model()
        plain.load_state_dict(wanted)
        torch.testing.assert_close(output, plain(x).detach(), rtol=1e-12, atol=1e-12)
    after = whole(job.model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def follow(world: World, name: str, folder: Path, wanted: list[Mapping[str, Tensor]]) -> None:
    job = LAYOUTS[name].trainee(world, "sgd")
    ema = ec.EMA(job.model, DECAY)
    train(job, ema, 0, STEPS)
    check_averages(job, ema, wanted[0])
    ec.save(folder, step=STEPS, model=job.model, optimizer=job.optimizer, ema=ema)
    train(job, ema, STEPS, STEPS + 1)  # the block has left nothing behind
    check_averages(job, ema, wanted[1])


def resume(world: World, name: str, folder: Path, wanted: Mapping[str, Tensor]) -> None:
    job = LAYOUTS[name].trainee(world, "sgd", seed=1)
    ema = ec.EMA(job.model, DECAY)
    ec.load(folder, model=job.model, optimizer=job.optimizer, ema=ema)
    train(job, ema, STEPS, STEPS + 1)
    check_averages(job, ema, wanted)


def check_across(kind: str, name: str, others: list[str], folder: Path) -> None:
    wanted = [expected(), expected(STEPS + 1)]
    run_world(kind, follow, LAYOUTS[name].ranks, args=(name, folder, wanted))
    for other in others:
        run_world(kind, resume, LAYOUTS[other].ranks, args=(other, folder, wanted[1]))
    plain = make_model(seed=2)
    ec.load(folder, ema=plain)
    check_equal(plain.state_dict(), wanted[0])


@pytest.mark.parametrize("name", ORDER)
def test_averages_of_every_technique_are_loaded_by_every_other(name: str, tmp_path: Path) -> None:
    index = ORDER.index(name)
    others = [ORDER[(index + shift) % len(ORDER)] for shift in (1, 7)]
    check_across("threads", name, others, tmp_path)


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_averages_of_other_worlds_are_loaded_across_techniques(kind: str, tmp_path: Path) -> None:
    for name, other in zip(OTHER_WORLDS, [*OTHER_WORLDS[1:], OTHER_WORLDS[0]], strict=True):
        check_across(kind, name, [other], tmp_path / name)


@pytest.mark.parametrize("name", ["plain", "ddp2", "fsdp2", "fsdp2-flat", "fsdp3-rows", "pp2"])
def test_a_step_inside_the_block_is_refused_and_undone(name: str) -> None:
    def main(world: World) -> None:
        job = LAYOUTS[name].trainee(world, "sgd")
        ema = ec.EMA(job.model, DECAY)
        train(job, ema, 0, 1)
        before = whole(job.model)
        with (
            pytest.raises(ec.StateError, match="written inside average_parameters"),
            ema.average_parameters(),
        ):
            job.train(1)
        check_equal(whole(job.model), before)
        train(job, ema, 1, 2)

    ec.run(main, LAYOUTS[name].ranks)


def test_an_error_in_the_block_leaves_the_model_its_parameters() -> None:
    layer = nn.Linear(2, 2)
    ema = ec.EMA(layer)
    with torch.no_grad():
        layer.weight.fill_(5.0)
    with pytest.raises(KeyError), ema.average_parameters():
        raise KeyError("of the evaluation")
    assert layer.weight.unique().tolist() == [5.0]


def test_a_block_cannot_be_inside_another_and_nothing_is_updated_or_saved_in_it(
    tmp_path: Path,
) -> None:
    layer = nn.Linear(2, 2)
    ema = ec.EMA(layer)
    with ema.average_parameters():
        for refused in (
            ema.update,
            lambda: ema.average_parameters().__enter__(),
            lambda: ec.save(tmp_path, step=0, ema=ema),
        ):
            with pytest.raises(ec.StateError, match="inside average_parameters"):
                refused()


def test_averages_that_are_not_finite_are_exchanged_like_others() -> None:
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[torch.nan], [torch.inf]]))
    ema = ec.EMA(layer)
    with ema.average_parameters():
        assert layer.weight.isnan().tolist() == [[True], [False]]


def test_buffers_are_copied_and_not_averaged() -> None:
    norm = nn.BatchNorm1d(2)
    ema = ec.EMA(norm, decay=0.5)
    for _ in range(2):
        norm(torch.randn(8, 2))
    ema.update()
    running = norm.running_mean.clone()
    with ema.average_parameters():
        assert torch.equal(norm.running_mean, running)
        assert norm.num_batches_tracked.item() == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_steps_of_half_precision_are_not_lost(dtype: torch.dtype) -> None:
    layer = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(layer.weight, 1.0)
    ema = ec.EMA(layer, decay=0.9999)
    nn.init.constant_(layer.weight, 2.0)
    for _ in range(7000):  # each step is 1e-4 of the way, which half precision would round away
        ema.update()
    with ema.average_parameters():
        assert layer.weight.item() == pytest.approx(1.5, abs=0.01)
    assert layer.weight.item() == 2.0


def test_a_decay_may_change_between_updates_and_is_checked() -> None:
    layer = nn.Linear(1, 1, bias=False)
    ema = ec.EMA(layer, decay=0.0)
    nn.init.constant_(layer.weight, 3.0)
    ema.update()
    ema.decay = 1.0
    nn.init.constant_(layer.weight, 9.0)
    ema.update()
    with ema.average_parameters():
        assert layer.weight.item() == 3.0
    ema.decay = 1.5
    with pytest.raises(ec.ArgumentError, match=r"decay is 1\.5"):
        ema.update()


@pytest.mark.parametrize("decay", [-0.1, 1.01, "0.9", None, True])
def test_what_is_no_decay_is_refused(decay: object) -> None:
    with pytest.raises(ec.ArgumentError, match="decay"):
        ec.EMA(nn.Linear(1, 1), decay)  # type: ignore[arg-type]


def test_averages_of_torch_are_loaded_under_their_names(tmp_path: Path) -> None:
    """The error names the prefix, and what it advises works."""

    def save(world: World) -> None:
        job = LAYOUTS["fsdp2"].trainee(world, "sgd")
        ec.save(tmp_path, step=0, ema=AveragedModel(job.model))

    def load(world: World) -> Mapping[str, Tensor]:
        job = LAYOUTS["pp2-shard2"].trainee(world, "sgd", seed=1)
        ema = ec.EMA(job.model)
        with pytest.raises(ec.CheckpointMismatch, match=r"begin with 'module\.'.*ModuleDict"):
            ec.load(tmp_path, ema=ema)
        ec.load(tmp_path, ema=nn.ModuleDict({"module": job.model}), strict=False)
        return whole(job.model)

    ec.run(save, 2)
    check_equal(ec.run(load, 4)[0], make_model().state_dict())


def test_a_copy_of_a_pipeline_for_averages_names_what_averages_it() -> None:
    def main(world: World) -> None:
        with pytest.raises(ec.StateError, match=r"ec\.EMA"):
            AveragedModel(LAYOUTS["pp2"].trainee(world).model)

    ec.run(main, 2)


def test_a_model_that_grew_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    ema = ec.EMA(model)
    model.append(nn.Linear(2, 2))
    with pytest.raises(ec.StateError, match=r"4 tensors of 12 elements .* held 2 of 6"):
        ema.update()
