"""A copy in a state dict refuses to be written into, and is a plain tensor for all that reads."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import StateError
from echelon.state.state_copy import StateCopy, as_copy
from tests.worlds import run_world


def sets(name: str) -> Callable[[Tensor], None]:
    return lambda t: setattr(t, name, torch.zeros(2, 3).double())


def adds(t: Tensor) -> None:
    t += 1


def zeroes_rows(t: Tensor) -> None:
    for row in t:
        row.zero_()


def steps(t: Tensor) -> None:
    t.requires_grad_()
    t.square().sum().backward()
    torch.optim.SGD([t], lr=0.1, foreach=False).step()


ONES = torch.ones(2, 3)
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda t: t.copy_(ONES),
    "function": lambda t: torch.clamp_(t, 0, 0.5),
    "operator": adds,
    "index": lambda t: t.__setitem__(0, 9.0),
    "mask": lambda t: t.__setitem__(t > 1, 0.0),
    "out": lambda t: torch.add(ONES, 1, out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "foreach_lerp": lambda t: torch._foreach_lerp_([t], [ONES.double()], 0.1),
    "data": sets("data"),
    "real": sets("real"),
    "in_data": lambda t: t.data.zero_(),
    "detach": lambda t: t.detach().zero_(),
    "view": lambda t: t.view(-1)[1:].zero_(),
    "chunk": lambda t: t.chunk(2)[0].zero_(),
    "rows": zeroes_rows,
    "same_dtype": lambda t: t.to(t.dtype).zero_(),
    "shallow": lambda t: copy.copy(t).zero_(),
    "init": nn.init.ones_,
    "inplace": lambda t: F.relu(t, inplace=True),
    "statistics": lambda t: F.batch_norm(torch.ones(4, 3).double(), t[0], t[1], training=True),
    "set_": lambda t: t.set_(torch.ones(1).double()),
    "resize_": lambda t: t.resize_(1),
    "apply_": lambda t: t.apply_(lambda value: 0),
    "optimizer": steps,
}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()


def states_of(world: World) -> dict[str, dict[str, Any]]:
    """A state dict of copies from every call that makes one."""
    sharded = ec.FSDP(net(), world.group, min_num_params=0)
    replicated = ec.DDP(net(), world.group)
    layers = net()
    stages = [nn.Sequential(layers[0], layers[1]), nn.Sequential(layers[2])]
    pipe = ec.Pipeline(stages, world.group, microbatches=1)
    return {
        "FSDP.state_dict": sharded.state_dict(),
        "FSDP.whole_state_dict": sharded.whole_state_dict(),
        "FSDP.sharded_state_dict": sharded.sharded_state_dict(),
        "DDP.whole_state_dict": replicated.whole_state_dict(),
        "Pipeline.whole_state_dict": pipe.whole_state_dict(),
        "Pipeline.sharded_state_dict": pipe.sharded_state_dict(),
    }


def refuses(world: World) -> None:
    for call, state in states_of(world).items():
        for name, value in state.items():
            before = value.clone()
            with pytest.raises(StateError, match=r"copy_\(\) writes into .*load_state_dict"):
                value.copy_(before + 1)
            assert torch.equal(value, before), (call, name)
    sharded = ec.FSDP(net(), world.group, min_num_params=0)
    for state in (sharded.state_dict(), sharded.whole_state_dict()):
        for kind, write in WRITES.items():
            value = state["0.weight"]
            before = value.detach().clone()
            with pytest.raises(StateError, match=r"writes into .*writeback=True.*clone\(\)"):
                write(value)
            assert torch.equal(value, before), kind
    changed = sharded.state_dict()
    changed["0.weight"] = changed["0.weight"].half() + 1
    changed["2.weight"] = changed["2.weight"].clone().zero_()
    sharded.load_state_dict(changed)
    assert not sharded.state_dict()["2.weight"].any()
    sharded.load_state_dict(sharded.state_dict())
    with sharded.full_parameters(writeback=True), torch.no_grad():
        sharded.module[2].weight.copy_(changed["2.weight"] + 3)
    assert bool((sharded.state_dict()["2.weight"] == 3).all())


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_write_into_a_copy_of_a_state_is_refused_before_it(kind: str) -> None:
    run_world(kind, refuses, 2)


def keeps_what_is_the_models(world: World) -> None:
    replicated = ec.DDP(net(), world.group)
    replicated.state_dict()["2.weight"].zero_()
    assert not replicated.module[2].weight.any()
    both = nn.ModuleList([nn.Linear(2, 2), ec.FSDP(net(), world.group, min_num_params=0)])
    both.state_dict()["0.weight"].zero_()
    assert not both[0].weight.any()
    with pytest.raises(StateError, match="writes into"):
        both.state_dict()["1.0.weight"].zero_()


def test_tensors_that_are_the_models_own_are_written_as_in_plain_torch() -> None:
    ec.run(keeps_what_is_the_models, 2)


def a_copy() -> Tensor:
    found: Tensor = as_copy(torch.arange(6.0).view(2, 3))
    assert type(found) is StateCopy
    return found


def test_what_is_computed_from_a_copy_is_plain() -> None:
    value = a_copy()
    for result in (
        value.clone(), value + 1, value.half(), value.sum(), torch.cat([value]), ONES @ value.T,
        value.new_zeros(2), copy.deepcopy(value), torch.stack([value, value])[0],
    ):  # fmt: skip
        assert type(result) is Tensor
        result.zero_()
    assert value.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert value.numpy().tolist() == value.tolist()
    assert f"{value[1, 2]:.1f}" == "5.0"
    target = torch.zeros(2, 3)
    target.copy_(value)
    torch._foreach_add_([target], [value])
    assert torch.equal(target, 2 * value)
    (value.requires_grad_() * 2).sum().backward()
    assert type(value.grad) is Tensor
    assert torch.equal(torch.vmap(lambda row: row * 2)(value), 2 * value)


def test_files_of_copies_have_plain_tensors_and_one_memory_of_tied_ones(tmp_path: Path) -> None:
    value = a_copy()
    state = {"a": value, "tied": value, "view": value.view(-1)}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for found in (saved, pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert all(type(tensor) is Tensor for tensor in found.values())
        assert found["a"] is found["tied"]
        assert torch.equal(found["a"], value)
    assert saved["view"].data_ptr() == saved["a"].data_ptr()
    safetensors.torch.save_file({"a": value}, tmp_path / "x.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "x.safetensors")["a"], value)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_a_module_that_loads_copies_trains(assign: bool, swap: bool) -> None:
    state = {name: as_copy(value.clone()) for name, value in net().state_dict().items()}
    module = net().to("meta") if assign and not swap else net()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module.load_state_dict(state, assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {type(param) for param in module.parameters()} == {nn.Parameter}
    assert {type(buffer) for buffer in module.buffers()} == {Tensor}
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.rand(4, 3).double()).sum().backward()
    optimizer.step()
    assert int(module[1].num_batches_tracked) == 1


def test_a_read_of_a_copy_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from echelon.state.state_copy import as_copy; "
        "as_copy(torch.ones(1)).clone(); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_parameter_and_a_buffer_made_of_a_copy_are_what_they_are_elsewhere() -> None:
    assert type(nn.Parameter(a_copy())) is nn.Parameter
    assert isinstance(nn.Buffer(a_copy()), nn.Buffer)
    nn.Buffer(a_copy()).zero_()


def sends(world: World, path: Path) -> None:
    state = ec.FSDP(net(), world.group, min_num_params=0).state_dict()
    received = world.group.broadcast_object(state, 0)
    assert all(type(value) is Tensor for value in received.values())
    ec.save(path, step=1, weights=state, group=world.group)


def test_a_state_of_copies_is_sent_and_saved(tmp_path: Path) -> None:
    ec.run(sends, 2, args=(tmp_path / "step",))
