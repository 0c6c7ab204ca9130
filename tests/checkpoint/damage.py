"""Ways in which a step can be damaged, and what every rank must say of each."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import echelon as ec
from echelon.checkpoint.format import Manifest
from echelon.checkpoint.records import MANIFEST
from echelon.comm.world import World
from echelon.errors import CheckpointCorrupt
from echelon.values.value_types import DTYPES
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.whole import State, check_equal, whole_state

__all__ = ["Damage", "check_damages", "cut", "empty", "extra", "flip", "missing", "save_steps"]
__all__ += ["NEW", "OLD", "swap", "tensor_at"]

OLD, NEW = 4, 7  # the steps that are saved; the new one is damaged
Files = Sequence[str]


@dataclass(frozen=True)
class Damage:
    """Something that happens to the folder of a run.

    Attributes:
        name: of it.
        act: does it.
        file: of the new step, that the error must name; None: any of them.
        tensor: that the error must name; None: none, or any.
    """

    name: str
    act: Callable[[Path], object]
    file: str | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        return self.name


def new(root: Path) -> Path:
    return root / f"step-{NEW:09}"


def old(root: Path) -> Path:
    return root / f"step-{OLD:09}"


def flip(file: str, bit: int, tensor: str | None = None) -> Damage:
    """One bit of a file."""

    def act(root: Path) -> None:
        with (new(root) / file).open("r+b") as found:
            found.seek(bit // 8)
            (byte,) = found.read(1)
            found.seek(bit // 8)
            found.write(bytes([byte ^ 1 << bit % 8]))

    return Damage(f"bit {bit} of {file} flipped", act, file, tensor)


def cut(file: str, nbytes: int) -> Damage:
    """Only the first bytes are left."""
    return Damage(
        f"{file} cut to {nbytes}",
        lambda root: (new(root) / file).open("r+b").truncate(nbytes),
        file,
    )


def empty(file: str) -> Damage:
    return cut(file, 0)


def missing(file: str) -> Damage:
    return Damage(f"no {file}", lambda root: (new(root) / file).unlink(), file)


def extra(file: str) -> Damage:
    return Damage(f"{file} as well", lambda root: (new(root) / file).write_bytes(b"?"), file)


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def swap(file: str, other: str | None = None) -> Damage:
    """Two files of the step exchanged, or one with that of the old step."""
    if other is not None:
        between = "two files exchanged"
        return Damage(between, lambda root: exchange(new(root) / file, new(root) / other))
    return Damage(
        f"{file} exchanged with that of the old step",
        lambda root: exchange(new(root) / file, old(root) / file),
    )


def tensor_at(folder: Path, file: str, byte: int) -> str | None:
    """The tensor that a byte belongs to; None for those of headers and of the manifest."""
    manifest = Manifest.parse((folder / MANIFEST).read_bytes(), folder)
    for tensor in manifest.tensors.values():
        for piece in tensor.pieces:
            nbytes = piece.numel * DTYPES[tensor.dtype].itemsize
            if (
                manifest.files[piece.file].name == file
                and piece.offset <= byte < piece.offset + nbytes
            ):
                return tensor.name
    return None


def save_steps(world: World, layout: str, folder: Path) -> dict[int, State]:
    """Save an old and a new step; the states."""
    trainee = LAYOUTS[layout].trainee(world)
    found = {}
    for step in (OLD, NEW):
        trainee.train(step)
        ec.save(folder, step=step, model=trainee.model, optimizer=trainee.optimizer)
        found[step] = copy.deepcopy(whole_state(trainee))
    return found


def load_damaged(
    world: World,
    layout: str,
    folder: Path,
    damages: Sequence[Damage],
    expected: State,
    every: int,
) -> list[CheckpointCorrupt]:
    """What every damage raises; then nothing has changed, and the step before can be loaded."""
    raised = []
    for i, damage in enumerate(damages):
        root = folder / str(i)
        if world.rank == 0:
            shutil.copytree(folder / "whole", root)
            damage.act(root)
        world.group.barrier()
        trainee = LAYOUTS[layout].trainee(world, seed=1)
        if i % 2:  # of an optimizer that has states, and of one that has none
            trainee.train(0)
        before = copy.deepcopy(whole_state(trainee))
        given = {"model": trainee.model, "optimizer": trainee.optimizer}
        with pytest.raises(CheckpointCorrupt) as info:
            ec.load(root, **given)
        raised.append(info.value)
        check_equal(whole_state(trainee), before)
        if i % every == 0 and "old step" not in damage.name:
            loaded = ec.load(root, fallback=True, **given)
            assert (loaded.step, list(loaded.skipped)) == (OLD, [NEW])
            assert loaded.skipped[NEW] == str(info.value)
            check_equal(whole_state(trainee), expected)
    return raised


def check_damages(
    layout: str, folder: Path, damages: Callable[[Path], Sequence[Damage]], *, every: int = 1
) -> None:
    """Have each damage happen to a run of its own, and check what is promised.

    Args:
        damages: of a run that is whole.
        every: of how many damages one is followed by a load of the step before.
    """
    ranks = LAYOUTS[layout].ranks
    states = ec.run(save_steps, ranks, args=(layout, folder / "whole"))[0]
    chosen = damages(new(folder / "whole"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_rank = ec.run(load_damaged, ranks, args=(layout, folder, chosen, states[OLD], every))
    texts = [str(one.message) for one in caught]
    for i, damage in enumerate(chosen):
        for raised in by_rank:
            error = raised[i]
            assert (error.rank is None) == (ranks == 1), damage
            named = Path(error.path)
            assert new(folder / str(i)) in (named, *named.parents), (damage, error)
            if damage.file is not None:
                assert named.name == damage.file, (damage, error)
            assert damage.tensor in (None, error.tensor), (damage, error)
            assert str(error) == str(by_rank[0][i]), damage
            if i % every == 0 and "old step" not in damage.name:
                warned = f"a damaged checkpoint was passed over: {error}"
                assert texts.count(warned) == ranks, damage
