"""ec.plan: what it takes, what it gives, and what it refuses with which sentence."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.planner.cluster import Cluster
from echelon.planner.device import Device
from tests.children import environ
from tests.planner.sizes import MODEL, cluster

CLUSTER = cluster(1, 4)


def plans(**options: Any) -> ec.Plans:
    return ec.plan(MODEL, CLUSTER, **{"global_batch": 16, **options})


def train_with(world: ec.World, plan: ec.Plan) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    loss_fn = nn.MSELoss()
    x, y = torch.ones(16, 8), torch.zeros(16, 8)
    if plan.pp == 1:
        shared = ec.parallelize(model, plan, world)
        loss = loss_fn(shared(x).float(), y)
        loss.backward()
        return loss.item()
    pipe = ec.parallelize(
        model, plan, world, loss_fn=lambda output, target: loss_fn(output.float(), target)
    )
    assert isinstance(pipe, ec.Pipeline)
    loss = pipe.step(x, target=y, loss_everywhere=True)
    assert loss is not None
    return loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fixed",
    [
        {"dp": 4},
        {"shard": 4, "pp": 1},
        {"pp": 2, "dp": 2, "chunks": 1},
        {"pp": 2, "shard": 2, "chunks": 2},
    ],
    ids=str,
)
def test_the_best_plan_goes_into_parallelize(fixed: dict[str, int]) -> None:
    best = plans(fixed=fixed).best.plan
    assert {name: getattr(best, name) for name in fixed} == fixed
    losses = ec.run(train_with, 4, args=(best,))
    plain = ec.run(train_with, 1, args=(ec.Plan(),))[0]
    assert losses == pytest.approx([plain] * 4, rel=0.02)  # some compute in 16 bits


def test_all_plans_are_plans_that_echelon_has() -> None:
    for plan in plans(keep=200):
        assert plan.plan.num_ranks == 4
        assert (plan.layout.tp, plan.layout.cp, plan.layout.ep) == (1, 1, 1)


def test_other_axes_are_looked_at_where_they_are_asked_for() -> None:
    every = plans(axes="all", keep=500)
    assert {plan.layout.tp for plan in every} == {1, 2, 4}
    assert every.num_layouts > plans().num_layouts
    assert {plan.layout.tp for plan in plans(fixed={"tp": 2})} == {2}
    assert {plan.layout.cp for plan in plans(fixed={"tp": 2})} == {1}


def test_a_cluster_is_a_text_a_path_or_an_object(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    device = {name: value for name, value in asdict(CLUSTER.device).items() if name != "source"}
    fields = {"hosts": 1, "devices_per_host": 4, "network": 1e11, "price": 2.5, "device": device}
    file.write_text(json.dumps(fields))
    read = ec.plan(MODEL, file, global_batch=16)
    assert read.cluster == replace(CLUSTER, price=2.5)
    assert read.best.cost is not None
    assert ec.plan(MODEL, str(file), global_batch=16).cluster == read.cluster
    assert ec.plan(MODEL, "4 A100", global_batch=16).cluster == Cluster.parse("4 A100")


def test_a_price_replaces_that_of_the_cluster() -> None:
    assert plans(price=2.0).best.cost == pytest.approx(2 * (plans(price=1.0).best.cost or 0))
    assert plans().best.cost is None


def test_a_goal_and_a_memory_are_kept() -> None:
    small = plans(goal="memory")
    assert small.best.memory.total < plans().best.memory.total
    limit = 2 * small.best.memory.total
    assert all(plan.memory.total <= limit for plan in plans(max_memory=limit, keep=50))


def test_longer_sequences_take_more_memory() -> None:
    fixed = {"pp": 1, "shard": 1, "microbatch": 1}
    long, short = plans(seq=4096, fixed=fixed), plans(seq=1024, fixed=fixed)
    assert long.best.memory.activations == pytest.approx(4 * short.best.memory.activations, rel=0.1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cluster": "8 H900"}, "device is 'H900', which is not known: give one of"),
        ({"cluster": "many H100"}, "give hosts x devices and a device"),
        ({"cluster": "8 H100 @ 0 Gb/s"}, "network is 0.0; it must be a number of at least 1"),
        ({"cluster": "0x8 H100"}, "hosts is 0; give a whole number >= 1"),
        ({"cluster": "99999999x8 H100"}, "hosts is 99999999; give a whole number <="),
        ({"cluster": "absent.json"}, "cluster 'absent.json' cannot be read"),
        ({"cluster": 8}, "cluster is 8; give hosts x devices"),
        ({"global_batch": 7, "fixed": {"dp": 4}}, "no plan divides 4 devices.*batch of 7"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"fixed": {"qq": 2}}, "fixed has 'qq'; give some of"),
        ({"fixed": [2]}, "fixed is .*; give"),
        ({"max_memory": 0}, "max_memory is 0; it must be a number > 0"),
        ({"goal": "speed"}, "goal is 'speed'; use one of"),
        ({"goal": "cost"}, "no price of a device for an hour"),
        ({"price": 0}, "price is 0; it must be a number > 0"),
        ({"axes": "some"}, "axes is 'some'; use one of 'plan', 'all'"),
        ({"stack": "horovod"}, "stack is 'horovod'; give one of"),
        ({"seq": 0}, "seq is 0; give a whole number >= 1"),
        ({"keep": 0}, "keep is 0"),
        ({"model": "absent.json"}, "model 'absent.json' cannot be read"),
        ({"model": 3}, "model is 3; give a torch.nn.Module"),
    ],
    ids=str,
)
def test_mistakes_get_a_sentence(options: dict[str, Any], sentence: str) -> None:
    good = {"model": MODEL, "cluster": CLUSTER, "global_batch": 16}
    with pytest.raises(ec.ArgumentError, match=sentence):
        ec.plan(**{**good, **options})


def test_a_batch_of_any_size_is_divided_at_once() -> None:
    assert plans(global_batch=2**40).best.layout.global_batch == 2**40


@pytest.mark.parametrize("field", ["bandwidth", "memory", "bus", "link", "matmul"])
def test_a_device_without_a_rate_is_refused_by_name(field: str) -> None:
    with pytest.raises(ec.ArgumentError, match=f"{field} of device 'A100-SXM-80' is 0"):
        replace(Device.preset("A100"), **{field: 0})


@pytest.mark.slow
def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from echelon.planner.api import plan; "
        "from echelon.planner.plan_page import plans_page; "
        "import tests.planner.sizes as sizes; "
        "plans = plan(sizes.MODEL, '4 A100', global_batch=16, fixed={'pp': 2}); "
        "print(plans.best.explain()); plans_page(plans); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environ(), timeout=60)


@pytest.mark.slow
def test_a_module_is_planned_for_by_an_example_and_trains_by_the_best_plan() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(512, 8, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    example = torch.empty(1, 128, 512, device="meta")
    plans = ec.plan(model, "2x8 A100", global_batch=64, example=example)
    assert plans.best.plan.num_ranks == 16
    assert plans.model.num_parameters == sum(param.numel() for param in model.parameters())
    staged = ec.plan(model, "2x8 A100", global_batch=64, example=example, fixed={"pp": 4})
    assert staged.best.plan.pp == 4
    with pytest.raises(ec.ArgumentError, match="give example, a batch or a tuple"):
        ec.plan(model, "8 A100", global_batch=64)
    with pytest.raises(ec.ArgumentError, match="example is a batch of a module"):
        ec.plan(MODEL, "8 A100", global_batch=64, example=example)
