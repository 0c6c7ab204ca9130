"""The arguments of a strategy are checked when it is made."""

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import echelon as ec
from echelon.integrations.lightning import EchelonFabricStrategy, EchelonStrategy


@pytest.mark.parametrize("strategy", [EchelonFabricStrategy, EchelonStrategy])
@pytest.mark.parametrize(
    ("plan", "options", "sentence"),
    [
        ("ddp", {"bucket_byte": 1}, "'bucket_byte', which is no option of ec.DDP"),
        ("zero", {}, "plan is 'zero'; give 'ddp', 'fsdp' or an ec.Plan"),
        (ec.Plan(shard=2), {"layout": "rows"}, "layout: options are for plan='ddp' or 'fsdp'"),
    ],
)
def test_an_option_that_there_is_not_is_refused(
    strategy: Any, plan: str | ec.Plan, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ec.ArgumentError) as caught:
        strategy(plan, **options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("strategy", [EchelonFabricStrategy, EchelonStrategy])
def test_a_pipeline_is_refused(strategy: Any) -> None:
    with pytest.raises(ec.UnsupportedError, match="the plan is pp=2, and Lightning calls"):
        strategy(ec.Plan(pp=2, microbatches=2))


def test_options_reach_the_wrapper() -> None:
    def main(world: ec.World) -> list[str]:
        model = torch.nn.Linear(4, 4).double()
        mixed = ec.MixedPrecision(compute=torch.bfloat16)
        units = ec.units.by_type("Linear")
        made = EchelonStrategy("fsdp", units=units, precision=mixed, min_num_params=0)
        sharded: Any = made.sharing.share(torch.nn.Sequential(model), world)
        plan = EchelonStrategy(ec.Plan(dp=2, ddp={"reduction": "sum"})).sharing
        summed: Any = plan.share(torch.nn.Linear(1, 1), world)
        summed(torch.ones(1, 1)).sum().backward()
        output = sharded(torch.ones(1, 4, dtype=torch.float64))
        return [str(output.dtype), str(len(sharded.units)), str(summed.module.bias.grad.item())]

    assert ec.run(main, 2) == [["torch.bfloat16", "2", "2.0"]] * 2
