"""Rank 0 of N ranks of which the others are not there: torch's ``fake`` engine below our own group.

The calls, copies, bytes and Python of this rank are those of a job of N ranks; the values are not.
So a test counts what a step takes on 4,096 ranks, in one process and without a network::

    python -m tests.rank_zero --ranks 8 64 1024 --layout rows       # processor time of a unit
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
import torch.testing._internal.distributed.fake_pg  # registers the engine
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import echelon as ec
from echelon.comm.torch_dist.engines import Engine, NativeEngine
from echelon.comm.torch_dist.group import GroupSpec
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.native import NativeGroup
from echelon.diagnosis.rank_monitor import RankMonitor

NUM_PARAMS = 9  # of a block
_OPS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
UNEVEN = (37, 3, 11)  # no multiple of anything that ranks are a multiple of


@dataclass
class EngineCalls:
    """What the engines of a job were asked for.

    Attributes:
        counts: the number of calls by name.
        nbytes: the bytes of the longer buffer of the calls, by name.
        parts: the bytes of each rank's part of a call with equal parts.
        ops: the number of reductions by operation.
        seconds: processor time in the engine, which copies all parts and would not on a device.
        num_engines: the number of communicators that were made.
    """

    counts: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    parts: list[int] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    num_engines: int = 0

    def clear(self) -> None:
        self.counts.clear()
        self.nbytes.clear()
        self.ops.clear()
        self.parts.clear()

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def fake_engine(rank: int, size: int) -> Any:
    """An engine of torch for tests, whose calls take this rank's values for those of all."""
    make: Any = vars(c10d)["FakeProcessGroup"]  # torch's annotations lack its options
    return make._create_internal(rank, size, make.Options())


class CountingEngine:
    """The ``fake`` engine, which counts its calls."""

    def __init__(self, rank: int, size: int, calls: EngineCalls) -> None:
        self._group, self._calls = fake_engine(rank, size), calls
        calls.num_engines += 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._group, name)

        def counted(*args: Any) -> Any:
            tensors = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
            nbytes = [tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)]
            self._calls.counts[name] += 1
            self._calls.nbytes[name] += max(nbytes)
            if name in ("_allgather_base", "_reduce_scatter_base"):
                self._calls.parts.append(min(nbytes))
            op = getattr(args[-1], "reduceOp", None)
            if op is not None:
                self._calls.ops[next(n for n in _OPS if op == getattr(c10d.ReduceOp, n))] += 1
            start = time.thread_time()
            try:
                with _disable_current_modes():  # its copies are not those of a device
                    return method(*args)
            finally:
                self._calls.seconds += time.thread_time() - start

        return counted


def group_of(
    size: int,
    device: torch.device | None = None,
    engine_of: Callable[[int, int], Engine] | None = None,
    world_rank: int = 0,
) -> tuple[NativeGroup, EngineCalls]:
    """The group of all ranks as one of ``size`` sees it, and the calls of its engines.

    Args:
        engine_of: makes an engine for a rank of so many; None: one that counts its calls.
        world_rank: the one that sees it.
    """
    calls = EngineCalls()
    job = Job(c10d.HashStore(), RankMonitor.alone(world_rank))

    def connect(name: str, ranks: tuple[int, ...], place: torch.device) -> NativeGroup:
        spec = GroupSpec(job, name, ranks, place, 60.0, connect)
        make = engine_of or partial(CountingEngine, calls=calls)
        engine = make(ranks.index(world_rank), len(ranks))
        return NativeGroup(
            spec, NativeEngine(cast(Engine, engine), lambda failed: None, averages=True)
        )

    return connect("world", tuple(range(size)), device or torch.device("cpu")), calls


@contextmanager
def rank_zero(size: int) -> Iterator[tuple[NativeGroup, EngineCalls]]:
    """``group_of``, and the end of its job."""
    group, calls = group_of(size)
    try:
        yield group, calls
    finally:
        group.close()


class Block(nn.Module):
    """Three linear layers without and three vectors with odd lengths: nine parameters."""

    def __init__(self, width: int, rows: Sequence[int] = ()) -> None:
        super().__init__()
        odd = rows or (width,) * 3
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(length)) for length in odd)

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x) * scale.mean()
        return x


def blocks(count: int, width: int, rows: Sequence[int] = ()) -> nn.Sequential:
    """A model of ``count`` blocks, each a unit."""
    return nn.Sequential(*(Block(width, rows) for _ in range(count)))


def sharded(model: nn.Module, group: ec.Group, **options: Any) -> ec.FSDP:
    """``model`` in FSDP, a unit for each block, all of them sharded."""
    options = {"min_num_params": 0, "init": "trust", "check_replicas": 0, **options}
    return ec.FSDP(model, group, units=ec.units.by_type(Block), **options)


def step(model: nn.Module, width: int) -> None:
    """Forward, backward and an update."""
    model(torch.ones(2, width)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.grad = None


class Instructions:
    """Counts the bytecode instructions of this thread in its body: processor time of Python."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Instructions:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace


class TensorsMade(TorchDispatchMode):
    """Counts operators and the tensors that they give, such as the views that a split makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_tensors = 0
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names[str(func)] += 1
        self.num_tensors += len(out) if isinstance(out, list | tuple) else 1
        self.num_tensors += sum(len(arg) for arg in args if isinstance(arg, list | tuple))
        return out


def held_nbytes(device: torch.device | None = None) -> int:
    """Bytes of all memory that a tensor of Python refers to, each counted once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor) and not item.is_meta and item.layout is torch.strided:
            with torch._C.DisableTorchFunctionSubclass():
                memory = item.untyped_storage()
            if device is None or memory.device == device:
                storages[memory._cdata] = memory.nbytes()
    return sum(storages.values())


def main() -> None:
    """Print the processor time of forward and backward of a unit by the number of ranks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--layout", default="flat")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    for size in args.ranks:
        with rank_zero(size) as (group, calls):
            start = time.process_time()
            model = sharded(blocks(5, args.width), group, layout=args.layout)
            built = time.process_time() - start
            step(model, args.width)
            forward, backward = _times(model, args.width, args.steps, calls)
            calls.clear()
            step(model, args.width)
            print(
                f"{size:5d} ranks {args.layout}: unit forward {forward / 5 * 1e3:.3f} ms, "
                f"backward {backward / 5 * 1e3:.3f} ms, {calls.total} engine calls a step, "
                f"built in {built:.2f} s",
                flush=True,
            )


def _times(model: nn.Module, width: int, steps: int, calls: EngineCalls) -> tuple[float, float]:
    """The least processor time of forward and of backward beside the engine, in seconds."""

    def now() -> float:
        return time.thread_time() - calls.seconds

    forwards, backwards = [], []
    for _ in range(steps):
        start = now()
        loss = model(torch.ones(2, width)).sum()
        middle = now()
        loss.backward()
        forwards.append(middle - start)
        backwards.append(now() - middle)
        for param in model.parameters():
            param.grad = None
    return min(forwards), min(backwards)


if __name__ == "__main__":
    main()
