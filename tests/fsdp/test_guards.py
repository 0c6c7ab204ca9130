"""No part of a sharded model is saved, copied or sent as if it were the whole."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

import echelon as ec
from echelon.errors import ArgumentError, StateError
from tests.worlds import KINDS, run_world

MEANT = r"Take model\.state_dict\(\) of the FSDP itself on all ranks"


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)), nn.Linear(7, 3, bias=False)]
    return nn.Sequential(*layers).double()


def sharded(world: ec.World, **options: Any) -> ec.FSDP:
    options = {"min_num_params": 0, "units": ec.units.by_type(nn.Linear), **options}
    return ec.FSDP(build(), world.group, **options)


def saved_by_rank_0(world: ec.World, folder: str) -> None:
    model = sharded(world)
    calls = {
        "torch.save": lambda: torch.save(model.module.state_dict(), f"{folder}/a.pt"),
        "a block": lambda: model.module[0].state_dict(),
        "a block of the wrapper": lambda: model.get_submodule("1").state_dict(),
        "safetensors": lambda: save_model(model.module, f"{folder}/a.safetensors"),
    }
    if world.rank == 0:
        for call in calls.values():
            with pytest.raises(StateError, match=MEANT):
                call()
    assert not list(Path(folder).iterdir())
    expected = build().state_dict()
    for layout in ("flat", "rows"):
        model = sharded(world, layout=layout)
        with model.full_parameters():
            found = model.module.state_dict()
            assert all(torch.equal(found[key], value) for key, value in expected.items())
        state = model.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], value) for key, value in expected.items())
        assert {tuple(v.shape) for v in model.module.state_dict(keep_vars=True).values()}
    whole = sharded(world, strategy=ec.Strategy.NO_SHARD).module.state_dict()
    assert all(torch.equal(whole[key], value) for key, value in expected.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_module_inside_is_refused_on_the_rank_that_asks(
    kind: str, tmp_path: Path
) -> None:
    run_world(kind, saved_by_rank_0, 2, args=(str(tmp_path),))


def test_a_module_inside_is_neither_copied_nor_pickled() -> None:
    def main(world: ec.World) -> None:
        model = sharded(world)
        for module in (model.module, model.module[0]):
            with pytest.raises(StateError, match=r"cannot be copied.*copy\.deepcopy\(model\)"):
                copy.deepcopy(module)
        for save in (torch.save, pickle.dump):
            with pytest.raises(StateError, match="cannot be pickled, saved as an object or sent"):
                save(model.module, io.BytesIO())
            with pytest.raises(StateError, match="cannot be pickled, saved or sent"):
                save(model, io.BytesIO())
        clone = copy.deepcopy(model)
        with pytest.raises(StateError, match=MEANT):
            clone.module.state_dict()
        clone.load_state_dict(build().state_dict())

    ec.run(main, 2)


def check_loading(world: ec.World) -> None:
    for layout in ("flat", "rows"):
        model, values = sharded(world, layout=layout), build()
        with torch.no_grad():
            for i, tensor in enumerate(values.state_dict().values()):
                tensor.copy_(tensor + i)
        model.module.load_state_dict(values.state_dict())
        for key, value in model.state_dict().items():
            assert torch.equal(value, values.state_dict()[key])
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.module[1].load_state_dict({"weight": torch.ones(2, 2)})
        with pytest.raises(ArgumentError, match="assign=True"):
            model.module.load_state_dict(values.state_dict(), assign=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_state_is_loaded_by_a_module_inside(kind: str) -> None:
    run_world(kind, check_loading, 2)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def save_pretrained(world: ec.World, folder: str) -> dict[str, Tensor]:
    plain = llama()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    units = ec.units.by_type("LlamaDecoderLayer")
    model = ec.FSDP(plain, world.group, units=units, min_num_params=0)
    if world.rank == 0:
        with pytest.raises(StateError, match=r"save_pretrained\(folder, state_dict=\.\.\.\)"):
            plain.save_pretrained(f"{folder}/refused")
        with pytest.raises(StateError, match="full_parameters"):
            model.save_pretrained(f"{folder}/refused")
    state = model.whole_state_dict(rank0_only=True)
    if world.rank == 0:
        plain.save_pretrained(f"{folder}/state", state_dict=state)
    with model.full_parameters():
        if world.rank == 0:
            model.save_pretrained(f"{folder}/full")
    return before


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_save_pretrained_writes_whole_weights_or_refuses(kind: str, tmp_path: Path) -> None:
    before = run_world(kind, save_pretrained, 2, args=(str(tmp_path),))[0]
    for name in ("state", "full"):
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() <= before.keys()
        assert all(torch.equal(value, before[key]) for key, value in written.items())
        assert "model.layers.1.mlp.down_proj.weight" in written
    assert not list(tmp_path.glob("refused/*.safetensors"))


def step_inside(world: ec.World) -> None:
    model = sharded(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    before = model.state_dict()
    with (
        pytest.raises(StateError, match=r"a step of SGD inside full_parameters\(\)"),
        model.full_parameters(),
    ):
        optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_step_inside_full_parameters_is_refused() -> None:
    run_world("threads", step_inside, 2)
