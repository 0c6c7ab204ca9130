"""A dry run allocates what training allocates, of one rank of each stage."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.errors import ArgumentError, UnsupportedError
from echelon.laboratory.allocations import Allocations
from echelon.planner.dry_run import DryRunOptions, DryStep, dry_run

WIDTH, ROWS = 64, 32
BY_BLOCK = ec.units.by_type("Block")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def stages(plan: ec.Plan) -> Any:
    model = blocks(8)
    return model if plan.pp == 1 else ec.pipeline.split(model, plan.pp * plan.chunks)


def trained(world: ec.World, plan: ec.Plan, units: Any) -> tuple[int, int, int]:
    """Elements and bytes of the parameters of this rank, and the peak of its third step."""
    plain, x = stages(plan), torch.ones(ROWS, WIDTH)
    loss_fn, counts = (mse_loss if plan.pp > 1 else None), list[int]()
    with Allocations(counts.append):
        model = ec.parallelize(plain, plan, world, units=units, loss_fn=loss_fn)
        del plain
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            if isinstance(model, ec.Pipeline):
                model.step(x, target=x)
            else:
                mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        step()
        counts.clear()
        step()
    kept = [ec.local_shard(param) for param in model.parameters()]
    return sum(p.numel() for p in kept), sum(p.nbytes for p in kept), max(counts)


def planned(plan: ec.Plan, units: Any = None, **options: Any) -> list[DryStep]:
    x = torch.ones(ROWS, WIDTH)
    return dry_run(stages(plan), plan, x, x, mse_loss, DryRunOptions(units=units, **options))


PLANS = [
    (ec.Plan(dp=3), None),
    *((ec.Plan(shard=4, strategy=one), BY_BLOCK) for one in ec.Strategy if not one.hybrid),
    (ec.Plan(dp=2, shard=2), BY_BLOCK),
    (ec.Plan(dp=2, shard=2, strategy=ec.Strategy.SHARD_GRAD_OP), BY_BLOCK),
    (ec.Plan(shard=2, fsdp={"precision": ec.MixedPrecision(compute=torch.bfloat16)}), BY_BLOCK),
    (ec.Plan(pp=2, microbatches=4), None),
    (ec.Plan(pp=2, microbatches=4, schedule="gpipe"), None),
    (ec.Plan(pp=4, microbatches=8, schedule="zb-h2"), None),
    (ec.Plan(pp=2, microbatches=4, schedule="interleaved", chunks=2), None),
    (ec.Plan(pp=2, microbatches=4, schedule="zb-v", chunks=2), None),
    (ec.Plan(pp=2, microbatches=4, pipeline={"recompute": True}), None),
    (ec.Plan(pp=2, dp=2, microbatches=4), None),
    (ec.Plan(pp=2, shard=2, microbatches=4), BY_BLOCK),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "units"), PLANS, ids=lambda value: repr(value)[:80])
def test_parameters_and_the_peak_are_those_of_training(plan: ec.Plan, units: Any) -> None:
    real = ec.run(trained, plan.num_ranks, args=(plan, units))
    for stage, step in enumerate(planned(plan, units, shares_memory=True)):
        numel, nbytes, peak = real[stage * plan.data_size]
        assert (step.num_parameters, step.parameter_bytes) == (numel, nbytes)
        # The first of simulated ranks has what they share, and other ranks some flags less.
        assert step.peak == pytest.approx(peak, rel=1e-4)
        assert sum(step.categories.values()) == step.peak


@pytest.mark.slow
def test_any_rank_of_a_group_can_be_looked_at() -> None:
    plan = ec.Plan(shard=3)
    real = ec.run(trained, 3, args=(plan, BY_BLOCK))
    for rank in range(3):
        [step] = planned(plan, BY_BLOCK, shares_memory=True, data_rank=rank)
        assert (step.num_parameters, step.parameter_bytes) == real[rank][:2]


@pytest.mark.slow
def test_a_model_on_meta_has_memory_without_its_values_and_stays_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30_000, 30_000), nn.Linear(30_000, 30_000))
        model[1].weight = model[0].weight  # tied
        x = torch.empty(4, 30_000)
    [step] = dry_run(model, ec.Plan(shard=1000), x, x, mse_loss)
    numel = 30_000 * 30_000 + 2 * 30_000
    assert step.num_parameters == -(-numel // 1000 // 16) * 16  # parts begin at 64 bytes
    assert model[0].weight.is_meta
    assert step.categories["gathered"] >= 4 * 30_000 * 30_000


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_small_inputs_are_valid_indices(device: str) -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(80, 20))
    with torch.device(device):
        x = torch.full((7, 20), 2)
    [step] = dry_run(model, ec.Plan(dp=2), x, x.float(), mse_loss)
    assert step.peak > 7 * 20 * 8


@pytest.mark.parametrize("data_rank", [0, 1])
def test_a_replica_goes_on_with_its_tables_of_positions(data_rank: int) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ROWS, WIDTH)
            self.register_buffer("first", torch.arange(ROWS))
            self.register_buffer("second", torch.arange(ROWS))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(self.first) + self.table(self.second)

    x, options = torch.ones(ROWS, WIDTH), DryRunOptions(data_rank=data_rank)
    [step] = dry_run(Positions(), ec.Plan(dp=2), x, x, mse_loss, options)
    assert step.num_parameters == ROWS * WIDTH


@pytest.mark.slow
def test_a_peak_is_named_and_traffic_is_counted() -> None:
    first, last = planned(ec.Plan(pp=2, microbatches=4, schedule="gpipe"))
    assert (first.stage, last.stage) == (0, 1)
    assert first.after.startswith("0")
    assert ROWS * WIDTH * 4 <= first.sent["send"] < 1.1 * ROWS * WIDTH * 4
    [step] = planned(ec.Plan(dp=2))
    assert step.after == ""
    assert step.sent["all_reduce"] >= step.parameter_bytes


@pytest.mark.slow
def test_allocations_can_be_rounded_as_those_of_cuda_are() -> None:
    [exact] = planned(ec.Plan(dp=2))
    [rounded] = planned(ec.Plan(dp=2), rounding=512)
    assert rounded.peak % 512 == 0
    assert exact.peak < rounded.peak


@pytest.mark.slow
def test_groups_over_gloo_keep_memory_to_reduce_in() -> None:
    plan = ec.Plan(dp=2, ddp={"first_bucket_bytes": 2**21})
    [plain], [gloo] = planned(plan), planned(plan, over_gloo=True)
    # Half of the gradients in the one bucket, of each rank.
    assert gloo.categories["communication"] == pytest.approx(gloo.parameter_bytes, rel=0.001)
    assert gloo.peak == plain.peak + gloo.categories["communication"]


@pytest.mark.slow
def test_stages_that_share_no_memory_keep_what_they_send_for_longer() -> None:
    plan = ec.Plan(pp=4, microbatches=8, schedule="interleaved", chunks=2)
    apart, beside = planned(plan), planned(plan, shares_memory=True)
    assert apart[0].peak >= beside[0].peak + ROWS // 8 * WIDTH * 4


def test_a_model_that_looks_at_values_is_refused_with_its_operation() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(300, 300)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[x.sum(1) > 0])

    x = torch.ones(300, 300)
    with pytest.raises(UnsupportedError, match="values of a large tensor"):
        dry_run(Routed(), ec.Plan(dp=2), x, x, mse_loss)


def test_units_that_are_no_rule_are_refused_with_a_sentence() -> None:
    with pytest.raises(ArgumentError, match=r"units is 5; give a rule of ec\.units"):
        DryRunOptions(units=5)  # type: ignore[arg-type]
