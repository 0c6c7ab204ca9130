"""Saves and loads of the checkpoint benchmark, on its ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint import AGAIN, BARE, DCP, DCP2, DCP_AGAIN, DISK, HASH, OURS, TORCH
from pairs import Variant, alternate
from peers import Peers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import echelon as ec
from echelon.checkpoint import files, saved_step
from echelon.checkpoint.checksum import Checksum

WIDTH = 1024
BLOCK_NBYTES = 12 * WIDTH * WIDTH  # parameters, and two states of AdamW, in float32

Trained = tuple[nn.Module, torch.optim.Optimizer]


def measure_saves(peers: Peers, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure synchronous and asynchronous saves; one step of each kind is kept for loading."""
    rounds, blocks = settings["rounds"], num_blocks(settings)
    found = {}
    if settings["technique"] == "ddp":
        found["hash"] = hashing(peers, rounds)
    ours, theirs = make_ours(peers, settings["technique"], blocks), make_theirs(settings, blocks)
    share_nbytes = blocks * BLOCK_NBYTES // peers.group.size
    saves = _Saves(peers, Path(settings["folder"]), ours, theirs, share_nbytes)
    found["save"] = alternate(peers.group, saves.variants(), rounds).record()
    found["async save"] = warm(peers, saves.blocking(), rounds)
    saves.keep()
    return found


def measure_loads(peers: Peers, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure loads on as many ranks as have saved, and compare the loaded state.

    Separate ranks do this: with both halves in memory, 2 GiB would take more than 20 GiB.
    """
    loads = _Loads(peers, settings)
    found = {"load": warm(peers, loads.variants(), settings["rounds"])}
    loads.compare(make_ours(peers, settings["technique"], num_blocks(settings)))
    return found


def measure_reshard(peers: Peers, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure loads on three ranks of a step that two ranks have saved.

    Only the variant that loads has optimizer states: with both, 2 GiB would take more than 24 GiB.
    """
    loads = _Loads(peers, settings)
    variants = [
        replace(one, prepare=loads.forget) for one in loads.variants() if one.name in (OURS, DCP)
    ]
    return {"reshard 2 to 3": warm(peers, variants, settings["rounds"])}


def num_blocks(settings: dict[str, Any]) -> int:
    """The number of layers for which model and optimizer have the requested size."""
    return max(1, round(settings["gib"] * 2**30 / BLOCK_NBYTES))


def warm(peers: Peers, variants: Sequence[Variant], rounds: int) -> dict[str, Any]:
    """Measure all variants after each has run once, so that files are in the page cache."""
    for one in variants:
        one.prepare()
        one.run()
    return alternate(peers.group, variants, rounds).record()


def hashing(peers: Peers, rounds: int) -> dict[str, Any]:
    """A checksum of one GiB on one core, in pieces as files are written."""
    data = memoryview(bytearray(1 << 28))

    def run() -> None:
        checksum = Checksum()
        for _ in range(4):
            for start in range(0, len(data), 1 << 20):
                checksum.update(data[start : start + (1 << 20)])

    only = frozenset([0])
    return alternate(peers.group, [Variant(HASH, run, only)], rounds).record()


def make_model(blocks: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)))


def step_once(model: nn.Module, rank: int) -> Trained:
    """One step, so that the optimizer has its states."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    generator = torch.Generator().manual_seed(rank)
    model(torch.randn(2, WIDTH, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def make_ours(peers: Peers, technique: str, blocks: int, seed: int = 0) -> Trained:
    model = make_model(blocks, seed)
    if technique == "ddp":
        return step_once(ec.DDP(model, peers.group), peers.rank)
    units = ec.units.by_type(nn.Linear)
    return step_once(ec.FSDP(model, peers.group, units=units), peers.rank)


def make_theirs(settings: dict[str, Any], blocks: int, seed: int = 0) -> Trained:
    model = make_model(blocks, seed)
    if settings["technique"] == "ddp":
        return step_once(nn.parallel.DistributedDataParallel(model), dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return step_once(fully_shard(model, mesh=mesh), dist.get_rank())


@contextmanager
def no_checksums() -> Iterator[None]:
    """Replace checksums by no-ops, to measure reading and writing alone."""

    class Nothing:
        def update(self, data: object) -> None: ...

        def hexdigest(self) -> str:
            return "0" * 16

    def no_comparison(*_: object) -> None: ...

    kept = files.Checksum, saved_step.SavedStep.read, saved_step.SavedStep.verify
    plain_read = saved_step.SavedStep.read
    files.Checksum = Nothing
    saved_step.SavedStep.verify = no_comparison
    saved_step.SavedStep.read = lambda self, tensor, start, values, check=None: plain_read(
        self, tensor, start, values
    )
    try:
        yield
    finally:
        files.Checksum, saved_step.SavedStep.read, saved_step.SavedStep.verify = kept


class _Saves:
    """One state, saved in every way."""

    def __init__(
        self, peers: Peers, place: Path, ours: Trained, theirs: Trained, share_nbytes: int
    ) -> None:
        self._peers, self._place, self._ours, self._theirs = peers, place, ours, theirs
        self._share_nbytes, self._piece = share_nbytes, memoryview(os.urandom(1 << 20))
        self._numbers = count()
        self._waiting: list[Callable[[], object]] = []

    def variants(self) -> list[Variant]:
        """Saves that return when everything is on the disk."""
        return [
            self._variant(OURS, self._save),
            self._variant(BARE, self._save_bare),
            self._variant(DCP, lambda path: self._dcp(path, 1)),
            self._variant(DCP2, lambda path: self._dcp(path, 2)),
            self._variant(TORCH, self._torch),
            self._variant(DISK, self._disk),
        ]

    def blocking(self) -> list[Variant]:
        """Asynchronous saves: only the time for which training is blocked counts."""
        return [
            self._variant(OURS, self._async_save),
            self._variant("echelon, whole", self._save),
            self._variant(DCP, self._async_dcp),
        ]

    def _variant(self, name: str, save: Callable[[Path], None]) -> Variant:
        """``save`` into a new folder, on a disk that has nothing else to do."""
        return Variant(
            name,
            lambda: save(self._place / f"save-{next(self._numbers)}"),
            prepare=self._clear,
        )

    def _clear(self) -> None:
        while self._waiting:
            self._waiting.pop()()
        self._peers.group.barrier()
        if self._peers.rank == 0:
            for path in self._place.iterdir():
                shutil.rmtree(path)
            os.sync()
        self._peers.group.barrier()

    def _async_save(self, path: Path) -> None:
        model, optimizer = self._ours
        self._waiting.append(ec.async_save(path, step=0, model=model, optimizer=optimizer).wait)

    def _async_dcp(self, path: Path) -> None:
        state = dict(zip(("model", "optimizer"), get_state_dict(*self._theirs), strict=True))
        writer = dcp.FileSystemWriter(path, thread_count=1)
        self._waiting.append(dcp.async_save(state, storage_writer=writer).result)

    def _save(self, path: Path) -> None:
        model, optimizer = self._ours
        ec.save(path, step=0, model=model, optimizer=optimizer)

    def _save_bare(self, path: Path) -> None:
        with no_checksums():
            self._save(path)

    def _dcp(self, path: Path, threads: int) -> None:
        state = dict(zip(("model", "optimizer"), get_state_dict(*self._theirs), strict=True))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=threads))

    def _disk(self, path: Path) -> None:
        """A lower bound of a save: write as many bytes from a piece that is in the cache."""
        path.mkdir(exist_ok=True)
        with no_checksums(), files.NewFile(path / f"{self._peers.rank}.bytes") as file:
            for start in range(0, self._share_nbytes, len(self._piece)):
                file.write(self._piece[: self._share_nbytes - start])

    def _torch(self, path: Path) -> None:
        """Save by hand: each rank its shards, or rank 0 alone where ranks are replicas."""
        model, optimizer = self._ours
        replicated = isinstance(model, ec.DDP)
        if not replicated or self._peers.rank == 0:
            path.mkdir(exist_ok=True)
            state = model.state_dict() if replicated else model.sharded_state_dict()
            with open(path / f"{self._peers.rank}.pt", "wb") as file:
                torch.save([state, optimizer.state_dict()], file)
                file.flush()
                os.fsync(file.fileno())
        self._peers.group.barrier()

    def keep(self) -> None:
        """Keep one step of each kind for loading, and remove all others."""
        self._clear()
        self._save(self._place / "ours")
        self._dcp(self._place / "dcp", 1)
        self._torch(self._place / "torch")


class _Loads:
    """Loads into new models."""

    def __init__(self, peers: Peers, settings: dict[str, Any]) -> None:
        self._place, self._technique = Path(settings["folder"]), settings["technique"]
        blocks = num_blocks(settings)
        self._ours = make_ours(peers, self._technique, blocks, seed=1)
        self._theirs = make_theirs(settings, blocks, seed=1)

    def variants(self) -> list[Variant]:
        found = [
            Variant(OURS, self._load),
            Variant(BARE, self._bare),
            Variant(AGAIN, self._load_again),
            Variant(DCP, self._dcp),
            Variant(DCP_AGAIN, self._dcp_again),
        ]
        if self._technique == "ddp":
            found.append(Variant(TORCH, self._torch))
        return found

    def forget(self) -> None:
        """Drop the states of both optimizers."""
        for _, optimizer in (self._ours, self._theirs):
            optimizer.state.clear()

    def _load(self) -> None:
        self._ours[1].state.clear()  # as of a script that has just started
        self._load_again()

    def _load_again(self) -> None:
        model, optimizer = self._ours
        ec.load(self._place / "ours", model=model, optimizer=optimizer)

    def _bare(self) -> None:
        with no_checksums():
            self._load()

    def _dcp(self) -> None:
        self._theirs[1].state.clear()
        self._dcp_again()

    def _dcp_again(self) -> None:
        model, optimizer = self._theirs
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=self._place / "dcp")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _torch(self) -> None:
        model, optimizer = self._ours
        with suppress(FileNotFoundError):
            state, states = torch.load(self._place / "torch" / "0.pt", weights_only=True)
            model.load_state_dict(state)
            optimizer.load_state_dict(states)

    def compare(self, saved: Trained) -> None:
        """Fail unless the loaded bits are the saved ones."""
        self._load()
        for mine, theirs in zip(self._ours[0].parameters(), saved[0].parameters(), strict=True):
            assert torch.equal(mine.data, theirs.data)
            for key, value in saved[1].state[theirs].items():
                assert torch.equal(self._ours[1].state[mine][key], value), key
