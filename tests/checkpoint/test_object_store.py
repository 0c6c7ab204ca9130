"""Steps in an object store: there when their manifest is, which is written last."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import echelon as ec
from echelon.checkpoint import object_store
from echelon.checkpoint.store_path import StorePath
from echelon.cli import app
from echelon.comm.world import World
from echelon.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from echelon.process import time_limits
from tests.checkpoint.manifests import sealed
from tests.checkpoint.stores import Killed, killed_at, objects, store

__all__ = ["store"]  # a fixture


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def file_in(folder: str, rank: int = 0) -> str:
    """The path of the file of a rank in a step, whose name has a nonce."""
    (path,) = fsspec.filesystem("memory").glob(f"{folder}/rank-{rank:05d}-*.safetensors")
    return f"memory://{path.lstrip('/')}"


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def trained(world: World, folder: str, steps: int) -> list[Tensor]:
    """Weights after some steps, each of which is saved and then loaded by a new model."""
    for step in range(1, steps + 1):
        model = ec.FSDP(model_of(0), world.group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if step > 1:
            assert ec.load(folder, **parts).step == step - 1
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        save = ec.async_save if step % 2 else ec.save
        saved = save(folder, step=step, keep=2, **parts)
        if isinstance(saved, ec.AsyncSave):
            saved.wait()
    with model.full_parameters():
        return weights(model)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_training_continues_from_a_store_as_it_does_from_a_disk(
    store: str, tmp_path: Path, ranks: int
) -> None:
    stored = ec.run(trained, ranks, args=(store, 4))
    on_disk = ec.run(trained, ranks, args=(str(tmp_path / "run"), 4))
    for rank, kept in zip(stored, on_disk, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rank, kept, strict=True))
    assert ec.steps(store) == [3, 4]


def loads(world: World, folder: str) -> list[Tensor]:
    model = ec.DDP(model_of(1), world.group)
    ec.load(folder, model=model)
    return weights(model)


def saves_sharded(world: World, folder: str) -> list[Tensor]:
    model = ec.FSDP(model_of(3), world.group)
    ec.save(folder, step=3, model=model)
    with model.full_parameters():
        return weights(model)


@pytest.mark.parametrize(("there", "here"), [(1, 3), (3, 2)])
def test_another_technique_on_another_number_of_ranks_loads_it(
    store: str, there: int, here: int
) -> None:
    saved = ec.run(saves_sharded, there, args=(store,))[0]
    for loaded in ec.run(loads, here, args=(f"{store}/",)):
        assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


def test_the_objects_of_a_step_are_the_files_of_a_folder(store: str, tmp_path: Path) -> None:
    model = model_of(0)
    path = ec.save(store, step=2, model=model, rng=False)
    assert isinstance(path, StorePath)
    assert str(path) == f"{store}/step-000000002"
    for name, data in objects(store).items():  # as a tool would that copies a bucket to a disk
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(data)
    other = model_of(1)
    assert ec.load(tmp_path, model=other).step == 2
    assert torch.equal(other[0].weight, model[0].weight)
    assert ec.load(path, model=other).path == path


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_is_killed_leaves_the_steps_before_it_and_all_or_nothing_of_its_own(
    store: str, after: bool
) -> None:
    model, calls = model_of(0), 0
    while True:
        run = f"{store}/{after}{calls}"
        ec.save(run, step=1, model=model_of(1))
        with killed_at(calls, after=after) as counts:
            try:
                ec.save(run, step=2, model=model, keep=2)
                break
            except Killed:
                pass
        steps = ec.steps(run)
        assert steps in ([1], [1, 2])
        loaded = model_of(5)
        ec.load(run, model=loaded)
        expected = model_of(1) if steps == [1] else model
        assert torch.equal(loaded[0].weight, expected[0].weight)
        if steps == [1]:
            ec.save(run, step=2, model=model)
        ec.load(run, model=loaded, step=2)
        assert len(objects(run)) == 4  # nothing of the killed save is left
        calls += 1
    assert calls == counts[0] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_while_older_steps_are_removed_leaves_no_damaged_step(
    store: str, after: bool
) -> None:
    calls = 0
    while True:
        run = f"{store}/{after}{calls}"
        for step in (1, 2):
            ec.save(run, step=step, model=model_of(step), rng=False)
        with killed_at(calls, after=after):
            try:
                ec.save(run, step=4, model=model_of(4), keep=1, rng=False)
                break
            except Killed:
                pass
        for step in ec.steps(run):
            loaded = model_of(0)
            ec.load(run, model=loaded, step=step)
            assert torch.equal(loaded[0].weight, model_of(step)[0].weight)
        calls += 1
    assert ec.steps(run) == [4]
    assert len(objects(run)) == 2


def test_files_that_we_have_not_written_stay(store: str) -> None:
    system = fsspec.filesystem("memory")
    mine = [f"{store}/notes.txt", f"{store}/step-000000001/notes.txt", f"{store}/other/x"]
    for path in mine:
        system.pipe_file(path, b"mine")
    system.pipe_file(f"{store}/step-000000001/rank-00000.safetensors", b"of a killed save")
    assert ec.steps(store) == []
    ec.save(store, step=2, model=model_of(0))
    there = objects(store)
    assert {name for name, data in there.items() if data == b"mine"} == {
        path.removeprefix(f"{store}/") for path in mine
    }
    assert "step-000000001/rank-00000.safetensors" not in there


def test_a_flipped_bit_anywhere_is_refused_and_names_its_file(store: str) -> None:
    ec.save(store, step=1, model=model_of(0))
    system = fsspec.filesystem("memory")
    for name, data in objects(store).items():
        for at in {0, len(data) // 2, len(data) - 1}:
            system.pipe_file(f"{store}/{name}", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            model = model_of(1)
            with pytest.raises(CheckpointCorrupt, match=name):
                ec.load(store, model=model)
            assert torch.equal(model[0].weight, model_of(1)[0].weight)
        system.pipe_file(f"{store}/{name}", data)
    ec.load(store, model=model)


def test_a_missing_truncated_or_additional_file_is_refused(store: str) -> None:
    ec.save(store, step=1, model=model_of(0))
    system, folder = fsspec.filesystem("memory"), f"{store}/step-000000001"
    path, manifest = file_in(folder), f"{folder}/manifest.json"
    data, text = system.cat_file(path), system.cat_file(manifest)
    system.pipe_file(path, data[:-1])
    with pytest.raises(CheckpointCorrupt, match=f"has {len(data) - 1} bytes instead of"):
        ec.load(store, model=model_of(1))
    system.rm_file(path)
    with pytest.raises(
        CheckpointCorrupt, match=r"-[0-9a-f]{16}\.safetensors: the file is not there"
    ):
        ec.load(store, model=model_of(1))
    system.pipe_file(path, data)
    system.pipe_file(f"{folder}/more.safetensors", data)
    with pytest.raises(CheckpointCorrupt, match="the checkpoint has no such file"):
        ec.load(store, model=model_of(1))
    system.rm_file(manifest)
    with pytest.raises(CheckpointNotFound, match="no step was committed here"):
        ec.load(store, model=model_of(1))
    system.pipe_file(manifest, text)


def test_a_damaged_step_is_replaced_and_a_whole_one_is_not(store: str) -> None:
    ec.save(store, step=1, model=model_of(0))
    with pytest.raises(CheckpointError, match="was saved already, and what is committed is never"):
        ec.save(store, step=1, model=model_of(1))
    path = file_in(f"{store}/step-000000001")
    system = fsspec.filesystem("memory")
    system.pipe_file(path, system.cat_file(path)[:-1] + b"?")
    ec.save(store, step=1, model=model_of(1))
    loaded = model_of(2)
    ec.load(store, model=loaded)
    assert torch.equal(loaded[0].weight, model_of(1)[0].weight)


def test_nothing_is_saved_into_a_step(store: str) -> None:
    path = ec.save(store, step=1, model=model_of(0))
    for inside in (path, path / "later" / "run"):
        with pytest.raises(CheckpointError, match="this is a step that was saved"):
            ec.save(inside, step=2, model=model_of(0))


def test_two_jobs_that_save_the_same_step_commit_it_once(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job commits after this one has looked for its manifest."""
    create = StorePath.create
    rival = model_of(9)

    def late(self: StorePath, data: bytes) -> None:
        monkeypatch.setattr(StorePath, "create", create)
        ec.save(store, step=1, model=rival, rng=False)
        create(self, data)

    monkeypatch.setattr(StorePath, "create", late)
    with pytest.raises(CheckpointError, match="could not be committed"):
        ec.save(store, step=1, model=model_of(0), rng=False, beside=1)
    loaded = model_of(1)
    assert "beside" not in ec.load(store, model=loaded).values
    assert torch.equal(loaded[0].weight, rival[0].weight)


def test_a_commit_whose_answer_is_lost_is_a_commit(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = StorePath.create

    def twice(self: StorePath, data: bytes) -> None:
        create(self, data)
        create(self, data)  # as a client does that tries again

    monkeypatch.setattr(StorePath, "create", twice)
    ec.save(store, step=1, model=model_of(0))
    assert ec.load(store, model=model_of(1)).step == 1


def test_a_newer_version_is_neither_replaced_nor_removed(store: str) -> None:
    path = ec.save(store, step=1, model=model_of(0))
    newer = sealed(b'"schema":4,"parts":{}}')
    fsspec.filesystem("memory").pipe_file(f"{path}/manifest.json", newer)
    with pytest.raises(ec.CheckpointTooNew):
        ec.save(store, step=1, model=model_of(0))
    ec.save(store, step=2, model=model_of(0), keep=1)
    assert ec.steps(store) == [1, 2]


def fails_on_one(world: World, folder: str, rank: int) -> str:
    model = ec.DDP(model_of(0), world.group)
    with pytest.raises(CheckpointError) as info:
        ec.save(folder, step=1, model=model)
    assert info.value.rank == rank
    return str(info.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_committed(
    store: str, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    real = StorePath.call

    def call(self: StorePath, operation: Any, *expected: Any) -> Any:
        if self.name.startswith(f"rank-0000{rank}-"):
            operation = refuse
        return real(self, operation, *expected)

    def refuse(*_: object) -> None:
        raise RuntimeError("Access Denied by the store")  # not every client raises an OSError

    monkeypatch.setattr(StorePath, "call", call)
    messages = ec.run(fails_on_one, 2, args=(store, rank))
    assert messages[0] == messages[1]
    assert f"rank {rank}: {store}/step-000000001/rank-0000{rank}-" in messages[0]
    assert "RuntimeError: Access Denied by the store" in messages[0]
    monkeypatch.undo()
    assert objects(store) == {}


def test_a_store_that_does_not_answer_is_an_error_on_all_ranks_in_bounded_time(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "STORE_CALL_S", 0.2)
    silent = threading.Event()

    class Silent:
        def open(self, *_: object, **__: object) -> None:
            silent.wait(60)

        def ls(self, *_: object, **__: object) -> list[object]:
            return []

    monkeypatch.setattr(fsspec, "url_to_fs", lambda url, **_: (Silent(), url))
    try:
        for message in ec.run(fails_on_one, 2, args=(store, 0)):
            assert "the store has not answered for 0.2 s" in message
    finally:
        silent.set()


def test_large_files_are_read_in_blocks(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_BLOCK_NBYTES", 64)
    model = nn.Linear(100, 3)
    ec.save(store, step=1, model=model)
    loaded = nn.Linear(100, 3)
    ec.load(store, model=loaded)
    assert torch.equal(loaded.weight, model.weight)


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_commands_read_stores(store: str, tmp_path: Path) -> None:
    for step in (1, 2):
        path = ec.save(f"{store}/a", step=step, model=model_of(step), rng=False)
    assert command("ls", f"{store}/a")[0] == 0
    assert command("verify", f"{store}/a") == (0, "step-000000001: whole\nstep-000000002: whole\n")
    assert command("diff", path, f"{store}/a") == (0, "the same\n")
    assert command("diff", path, f"{store}/a/step-000000001")[0] == 1
    code, output = command("convert", f"{store}/a", tmp_path / "model.safetensors")
    assert code == 0, output
    code, output = command("convert", f"{store}/a", f"{store}/b")
    assert code == 0, output
    assert command("diff", f"{store}/b", f"{store}/a") == (0, "the same\n")
    code, output = command("convert", f"{store}/a", f"{store}/c", "--to", "dcp")
    assert (code, "only echelon's own format" in output) == (2, True)
    code, output = command("verify", f"{store}/nothing")
    assert (code, "no step was committed here" in output) == (2, True)
    name = file_in(f"{store}/a/step-000000001")
    system = fsspec.filesystem("memory")
    system.pipe_file(name, system.cat_file(name)[:-1] + b"?")
    code, output = command("verify", f"{store}/a")
    assert code == 1
    assert "step-000000001: damaged" in output
    assert "step-000000002: whole" in output
