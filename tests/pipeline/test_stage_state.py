"""States of a model in stages go to the plain model and back, and its shards can be written."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, StateError
from echelon.state.tensor_shard import Replication
from tests.holding import check_optimizer, filled, joined, shared_group, write
from tests.pipeline.models import build, each, mse
from tests.pipeline.split_models import VOCABULARY, Decoder, loss_fn
from tests.pipeline.tied_stages import CLOSE, ROWS, decoder, plan, tied_stages, tokens_of
from tests.reference import assert_states_close, assert_states_equal
from tests.worlds import run_world


def adam(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, so that not every stage has a parameter in each."""
    named = dict(model.named_parameters())
    ends = ("up.weight", "down.weight", "embed.weight", "head.weight")
    matrices = [param for name, param in named.items() if name.endswith(ends)]
    others = [param for name, param in named.items() if not name.endswith(ends)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.05)


def steps(pipe: ec.Pipeline, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        x, y = tokens_of(step, ROWS)  # the same on all ranks
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        x, y = tokens_of(step, ROWS)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer over the plain model, by name."""
    names = {id(param): name for name, param in model.named_parameters()}
    state = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = [names[id(param)] for param in params]
    return {
        "state": {own[i]: value for i, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [own[i] for i in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def same_optimizer_states(found: Any, expected: Any) -> None:
    """Equal names; values up to the order of sums."""
    assert sorted(found["state"]) == sorted(expected["state"])
    for name, values in expected["state"].items():
        assert_states_close(found["state"][name], values, **CLOSE)
    for one, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert sorted(one["params"]) == sorted(other["params"])
        assert (one["lr"], one["weight_decay"]) == (other["lr"], other["weight_decay"])


def there_and_back(world: World, one: ec.Plan) -> None:
    plain, pipe = tied_stages(one, world)
    optimizer, reference = adam(pipe), adam(plain)
    steps(pipe, optimizer, range(2))
    plain_steps(plain, reference, range(2))

    state, its_state = pipe.whole_state_dict(), pipe.optimizer_state_dict(optimizer)
    assert set(state) == set(plain.state_dict())
    same_optimizer_states(its_state, by_name(plain, reference))
    assert bool(pipe.whole_state_dict(rank0_only=True)) == (world.rank < one.num_ranks // one.pp)
    parts = pipe.sharded_state_dict()

    # Into the plain model, which goes on ...
    loaded = Decoder().double()
    loaded.load_state_dict(state)
    plain_steps(plain, reference, range(2, 4))
    goes_on = adam(loaded)
    numbers = [name for group in its_state["param_groups"] for name in group["params"]]
    params = dict(loaded.named_parameters())
    for name in numbers:
        goes_on.state[params[name]] = copy.deepcopy(its_state["state"][name])
    plain_steps(loaded, goes_on, range(2, 4))
    assert_states_close(loaded.state_dict(), plain.state_dict(), **CLOSE)

    # ... and back: what came after is undone, and comes again.
    steps(pipe, optimizer, range(7, 8))
    for load in (lambda: pipe.load_state_dict(state), lambda: pipe.load_sharded_state_dict(parts)):
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        load()
        pipe.load_optimizer_state_dict(optimizer, its_state)
        steps(pipe, optimizer, range(2, 4))
        assert_states_close(pipe.whole_state_dict(), plain.state_dict(), **CLOSE)

    refuses(pipe, optimizer, parts, its_state)


def refuses(pipe: ec.Pipeline, optimizer: Any, parts: Any, its_state: Any) -> None:
    wrong = {**parts, "other": 1}
    del wrong["shift"]
    with pytest.raises(ArgumentError, match="shift: missing; other: unexpected"):
        pipe.load_sharded_state_dict(wrong)
    groups = [{**group, "params": group["params"][:0]} for group in its_state["param_groups"]]
    with pytest.raises(ArgumentError, match="missing"):
        pipe.load_optimizer_state_dict(optimizer, {"state": {}, "param_groups": groups})
    with pytest.raises(ArgumentError, match="a dict with 'state'"):
        pipe.load_optimizer_state_dict(optimizer, {})
    other = adam(Decoder())
    for param in other.param_groups[0]["params"]:
        other.state[param] = {"step": torch.ones(())}
    with pytest.raises(ArgumentError, match="in no stage of this rank"):
        pipe.optimizer_state_dict(other)
    with pytest.raises(ArgumentError, match="rank0_only is 3"):
        pipe.whole_state_dict(rank0_only=3)


SMALL = {"min_num_params": 0}
PLANS = {
    "threads": [plan("1f1b", shard=2, fsdp=SMALL)],
    "gloo": [plan("zb-v", shard=2, fsdp=SMALL), plan("1f1b", dp=2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", PLANS)
def test_a_state_goes_to_the_plain_model_and_back(world: str) -> None:
    run_world(world, each, 4, ([partial(there_and_back, one=one) for one in PLANS[world]],))


def groups_apart(world: World) -> None:
    """The embedding decays on its rank, and the head, which it is, does not."""
    _, pipe = tied_stages(ec.Plan(pp=2, microbatches=3), world)
    groups = [[*pipe.parameters()], []] if world.rank else [[], [*pipe.parameters()]]
    optimizer = torch.optim.SGD([{"params": own} for own in groups], lr=0.1, momentum=0.9)
    with pytest.raises(StateError, match=r"'inner.embed.weight' is in different groups"):
        pipe.optimizer_state_dict(optimizer)


def test_a_shared_parameter_in_two_groups_is_refused() -> None:
    run_world("threads", groups_apart, 2)


def named_as_in_the_model(world: World) -> None:
    plain, pipe = tied_stages(ec.Plan(pp=2, microbatches=3), world)
    known = [name for name, _ in plain.named_parameters()]
    names = [name for name, _ in pipe.named_parameters()]
    assert "inner.embed.weight" in names
    assert len(names) == len(set(names) & set(known))


def test_a_shared_parameter_has_the_name_of_the_model_on_each_rank() -> None:
    run_world("threads", named_as_in_the_model, 2)


def takes_groups_as_one_process_does(world: World) -> None:
    """The groups of the state are those of the stages, in another order."""
    pipe = ec.Pipeline([*layers()], world.group, microbatches=1, loss_fn=mse)
    names, mine = [*dict(layers().named_parameters())], dict(pipe.named_parameters())
    first, rest = names[:4], names[4:]
    groups = [{"lr": 0.2, "params": rest}, {"lr": 0.1, "params": first}]
    state = {"state": {}, "param_groups": groups}
    optimizer = torch.optim.SGD(
        [{"params": [mine[name] for name in own if name in mine]} for own in (first, rest)]
    )
    pipe.load_optimizer_state_dict(optimizer, state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    with pytest.raises(ArgumentError, match="number of groups is 2, and that of the optimizer 1"):
        pipe.load_optimizer_state_dict(torch.optim.SGD(pipe.parameters()), state)


def test_all_ranks_take_the_groups_of_a_state_as_one_process_does() -> None:
    run_world("threads", takes_groups_as_one_process_does, 4)


# --- shards ------------------------------------------------------------------------------------


def is_held_and_loaded(world: World, plan: ec.Plan) -> None:
    """After steps on other batches each; then with the values that were written."""
    plain, pipe = tied_stages(plan, world, by_block=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    lines = plan.dp * plan.shard
    mine = slice(ROWS * (world.rank % lines), ROWS * (world.rank % lines + 1))

    def accumulate(step: int, *, finalize: bool) -> None:
        x, y = tokens_of(step, ROWS * lines)
        loss_fn(plain(x), y).backward()
        pipe.step(x[mine], target=y[mine], finalize=finalize)

    def train(step: int) -> None:
        accumulate(step, finalize=True)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()

    for step in range(2):
        train(step)
    holdings = pipe.holdings()
    check_optimizer(holdings, optimizer)
    assert_states_close(joined(holdings, world.group), plain.state_dict(), **CLOSE)
    group = shared_group([pipe])
    assert group is not None
    assert group.ranks == world.group.ranks

    accumulate(5, finalize=False)  # gradients are kept, and perhaps whole parameters
    weights = filled(plain, 7).state_dict()
    write(holdings, weights)
    x, y = tokens_of(9, ROWS)
    found = pipe.eval_step(x, target=y, loss_everywhere=True)
    torch.testing.assert_close(found, loss_fn(plain(x), y).detach(), **CLOSE)
    train(6)
    assert_states_close(joined(pipe.holdings(), world.group), plain.state_dict(), **CLOSE)


FLAT = {"use_orig_params": False}
KEPT = ec.Strategy.SHARD_GRAD_OP
PLANS_OF_SHARDS: dict[str, list[ec.Plan]] = {
    "threads": [
        plan("zb-v", dp=2),  # embedding and head on one rank
        plan("1f1b", shard=2, fsdp={"layout": "rows", **SMALL}),
        plan("interleaved", shard=2, fsdp={"min_num_params": 30}),
        plan("zb-h1", shard=2, fsdp={**FLAT, **SMALL}),
        plan("1f1b", shard=2, strategy=KEPT, pipeline={"reduce_every": "microbatch"}),
    ],
    "processes": [plan("1f1b", dp=2), plan("zb-v", shard=2, fsdp=SMALL)],
    "gloo": [
        plan("1f1b", shard=2, fsdp=SMALL),
        plan("interleaved", shard=2, pipeline={"window_nbytes": 0}, fsdp=SMALL),
        plan("zb-v", shard=2, strategy=KEPT, fsdp=SMALL),
        plan("1f1b", shard=2, fsdp=FLAT),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS_OF_SHARDS)
def test_stages_of_all_ranks_are_the_model_and_can_be_written(kind: str) -> None:
    run_world(
        kind, each, 4, ([partial(is_held_and_loaded, plan=one) for one in PLANS_OF_SHARDS[kind]],)
    )


@pytest.mark.slow
def test_stages_on_a_mesh_of_three_axes_are_the_model_and_can_be_written() -> None:
    run_world("threads", is_held_and_loaded, 8, (plan("zb-v", dp=2, shard=2, fsdp=SMALL),))


@pytest.mark.slow
def test_stages_that_nobody_replicates_are_the_model_and_can_be_written() -> None:
    checks = [partial(is_held_and_loaded, plan=one) for one in (plan("1f1b"), plan("zb-v"))]
    run_world("threads", each, 2, (checks,))


# --- what is said of them ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_parameter_that_stages_share_has_all_names_and_numbered_copies() -> None:
    def main(world: World, one: ec.Plan, copies: int) -> None:
        stages = ec.pipeline.split(decoder(), one.pp * one.chunks)
        pipe = ec.parallelize(stages, one, world, loss_fn=loss_fn)
        held = {name: held for held in pipe.holdings().tensors for name in held.names}
        for shared in (held[name] for name in held if name == "head.weight"):
            assert shared.names == ("inner.embed.weight", "head.weight")
            assert shared.is_whole
            assert shared.replication is Replication.IDENTICAL
            assert shared.num_copies == copies
        seen = world.group.all_gather_object({one.name: one.copy for one in held.values()})
        found = [own["inner.embed.weight"] for own in seen if "inner.embed.weight" in own]
        assert sorted(found) == list(range(copies))

    for one, copies in (
        (plan("1f1b"), 2),
        (plan("zb-v"), 1),
        (plan("1f1b", dp=2), 4),
        (plan("1f1b", shard=2), 4),
        (plan("zb-v", shard=2), 2),
        (plan("1f1b", dp=2, shard=2), 8),
    ):
        run_world("threads", main, one.num_ranks, (one, copies))


class Frozen(nn.Module):
    """A stage with nothing to train: a buffer, and a parameter that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((6,), 0.5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@pytest.mark.slow
def test_a_stage_with_nothing_to_train_is_one_of_the_plan_like_the_others() -> None:
    def main(world: World, one: ec.Plan) -> None:
        stages = [*build("plain", 1), Frozen()]
        expected = nn.Sequential(*copy.deepcopy(stages)).state_dict()
        pipe = ec.parallelize(stages, one, world, loss_fn=mse)
        holdings = pipe.holdings()
        assert_states_equal(joined(holdings, world.group), expected)
        of_buffers = Replication.PRIMARY if one.shard == 1 else Replication.PER_RANK
        for held in holdings.tensors:
            wanted = of_buffers if held.name == "1.shift" else Replication.IDENTICAL
            assert held.replication is wanted, held.names
        assert shared_group([pipe]) is world.group

    for one in (plan("1f1b", dp=2), plan("1f1b", shard=2), plan("1f1b", dp=2, shard=2)):
        run_world("threads", main, one.num_ranks, (one,))


def test_a_stage_without_a_wrapper_needs_to_know_its_replicas() -> None:
    def main(world: World) -> None:
        mesh = world.mesh(pp=2, dp=2)
        for replicate in (None, mesh["dp"]):
            stages = [*build("plain", 1), Frozen()]
            stage = mesh.coordinates["pp"]
            if stage == 0:
                stages[0] = ec.DDP(stages[0], mesh["dp"])
            pipe = ec.Pipeline(stages, mesh["pp"], microbatches=2, loss_fn=mse, replicate=replicate)
            if stage == 0 or replicate is not None:
                assert {held.num_copies for held in pipe.holdings().tensors} == {2}
            else:
                with pytest.raises(ArgumentError, match=r"stages \[1\].*replicate="):
                    pipe.holdings()

    run_world("threads", main, 4)


def test_a_stage_without_a_wrapper_has_the_replicas_of_another_on_its_rank() -> None:
    def main(world: World) -> None:
        mesh = world.mesh(pp=2, dp=2)
        stages = [*build("plain", 3), Frozen()]
        for index in (0, 1, 2):
            stages[index] = ec.DDP(stages[index], mesh["dp"])
        pipe = ec.Pipeline(stages, mesh["pp"], microbatches=2, schedule="interleaved", loss_fn=mse)
        joined(pipe.holdings(), world.group)
        assert {held.num_copies for held in pipe.holdings().tensors} == {2}

    run_world("threads", main, 4)


@pytest.mark.slow
def test_names_are_those_of_a_model_that_was_not_compiled() -> None:
    def main(world: World) -> None:
        mesh = world.mesh(pp=2, dp=2)
        for wrap in (False, True):
            stages = [
                torch.compile(one, backend="eager") for one in ec.pipeline.split(decoder(), 2)
            ]
            if not wrap:  # the replicas of a plain stage have nothing to train
                for one in stages:
                    one.requires_grad_(False)
            else:
                stage = mesh.coordinates["pp"]
                inside = [p for p in stages[stage].parameters() if p.shape == (VOCABULARY, 4)]
                stages[stage] = ec.DDP(stages[stage], mesh["dp"], ignored=inside)
            pipe = ec.Pipeline(
                stages, mesh["pp"], microbatches=2, loss_fn=loss_fn, replicate=mesh["dp"]
            )
            assert_states_equal(joined(pipe.holdings(), world.group), decoder().state_dict())

    run_world("threads", main, 4)


def test_stages_that_were_not_split_have_the_names_of_a_sequential() -> None:
    def main(world: World) -> None:
        shared = nn.Linear(6, 6, bias=False).double()
        stages: list[nn.Module] = [
            nn.Sequential(shared, nn.Tanh()),
            nn.BatchNorm1d(6).double(),
            nn.Sequential(shared),
        ]
        world.group.broadcast(shared.weight.data, 0)
        expected = nn.Sequential(*copy.deepcopy(stages)).state_dict()
        pipe = ec.Pipeline(stages, world.group, microbatches=2, loss_fn=mse)
        assert_states_equal(joined(pipe.holdings(), world.group), expected)

    run_world("threads", main, 3)


NAMED_PLANS = [
    ec.Plan(pp=2, microbatches=2),
    ec.Plan(pp=2, dp=2, microbatches=2),
    ec.Plan(pp=2, shard=2, microbatches=2),
]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))


def names_and_loads(world: World, plan_: ec.Plan) -> None:
    pipe: Any = ec.parallelize(layers(), plan_, world, loss_fn=mse)
    state = pipe.state_dict()
    names = [name for name, _ in pipe.named_parameters()]
    assert names == [name for name in state if name.endswith(("weight", "bias"))]
    assert names == [name for name, _ in layers().named_parameters() if name in state]
    assert {*names, *dict(pipe.named_buffers())} == {*state}
    whole = pipe.whole_state_dict(rank0_only=False)
    assert pipe.load_state_dict(whole).unexpected_keys == []
    assert pipe.load_state_dict(state).missing_keys == []
    with pytest.raises(ArgumentError, match=r"1 unexpected: 0\.lora"):
        pipe.load_state_dict({**whole, "0.lora": torch.ones(1)})
    report = pipe.load_state_dict({**whole, "0.lora": torch.ones(1)}, strict=False)
    assert report.unexpected_keys == ["0.lora"]
    lacking = {name: value for name, value in whole.items() if name != names[0]}
    with pytest.raises(ArgumentError, match=f"1 missing: {names[0]}"):
        pipe.load_state_dict(lacking)
    assert pipe.load_state_dict(lacking, strict=False).missing_keys == [names[0]]


@pytest.mark.parametrize("plan_", NAMED_PLANS, ids=str)
def test_parameters_and_what_does_not_fit_have_the_names_of_the_model(plan_: ec.Plan) -> None:
    run_world("threads", names_and_loads, 2 * plan_.dp * plan_.shard, args=(plan_,))


class Versioned(nn.Linear):
    """It takes what has no version for a state with twice the values."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def keeps_versions(world: World, wrap: str) -> None:
    plain = nn.Sequential(*(nn.Sequential(Versioned(64, 64)) for _ in range(2)))
    stages: list[nn.Module] = [copy.deepcopy(stage) for stage in plain]
    if wrap == "split":
        stages = ec.pipeline.split(copy.deepcopy(plain), 2)
    elif wrap:
        alone = [world.group.subgroup([rank]) for rank in range(2)][world.rank]
        stages = [getattr(ec, wrap)(stage, alone) for stage in stages]
    pipe = ec.Pipeline(stages, world.group, microbatches=1)
    expected = plain.state_dict()
    pipe.load_state_dict(expected)
    pipe.load_state_dict(pipe.whole_state_dict())
    pipe.load_state_dict(pipe.state_dict(), strict=False)
    pipe.load_sharded_state_dict(pipe.sharded_state_dict())
    whole = pipe.whole_state_dict()
    assert_states_equal(whole, expected)
    plain.load_state_dict(whole)
    assert_states_equal(plain.state_dict(), whole)


@pytest.mark.parametrize("wrap", ["", "split", "DDP", "FSDP"])
def test_states_of_stages_keep_the_versions_of_modules(wrap: str) -> None:
    ec.run(keeps_versions, 2, args=(wrap,))
