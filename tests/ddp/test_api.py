"""The wrapper as a module: names, state, copies, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import echelon as ec
from tests.ddp.checks import SMALL
from tests.ddp.models import TiedLanguageModel, assert_close, gradients, mlp, rows, share
from tests.reference import assert_states_equal


def alone(fn):
    """What ``fn(world)`` returns in a world of one rank."""
    return ec.run(fn, 1)[0]


def test_train_and_eval_reach_the_module_and_names_are_plain():
    def main(world):
        ddp = ec.DDP(
            nn.ParameterDict({"weight": nn.Parameter(torch.tensor([1.0, 2.0]))}), world.group
        )
        modes = [ddp.module.training]
        for change in (ddp.eval, ddp.train):
            change()
            modes.append(ddp.module.training)
        assert modes == [True, False, True]
        assert [name for name, _ in ddp.named_parameters()] == ["weight"]
        assert len(list(ddp.parameters())) == 1

    alone(main)


def test_state_dicts_and_names_are_those_of_the_plain_model():
    def main(world):
        plain = nn.Sequential(TiedLanguageModel(), nn.BatchNorm1d(3))
        ddp = ec.DDP(copy.deepcopy(plain), world.group)
        assert list(ddp.state_dict()) == list(plain.state_dict())
        assert ddp.state_dict()._metadata == plain.state_dict()._metadata
        for names in ("named_parameters", "named_buffers"):
            wrapped_names = [name for name, _ in getattr(ddp, names)()]
            assert wrapped_names == [name for name, _ in getattr(plain, names)()]
        assert [name for name, _ in ddp.named_modules()][1:] == [
            n for n, _ in plain.named_modules()
        ]
        assert ddp in set(ddp.modules())
        other = {key: value + 1 for key, value in plain.state_dict().items()}
        pointers = [param.data_ptr() for param in ddp.parameters()]
        ddp.load_state_dict(other)
        assert [param.data_ptr() for param in ddp.parameters()] == pointers
        assert_states_equal(ddp.state_dict(), other)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\).*\"1.weight\""):
            ddp.load_state_dict({key: other[key] for key in other if key != "1.weight"})
        with pytest.raises(ec.ArgumentError, match="would replace the parameters"):
            ddp.load_state_dict(other, assign=True)

    alone(main)


def test_a_larger_model_around_it_saves_and_loads_plain_names():
    def main(world):
        plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
        outer = nn.Sequential(nn.Linear(2, 2), ec.DDP(nn.Sequential(nn.Linear(2, 1)), world.group))
        assert list(outer.state_dict()) == list(plain.state_dict())
        assert dict(outer.named_parameters()).keys() == dict(plain.named_parameters()).keys()
        outer.load_state_dict(plain.state_dict())
        assert_states_equal(outer.state_dict(), plain.state_dict())
        with pytest.raises(ec.ArgumentError, match="assign"):
            outer.load_state_dict(plain.state_dict(), assign=True)

    alone(main)


def test_attributes_of_the_module_are_found_on_the_wrapper():
    def main(world):
        ddp = ec.DDP(nn.Linear(3, 2), world.group)
        assert ddp.in_features == 3
        assert ddp.weight is ddp.module.weight
        assert ddp.group is world.group
        with pytest.raises(AttributeError, match="'DDP' object has no attribute 'depth', and nei"):
            _ = ddp.depth

    alone(main)


def test_buckets_are_25_mib_with_a_first_of_1_mib():
    def main(world):
        model = nn.ParameterList([torch.zeros(2**17) for _ in range(60)])  # of 512 KiB each
        ddp = ec.DDP(model, world.group)
        return [len(bucket.names) for bucket in ddp.buckets]

    assert alone(main) == [2, 50, 8]


def test_an_optimizer_may_be_made_before_or_after_wrapping():
    def main(world):
        model = mlp()
        before = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = ec.DDP(model, world.group)
        after = torch.optim.SGD(ddp.parameters(), lr=0.1)
        params = [optimizer.param_groups[0]["params"] for optimizer in (before, after)]
        assert all(a is b for a, b in zip(*params, strict=True))

    ec.run(main, 2)


def test_a_copy_trains_on_its_own_and_copying_needs_no_other_rank():
    def main(world):
        ddp = ec.DDP(mlp(), world.group, **SMALL)
        xs = [share(rows(step, 2), world.rank, 2) for step in range(3)]
        ddp(xs[0]).sum().backward()
        if world.rank == 0:  # an average, or a snapshot, on one rank only
            assert copy.deepcopy(ddp)(xs[0]).requires_grad
        clone = copy.deepcopy(ddp)
        assert clone.buckets == ()
        for x in xs:
            for model in (ddp, clone):
                model.zero_grad()
                model(x).pow(2).sum().backward()
            assert_close(clone, ddp, rtol=0.0)
            for a, b in zip(ddp.parameters(), clone.parameters(), strict=True):
                assert a.grad.untyped_storage().data_ptr() != b.grad.untyped_storage().data_ptr()
        return gradients(clone)

    a, b = ec.run(main, 2)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_exponential_moving_average_follows_the_weights():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        plain = mlp()
        averages = [
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for model in (ddp, plain)
        ]
        for step in range(3):
            for model, average in zip((ddp, plain), averages, strict=True):
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(step)
                average.update_parameters(model)
        for a, b in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
            assert torch.equal(a, b)
        assert averages[0](rows(0, 1)).shape == (2, 2)

    ec.run(main, 2)


def test_the_module_of_a_wrapper_can_be_pickled():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        ddp(rows(0, 1)).sum().backward()
        loaded = pickle.loads(pickle.dumps(ddp.module))
        for name, param in loaded.named_parameters():
            assert torch.equal(param, ddp.get_parameter(name))

    alone(main)


def test_without_gradients_forward_is_the_modules_own():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        if world.rank == 0:  # the other rank does nothing, so communication would deadlock
            with torch.no_grad():
                out = ddp(rows(0, 1))
            assert not out.requires_grad

    ec.run(main, 2)


def test_an_unwrapped_module_keeps_its_gradients_and_can_be_wrapped_again():
    def main(world):
        ddp = ec.DDP(mlp(), world.group, **SMALL)
        ddp(rows(0, 1)).sum().backward()
        before = gradients(ddp)
        module = ddp.unwrap()
        assert all(torch.equal(grad, before[name]) for name, grad in gradients(module).items())
        for use in (lambda: ddp(rows(0, 1)), ddp.sync_gradients, ddp.unwrap):
            with pytest.raises(ec.StateError, match=r"taken off its module by unwrap\(\)"):
                use()
        module.zero_grad()
        again = ec.DDP(module, world.group)
        again(rows(0, 1)).sum().backward()
        assert all(torch.equal(grad, before[name]) for name, grad in gradients(again).items())

    ec.run(main, 2)


def test_a_parameter_frozen_after_wrapping_counts_as_unused():
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        ddp.module[0].requires_grad_(False)
        ddp(rows(0, 1)).sum().backward()
        assert ddp.module[0].weight.grad is None
        assert ddp.unused_parameters().everywhere == ("0.weight", "0.bias")

    ec.run(main, 2)


@pytest.mark.parametrize("src", [-1, 2, "0", None])
def test_broadcasting_from_a_rank_that_is_not_there_is_refused(src):
    def main(world):
        ddp = ec.DDP(mlp(), world.group)
        with pytest.raises(ValueError, match="not in a group of 2"):
            ddp.broadcast_parameters(src)

    ec.run(main, 2)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)),
            "module '0' makes sparse gradients",
        ),
        (lambda: nn.EmbeddingBag(3, 2, sparse=True), "module 'EmbeddingBag' makes sparse"),
        (
            lambda: nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True)),
            "module '0' has scale_grad_by_freq=True",
        ),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on meta and the group is on cpu"),
        (lambda: nn.LazyLinear(2), "'weight' has no shape yet"),
        (lambda: "model", r"give a torch\.nn\.Module"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_module_that_cannot_be_replicated_is_refused(module, message):
    def main(world):
        ec.DDP(module(), world.group)

    with pytest.raises(ec.ArgumentError, match=message):
        ec.run(main, 2)


def test_a_world_in_place_of_its_group_is_refused():
    def main(world):
        ec.DDP(mlp(), world)

    with pytest.raises(ec.ArgumentError, match=r"give a Group, such as world\.group"):
        alone(main)
