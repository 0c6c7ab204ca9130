"""Steps go to the formats of others and come back, equal to the last bit."""

import copy
import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import echelon as ec
from echelon.c10d.dcp import read_dcp, write_dcp
from echelon.checkpoint.convert import convert as convert_module
from echelon.checkpoint.convert.convert import ConvertOptions, Form, convert
from echelon.cli import app
from echelon.comm.world import World
from echelon.errors import ArgumentError, CheckpointCorrupt, CheckpointError
from echelon.process import atomic_files
from tests.bomb import Bomb
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.whole import State, check_equal, whole_state

LAYOUT = LAYOUTS["fsdp3"]


def save(world: World, folder: Path) -> State:
    trainee = LAYOUT.trainee(world)
    for step in range(2):
        trainee.train(step)
    values = {"epoch": 3, "history": [1.5, torch.arange(3)]}
    ec.save(folder, step=7, model=trainee.model, optimizer=trainee.optimizer, **values)
    return whole_state(trainee)


@contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    """Let a write fail beyond that size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("target", "named", "options"),
    [
        ("a/b/o.pt", "a/b/o.pt", {}),
        ("o.safetensors", "o.safetensors", {}),
        ("shards", "shards/model-00001-of-00003.safetensors", {"shard_nbytes": 40_000}),
        ("a/dcp", "a/dcp", {"to": Form.DCP}),
        ("a/run", "a/run/.saving-000000001-", {}),
    ],
)
@pytest.mark.parametrize("room", [0, 5000])
def test_a_full_disk_is_a_sentence_with_path_and_number_and_nothing_is_left_behind(
    target: str, named: str, options: dict[str, Any], room: int, tmp_path: Path
) -> None:
    ec.save(tmp_path / "run", step=1, model=nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 99)))
    before = {*tmp_path.rglob("*")}
    with no_file_longer_than(room), pytest.raises(CheckpointError) as info:
        convert(tmp_path / "run", tmp_path / target, ConvertOptions(**options))
    assert info.value.errno == errno.EFBIG
    assert str(info.value).startswith(f"{tmp_path / named}")
    assert str(info.value).endswith(f": File too large (errno {errno.EFBIG})")
    assert {*tmp_path.rglob("*")} == before


def test_a_disk_without_room_for_the_copy_by_which_a_dcp_is_read_is_not_called_damage(
    tmp_path: Path,
) -> None:
    write_dcp({"model": {"a": torch.zeros(10_000), "b": torch.zeros(10_000)}}, tmp_path / "dcp")
    before = {*tmp_path.rglob("*")}
    with no_file_longer_than(50_000), pytest.raises(OSError, match="File too large") as info:
        read_dcp(tmp_path / "dcp")
    assert info.value.errno == errno.EFBIG
    assert {*tmp_path.rglob("*")} == before


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("run")
    return folder, ec.run(save, LAYOUT.ranks, args=(folder,))[0]


def load(folder: Path, *, optimizer: bool = True) -> State:
    """In one process, into a plain model."""
    world_of_one: list[State] = ec.run(_load, 1, args=(folder, optimizer))
    return world_of_one[0]


def _load(world: World, folder: Path, optimizer: bool) -> State:
    trainee = LAYOUTS["plain"].trainee(world, seed=1)
    states = {"optimizer": trainee.optimizer} if optimizer else {}
    loaded = ec.load(folder, model=trainee.model, rng=False, **states)
    found = whole_state(trainee)
    return {**found, "values": dict(loaded.values)}


@pytest.mark.slow
def test_one_safetensors_file_has_the_names_and_bits_of_the_plain_model(
    saved: tuple[Path, State], tmp_path: Path
) -> None:
    folder, state = saved
    target = tmp_path / "model.safetensors"
    assert convert(folder, target, ConvertOptions()) == (
        [target],
        ("epoch", "history", "optimizer", "rng"),
    )
    with safe_open(target, framework="pt") as file:
        check_equal({name: file.get_tensor(name) for name in state["model"]}, state["model"])
        assert len(file.keys()) == len(state["model"])
        assert file.metadata() == {"format": "pt"}  # which transformers asks for


def test_shards_have_the_index_of_hugging_face_and_come_back(
    saved: tuple[Path, State], tmp_path: Path
) -> None:
    folder, state = saved
    shards = tmp_path / "shards"
    done = convert(folder, shards, ConvertOptions(shard_nbytes=300, weights_only=True))
    assert len(done.written) > 3
    assert done.left_out == ()
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state["model"].keys()
    total = sum(one.nbytes for one in state["model"].values())
    assert index["metadata"] == {"total_size": total}
    convert(shards, tmp_path / "back", ConvertOptions())
    check_equal(load(tmp_path / "back", optimizer=False)["model"], state["model"])


@pytest.mark.slow
def test_transformers_reads_what_was_converted(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    ec.save(tmp_path / "run", step=0, model=model)
    config.save_pretrained(tmp_path / "hub")
    convert(tmp_path / "run", tmp_path / "hub" / "model.safetensors", ConvertOptions())
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hub")
    check_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("form", [Form.DCP, Form.TORCH])
def test_model_optimizer_and_values_go_there_and_back(
    saved: tuple[Path, State], tmp_path: Path, form: Form
) -> None:
    folder, state = saved
    there = tmp_path / "there"
    convert(folder, there, ConvertOptions(to=form))
    convert(there, tmp_path / "back", ConvertOptions(to=Form.ECHELON, step=9, trust_pickle=True))
    assert ec.steps(tmp_path / "back") == [9]
    found = load(tmp_path / "back")
    values = found.pop("values")
    check_equal(found, state)
    assert values["epoch"] == 3
    check_equal(values["history"], [1.5, torch.arange(3)])


@pytest.mark.parametrize("form", [Form.DCP, Form.TORCH, Form.SAFETENSORS])
def test_a_model_with_a_tied_weight_and_its_optimizer_come_back(form: Form, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    items: dict[str, Any] = {"model": model}
    if form is not Form.SAFETENSORS:
        model(torch.arange(3)).sum().backward()
        items["optimizer"] = optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
    before = {name: copy.deepcopy(item.state_dict()) for name, item in items.items()}
    ec.save(tmp_path / "run", step=0, **items)
    convert(tmp_path / "run", there := tmp_path / f"a.{form.value}", ConvertOptions(to=form))
    convert(there, tmp_path / "back", ConvertOptions(to=Form.ECHELON, trust_pickle=True))
    nn.init.zeros_(model[0].weight)
    ec.load(tmp_path / "back", **items)
    check_equal({name: item.state_dict() for name, item in items.items()}, before)


def test_a_dcp_is_read_only_if_its_pickle_is_trusted(tmp_path: Path) -> None:
    ec.save(tmp_path / "run", step=0, model=nn.Linear(2, 2))
    convert(tmp_path / "run", tmp_path / "dcp", ConvertOptions(to=Form.DCP))
    with pytest.raises(ArgumentError, match="--trust-pickle"):
        convert(tmp_path / "dcp", tmp_path / "back", ConvertOptions())
    assert not (tmp_path / "back").exists()


def test_a_file_of_torch_save_that_would_run_code_is_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({"model": Bomb(canary)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointCorrupt, match="which only unpickling could make"):
        convert(tmp_path / "state.pt", tmp_path / "run", ConvertOptions())
    assert not canary.exists()


def test_an_optimizer_with_numbers_for_names_is_refused_and_its_weights_are_taken(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ArgumentError, match="not their names"):
        convert(tmp_path / "state.pt", tmp_path / "run", ConvertOptions())
    convert(tmp_path / "state.pt", tmp_path / "run", ConvertOptions(weights_only=True))
    other = nn.Linear(2, 2)
    ec.load(tmp_path / "run", model=other)
    check_equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("form", [Form.DCP, Form.TORCH])
def test_weights_only_takes_all_weights_whatever_their_names_and_nothing_else(
    form: Form, tmp_path: Path
) -> None:
    """Also of a model alone whose names begin as that of an optimizer, and beside any optimizer."""
    model = nn.ModuleDict({"optimizer": nn.Linear(2, 2), "optim_head": nn.Linear(2, 1)})
    parameters = torch.optim.AdamW(model.parameters()).state_dict()  # with numbers for names
    weights = model.state_dict()
    states = [dict(weights), {"model": weights, "optimizer": parameters, "epoch": 3}]
    for i, state in enumerate(states):
        source, run = tmp_path / f"{i}", tmp_path / f"run{i}"
        if form is Form.DCP:
            write_dcp(state, source)
        else:
            torch.save(state, source)
        options = ConvertOptions(to=Form.ECHELON, weights_only=True, trust_pickle=True)
        assert convert(source, run, options).left_out == ()
        other = nn.ModuleDict({"optimizer": nn.Linear(2, 2), "optim_head": nn.Linear(2, 1)})
        assert not ec.load(run, model=other).values
        check_equal(other.state_dict(), weights)


def test_a_damaged_step_is_not_converted(saved: tuple[Path, State], tmp_path: Path) -> None:
    folder, _ = saved
    run = tmp_path / "run" / "step-000000007"
    run.mkdir(parents=True)
    for file in (folder / run.name).iterdir():
        data = bytearray(file.read_bytes())
        if file.name == "rank-00001.safetensors":
            data[-1] ^= 1
        (run / file.name).write_bytes(data)
    for target in ("a.safetensors", "a.pt"):
        with pytest.raises(CheckpointCorrupt, match=r"rank-00001\.safetensors"):
            convert(run, tmp_path / target, ConvertOptions())
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "hf", "dcp"])
def test_nothing_that_is_there_is_written_over_and_nothing_is_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is there at the beginning, nor what comes to be there meanwhile."""
    options = ConvertOptions(
        to=Form.DCP if name == "dcp" else None, shard_nbytes=16 if name == "hf" else None
    )
    ec.save(tmp_path / "run", step=0, model=nn.Linear(2, 2))
    target = tmp_path / "to" / name
    target.parent.mkdir()
    target.symlink_to("nowhere")
    with pytest.raises(ArgumentError, match="is there already"):
        convert(tmp_path / "run", target, options)
    target.unlink()
    move = convert_module.move_new

    def late(source: Path, to: Path) -> None:
        to.symlink_to("nowhere")
        move(source, to)

    monkeypatch.setattr(convert_module, "move_new", late)
    for flags in (None, errno.EINVAL):  # also where the system has no such rename
        if flags is not None:
            monkeypatch.setattr(atomic_files, "_renameat2", lambda *_: errno.EINVAL)
        with pytest.raises(CheckpointError, match="is there already"):
            convert(tmp_path / "run", target, options)
        assert [*target.parent.iterdir()] == [target]
        assert target.is_symlink()
        target.unlink()
    monkeypatch.setattr(convert_module, "move_new", move)
    convert(tmp_path / "run", target, options)
    assert [*target.parent.iterdir()] == [target]


def test_one_shard_of_several_is_no_model(tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00006.safetensors"
    save_file({"w": torch.ones(2)}, shard)
    with pytest.raises(CheckpointCorrupt, match="is one of 6 files by its name"):
        convert(tmp_path, tmp_path / "again", ConvertOptions())
    convert(shard, tmp_path / "again", ConvertOptions())  # as the user says


# The command line ------------------------------------------------------------------------------


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_ls_and_verify_show_every_step(saved: tuple[Path, State]) -> None:
    folder, _ = saved
    code, text = invoke("ls", folder)
    assert code == 0
    assert "7" in text
    assert "optimizer, rng" in text
    assert invoke("verify", folder) == (0, "step-000000007: whole\n")


def test_convert_on_the_command_line_takes_its_options(tmp_path: Path) -> None:
    state = {"net": nn.Linear(3, 2), "head": nn.Linear(2, 1)}
    ec.save(tmp_path / "run", step=4, **state)
    code, text = invoke("convert", tmp_path / "run", tmp_path / "a.safetensors")
    assert code == 2
    assert "--section" in text
    code, text = invoke(
        "convert", tmp_path / "run", tmp_path / "a.safetensors", "--section", "head", "--step", 4
    )
    assert (code, text) == (0, f"wrote {tmp_path / 'a.safetensors'}\nleft out: net, rng\n")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        check_equal(file.get_tensor("bias"), state["head"].bias.detach())
    code, text = invoke("convert", tmp_path / "none", tmp_path / "b")
    assert code == 2
