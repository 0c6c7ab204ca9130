"""Ranks that were given different things are told before the first step, in time, what differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import EchelonError, ModelMismatch, StartMismatch
from tests.worlds import KINDS, run_world

RANKS, ODD = 3, 1  # two ranks agree, and the one in the middle does not
MOST_S = 5.0


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = zip((4, *widths), (*widths, 4), strict=True)
    return nn.Sequential(*(nn.Linear(before, after) for before, after in pairs))


def reordered() -> nn.Module:
    model = layers(4)
    model[0].weight = model[0]._parameters.pop("weight")  # now it comes after the bias
    return model


def seeded(seed: int) -> nn.Module:
    model = layers(4)
    torch.manual_seed(seed)
    nn.init.normal_(model[1].weight)
    return model


def ddp(world: World, model: nn.Module | None = None, **options: Any) -> None:
    ec.DDP(model or layers(4), world.group, **options)


def fsdp(world: World, model: nn.Module | None = None, **options: Any) -> None:
    options = {"units": ec.units.by_type(nn.Linear), "min_num_params": 0, **options}
    ec.FSDP(model or layers(4), world.group, **options)


def pipeline(world: World, model: nn.Module | None = None, **options: Any) -> None:
    options = {"microbatches": 4, "loss_fn": nn.MSELoss(), **options}
    ec.Pipeline(list(model or layers(4, 4)), world.group, **options)


def guard(world: World, **options: Any) -> None:
    ec.FiniteGuard(layers(4), world.group, **options)


# What is different, as the message names it, and what each rank does: the odd one is given True.
Start = Callable[[World, bool], None]
CASES: dict[str, tuple[type[EchelonError], str, Start]] = {
    "DDP, shape": (ModelMismatch, r"parameter '0\.weight'",
                   lambda w, odd: ddp(w, layers(5 if odd else 4))),
    "DDP, number of layers": (ModelMismatch, r"parameter '2\.weight'",
                              lambda w, odd: ddp(w, layers(4, 4) if odd else layers(4))),
    "DDP, order of parameters": (ModelMismatch, "the order of their parameters, at position 0",
                                 lambda w, odd: ddp(w, reordered() if odd else None)),
    "DDP, option": (ModelMismatch, "option 'bucket_bytes'",
                    lambda w, odd: ddp(w, bucket_bytes=1000 if odd else 2000)),
    "DDP, seed": (ModelMismatch, r"the values of parameter '1\.weight'",
                  lambda w, odd: ddp(w, seeded(int(odd)), init="verify")),
    "DDP, what is verified": (ModelMismatch, "option 'init'",
                              lambda w, odd: ddp(w, init="verify" if odd else "broadcast")),
    "FSDP, shape": (ModelMismatch, r"parameter '0\.weight'",
                    lambda w, odd: fsdp(w, layers(5 if odd else 4))),
    "FSDP, order of parameters": (ModelMismatch, "the order of their parameters, at position 0",
                                  lambda w, odd: fsdp(w, reordered() if odd else None)),
    "FSDP, option": (ModelMismatch, "option 'strategy'",
                     lambda w, odd: fsdp(w, strategy=ec.Strategy.SHARD_GRAD_OP if odd
                                         else ec.Strategy.FULL_SHARD)),
    "FSDP, precision": (ModelMismatch, "option 'precision'",
                        lambda w, odd: fsdp(w, precision=ec.MixedPrecision(
                            reduce=torch.float64 if odd else torch.float32))),
    "FSDP, layout": (ModelMismatch, "option 'layout'",
                     lambda w, odd: fsdp(w, layout="rows" if odd else "flat")),
    "FSDP, units": (ModelMismatch, "option 'units'",
                    lambda w, odd: fsdp(w, units=ec.units.by_size(10 if odd else 20))),
    "FSDP, modules of a unit": (ModelMismatch, "unit 'root'",
                                lambda w, odd: fsdp(w, units=ec.units.by_function(
                                    lambda module, n: isinstance(module, nn.Linear) and not odd))),
    "FSDP, seed": (ModelMismatch, r"the values of parameter '1\.weight'",
                   lambda w, odd: fsdp(w, seeded(int(odd)), init="verify")),
    "Pipeline, shape": (ModelMismatch, "parameter 0 of stage 1",
                        lambda w, odd: pipeline(w, layers(4, 5 if odd else 4))),
    "Pipeline, number of stages": (ModelMismatch, "option 'stages'",
                                   lambda w, odd: pipeline(w, layers(4, 4, 4) if odd else None)),
    "Pipeline, option": (ModelMismatch, "option 'schedule'",
                         lambda w, odd: pipeline(w, schedule="gpipe" if odd else "1f1b")),
    "FiniteGuard, option": (StartMismatch, "option action of FiniteGuard",
                            lambda w, odd: guard(w, action=ec.NonFinite.SKIP if odd
                                                 else ec.NonFinite.RAISE)),
    "configuration": (StartMismatch, "config.model.width",
                      lambda w, odd: w.agree(config={"steps": 1, "model": {"width": 9 if odd
                                                                           else 8}})),
}  # fmt: skip


def every_case(world: World) -> list[str]:
    texts = []
    for name, (kind, words, start) in CASES.items():
        world.group.barrier()
        start_s = time.monotonic()
        try:
            with pytest.raises(kind, match=words) as info:
                start(world, world.rank == ODD)
            lines = str(info.value).splitlines()
            marked = [line for line in lines if line.endswith("<-- differs")]
            assert len(marked) == 1
            assert marked[0].startswith(f"  rank {ODD}: ")
            assert [line.split(":")[0] for line in lines[1:4]] == [
                "  rank 0",
                "  rank 1",
                "  rank 2",
            ]
            assert time.monotonic() - start_s < MOST_S
        except BaseException as error:
            error.add_note(name)
            raise
        texts.append(str(info.value))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:units=by_function.* matches no module:UserWarning")
def test_what_differs_is_named_with_its_rank_on_every_rank_before_the_first_step(kind) -> None:
    results = run_world(kind, every_case, RANKS)
    assert results[0] == results[1] == results[2]
