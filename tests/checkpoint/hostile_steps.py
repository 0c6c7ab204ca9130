"""Checkpoints that somebody has made to do harm: each from a good one, by one change."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

import echelon as ec
from tests.bomb import Bomb
from tests.checkpoint.manifests import edited

__all__ = ["CANARY", "Targets", "attacks", "save_good"]

MANIFEST, FILE = "manifest.json", "rank-00000.safetensors"
CANARY = "canary"  # a file that comes to be if anything is executed
Attack = Callable[[Path], object]  # of the folder of the step


class Counted(nn.Module):
    """A module with further state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.count: Any = 3

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Targets:
    """What is saved and loaded: of each kind of section one, and tensors in all of them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(Counted(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 + seed)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3 + seed)
        self.model[1](self.model[0].layer(torch.randn(4, 8))).sum().backward()
        self.optimizer.step()

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of ``save`` and ``load``."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def state(self) -> list[Any]:
        """All that a load may change, but the random generators."""
        return [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]


def save_good(root: Path) -> Path:
    """A checkpoint with nothing wrong in it."""
    table = {"rows": torch.arange(4096.0), "more": [torch.ones(3), (1, 2.5, float("inf"))]}
    return ec.save(root, step=1, **Targets(0).given, table=table, epoch=3)


def attacks(canary: Path) -> Iterator[tuple[str, Attack]]:
    """All of them, with a name for each."""
    yield from _code(canary)
    yield from _no_files()
    yield from ((name, _edit(change)) for name, change in _manifests())
    yield from ((name, _edit(change)) for name, change in _sections())
    yield from ((f"rng {name}", _edit(change)) for name, change in _generators())


def _code(canary: Path) -> Iterator[tuple[str, Attack]]:
    pickled = pickle.dumps(Bomb(canary))
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(2), "evil": Bomb(canary)}, buffer)

    def overwrite(file: str, data: bytes) -> Attack:
        return lambda step: (step / file).write_bytes(data)

    def padded(step: Path) -> None:
        size = (step / FILE).stat().st_size
        (step / FILE).write_bytes(pickled + bytes(size - len(pickled)))

    for what, data in (("a pickle", pickled), ("a file of torch.save", buffer.getvalue())):
        yield f"{what} as manifest", overwrite(MANIFEST, data)
        yield f"{what} as data", overwrite(FILE, data)
    yield "a pickle of the right size as data", padded
    yield "a pickle beside the files", overwrite("data.pkl", pickled)


def _no_files() -> Iterator[tuple[str, Attack]]:
    def link(file: str) -> Attack:
        def act(step: Path) -> None:
            aside = step.parent / "aside"
            (step / file).rename(aside)
            (step / file).symlink_to(aside)

        return act

    def instead(file: str, make: Callable[[Path], object]) -> Attack:
        def act(step: Path) -> None:
            (step / file).unlink()
            make(step / file)

        return act

    def bind(path: Path) -> None:
        # The name of a socket is short.
        with closing(socket.socket(socket.AF_UNIX)) as made:
            here = Path.cwd()
            os.chdir(path.parent)
            try:
                made.bind(path.name)
            finally:
                os.chdir(here)

    def linked_step(step: Path) -> None:
        step.rename(step.with_name("aside"))
        step.symlink_to("aside")

    def large(step: Path) -> None:
        os.truncate(step / MANIFEST, 1 << 40)  # it takes no room on the disk

    for file in (MANIFEST, FILE):
        yield f"a link as {file}", link(file)
        yield f"a link to a device as {file}", instead(file, lambda p: p.symlink_to("/dev/zero"))
        yield f"a pipe as {file}", instead(file, os.mkfifo)
        yield f"a socket as {file}", instead(file, bind)
        yield f"a folder as {file}", instead(file, lambda path: path.mkdir())
    yield "a link as step", linked_step
    yield "a terabyte of manifest", large
    yield "a folder inside", lambda step: (step / "more").mkdir()
    yield "no files at all", lambda step: (shutil.rmtree(step), step.mkdir())


def _edit(change: Callable[[Any], object]) -> Attack:
    def act(step: Path) -> None:
        path = step / MANIFEST
        path.write_bytes(edited(path.read_bytes(), lambda found: change(found)))

    return act


Change = tuple[str, Callable[[Any], object]]


def _manifests() -> Iterator[Change]:
    def tensor(found: Any) -> Any:
        return found["tensors"]["table/rows"]

    def shape(dims: list[int]) -> Callable[[Any], None]:
        return lambda found: tensor(found).update(shape=dims)

    def huge(nbytes: int) -> Callable[[Any], None]:
        """A manifest that is right in itself, with one tensor that its file does not have."""

        def change(found: Any) -> None:
            file, one = found["files"][0], tensor(found)
            piece = [0, 0, nbytes // 4, file["nbytes"], "0" * 16]
            found["tensors"]["table/rows"] = {**one, "shape": [nbytes // 4], "pieces": [piece]}
            found["tensors"]["unused"] = one
            file["nbytes"] += nbytes

        return change

    def overlap(found: Any) -> None:
        first, second = list(found["tensors"].values())[:2]
        second["pieces"][0][3] = first["pieces"][0][3]

    for name in ("../x.safetensors", "/etc/passwd", f"./{FILE}", f"{FILE}/../{FILE}", "a\0b", ""):
        yield f"file {name!r}", lambda found, name=name: found["files"][0].update(name=name)
    yield "a file of 1e18 bytes", lambda found: found["files"][0].update(nbytes=10**18)
    yield "a tensor of a terabyte", huge(1 << 40)
    yield "a tensor of 2**58 bytes", huge(1 << 58)
    yield "a shape of 1e18", shape([10**18])
    yield "a shape of 2**63", shape([2**63])
    yield "negative dims", shape([-64, -64])
    yield "a shape of 1e5 dims", shape([1] * 100_000)
    yield "a shape that is none", lambda found: tensor(found).update(shape=None)
    yield "overlapping pieces", overlap
    yield (
        "a piece that is there twice",
        lambda found: tensor(found)["pieces"].append(tensor(found)["pieces"][0]),
    )
    yield "no pieces", lambda found: tensor(found).update(pieces=[])
    yield "a piece outside", lambda found: tensor(found)["pieces"][0].__setitem__(0, 7)
    yield "an unknown dtype", lambda found: tensor(found).update(dtype="OBJECT")
    for schema in (0, 4, 10**6, "1", True, None, [1], 1.0):
        yield f"schema {schema!r}", lambda found, schema=schema: found.update(schema=schema)
    yield "no schema", lambda found: found.pop("schema")
    yield "another step", lambda found: found.update(step=2)
    yield "another size of the world", lambda found: found["world"].update(size=10**9)
    yield "no size of the world", lambda found: found["world"].pop("size")
    yield "a member too many", lambda found: found.update(code="import os")
    yield "no manifest but a list", lambda found: (found.clear(), found.update(a=[]))


def _section(name: str, **changes: Any) -> Callable[[Any], None]:
    return lambda found: found["sections"][name].update(changes)


def _state(key: str, entry: Any) -> Callable[[Any], None]:
    """Another entry of the state of a parameter."""

    def change(found: Any) -> None:
        values = found["sections"]["optimizer"]["state"]["values"]
        next(iter(values.values()))[key] = entry

    return change


def _greedy(found: Any) -> None:
    """A tensor that is to be loaded as many states."""
    tied = found["tensors"]["table/rows"]
    param, own = next(iter(found["sections"]["optimizer"]["state"]["values"].items()))
    for i in range(2000):
        own[f"s{i}"] = {"$whole": "F32"}
        tied["ties"].append(f"optimizer/{param}/s{i}")


def _sections() -> Iterator[Change]:
    for name in ("model", "optimizer", "scheduler", "table", "rng"):
        for wrong in (None, [], 3, "text", {}, {"kind": "code"}, {"kind": ["module"]}):
            yield (
                f"section {name} {wrong}",
                lambda found, name=name, wrong=wrong: found["sections"].update({name: wrong}),
            )
        yield (
            f"no section {name}" if name not in ("table", "rng") else f"{name} of a module",
            (
                (lambda found, name=name: found["sections"].pop(name))
                if name not in ("table", "rng")
                else _section(name, kind="module", extras=[])
            ),
        )
    yield "extras of none", _section("model", extras={"model/0._extra_state": {}})
    yield (
        "extras by too many ranks",
        _section("model", extras={"model/0._extra_state": {"by_rank": [{}, {}]}}),
    )
    yield from _optimizers()
    yield from _values()


def _optimizers() -> Iterator[Change]:
    for wrong in (None, {}, [3], [{}], [{"options": [], "params": []}]):
        yield f"groups {wrong}", _section("optimizer", groups=wrong)
    yield "params that are none", _section("optimizer", groups=[{"options": {}, "params": [1, 2]}])
    yield "no such params", _section("optimizer", groups=[{"options": {}, "params": ["x", "y"]}])
    for wrong in (None, [], {"values": [], "by_rank": {}}, {"values": {}, "by_rank": {"a": [1]}}):
        yield f"state {wrong}", _section("optimizer", state=wrong)
    for entry in (
        {"$like": "F99"},
        {"$like": 3},
        {"$whole": None},
        {"$number": ["F32"]},
        {"$number": ["F32", "a text"]},
        {"$number": ["F32", [1, 2]]},
        {"$number": ["I8", 10**15]},
        {"$number": ["F32", {"$code": "1"}]},
        {"$numbers": [{"$tensor": "0"}]},
        {"$numbers": [{"$tensor": "0"}, {}]},
        {"$numbers": [{"$tensor": "0"}, {"0": ["F99", 1]}]},
        {"$numbers": [{"$tensor": "0"}, {"0": ["F32", "a text"]}]},
        {"$numbers": [[1], ["F32"]]},
        {"$code": "1"},
        {"$tensor": "rows"},
    ):
        yield f"entry {entry}", _state("exp_avg", entry)
    yield "a step that is none", _state("step", "soon")
    yield "one tensor as 2000 states", _greedy


def _values() -> Iterator[Change]:
    for value in (
        {"$code": "import os"},
        {"$tensor": "not there"},
        {"$tensor": ["rows"]},
        {"$tensor": "../table/rows"},
        {"$ndarray": "not there"},
        {"$int": "0x" + "f" * 10**6},
        {"$set": [[1], {}]},
        {"$range": [0, 10**18, 0]},
        {"$deque": [[], 10**19]},
        {"$size": [-1]},
        {"a": 1, "$tuple": []},
    ):
        yield f"value {str(value)[:40]}", _section("table", value=value)
    yield "values of too many ranks", _section("table", by_rank=[1, 2, 3])


def _generators() -> Iterator[Change]:
    def put(key: str, value: Any) -> Callable[[Any], None]:
        return lambda found: found["sections"]["rng"]["value"].update({key: value})

    def item(key: str, i: int, value: Any) -> Callable[[Any], None]:
        return lambda found: found["sections"]["rng"]["value"][key].__setitem__(i, value)

    for key in ("python", "numpy", "torch"):
        for wrong in (None, 3, "text", [], {}, [1, 2, 3], {"$tensor": "none"}):
            yield f"{key} {wrong}", put(key, wrong)
        yield f"no {key}", lambda found, key=key: found["sections"]["rng"]["value"].pop(key)
    yield "version", item("python", 0, 99)
    yield "keys of another generator", item("python", 1, {"$tensor": "numpy/1"})
    yield "gauss", item("python", 2, "drawn")
    yield "kind", item("numpy", 0, "PCG64")
    yield "torch's state as keys", item("numpy", 1, {"$tensor": "torch"})
    for position in (-1, 625, 10**6, 2**62, 1.5, "1", None, True):
        yield f"position {position}", item("numpy", 2, position)
    yield "has_gauss", item("numpy", 3, 10**9)
    yield "cached", item("numpy", 4, "drawn")
    yield "keys as torch's state", put("torch", {"$tensor": "numpy/1"})
