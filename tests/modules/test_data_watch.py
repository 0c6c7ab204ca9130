"""Ranks that train on the same rows, or on different numbers of batches, are told once."""

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import echelon as ec
from echelon.comm import streams
from echelon.comm.streams import StreamEvent
from echelon.diagnosis import rank_time
from echelon.modules import data_watch
from tests.modules.test_parameters import ReadingWaits
from tests.processes import run_python
from tests.worlds import run_world

SAME, UNEQUAL = "train on the same rows", "have different numbers of batches"
WRAPPERS: dict[str, Callable[[nn.Module, Any], Any]] = {"ddp": ec.DDP, "fsdp": ec.FSDP}


def rows_of(world: ec.World, how: str) -> torch.Tensor:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    match how:
        case "same" | "evaluation":
            return x if how == "same" else x[world.rank :: world.size]
        case "constant":
            return torch.ones(64, 4)
        case "uneven" | "join":
            return torch.randn(65, 4, generator=torch.Generator().manual_seed(1))[world.rank :: 4]
    return x[world.rank :: world.size]


def train(world: ec.World, how: str, wrapper: str) -> None:
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](nn.Linear(4, 1), world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = rows_of(world, how)
    if how == "one batch":
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    for _ in range(2):
        for batch in DataLoader(rows, 8):
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if how == "evaluation" and world.rank == 0:
                with torch.no_grad():
                    for held_out in DataLoader(rows[:8], 4):
                        nn.functional.relu(held_out)


def train_and_capture(world: ec.World, how: str, wrapper: str) -> str:
    with redirect_stderr(io.StringIO()) as errors:
        train(world, how, wrapper)
    return errors.getvalue()


def train_joined(world: ec.World, how: str, wrapper: str) -> None:
    model = ec.DDP(nn.Linear(4, 1), world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with model.join():
            for batch in DataLoader(rows_of(world, how), 8):
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()


CASES = {
    "same": (SAME,),
    "uneven": (UNEQUAL,),
    "rows of each": (),
    "constant": (),
    "one batch": (),
    "evaluation": (),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("how", CASES)
def test_a_mistake_with_the_data_is_told_once_and_nothing_else(
    how: str, wrapper: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ec.run(train, 4 if how == "uneven" else 2, args=(how, wrapper))
    except ec.CommError:
        assert how == "uneven"  # the last steps of rank 0 have no partner
    errors = capsys.readouterr().err
    assert [text for text in (SAME, UNEQUAL) if text in errors] == [*CASES[how]]
    assert errors.count("echelon:") == len(CASES[how])


def test_ranks_that_join_may_have_different_numbers_of_batches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ec.run(train_joined, 4, args=("join", "ddp"))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_ranks_of_processes_are_told_too() -> None:
    told = run_world("processes", train_and_capture, 2, ("same", "ddp"))
    assert [text.count(SAME) for text in told] == [1, 0]


def forms() -> Iterator[object]:
    yield (torch.arange(9.0),)
    yield {"ids": torch.arange(6).view(2, 3).t(), "mask": torch.ones(3)}
    yield (torch.arange(4).bool(), None, "text")
    yield [torch.randn(1000, 100, dtype=torch.bfloat16)]


def digest(value: object) -> int | None:
    return data_watch._copies_in(value).digest()


def test_a_digest_is_of_values_and_of_no_layout() -> None:
    for value in forms():
        assert digest(value) == digest(value) is not None
    x = torch.randn(4, 6)
    assert digest((x,)) == digest((x.t().contiguous().t(),))
    assert digest((x,)) != digest((x + 1,))
    nothing = [(), ("a",), (torch.ones(9),), (torch.ones(9, device="meta"),), (torch.ones(()),)]
    assert {digest(value) for value in nothing} == {None}


class Late(StreamEvent):
    """The end of a copy that takes some forwards."""

    def __init__(self, num_queries: int) -> None:
        self.num_queries = num_queries

    def wait(self) -> None:
        raise AssertionError("nothing waits")

    synchronize = wait

    def query(self) -> bool:
        self.num_queries -= 1
        return self.num_queries < 0


class LateStream(streams.Stream):
    """The stream of a device whose copies take some forwards."""

    queued = False

    def as_current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_for_current(self) -> None:
        pass

    def record_event(self) -> Late:
        return Late(5)


class LateDevice(ReadingWaits):
    def current_stream(self) -> LateStream:
        return LateStream()


def train_while_copies_are_late(world: ec.World, same: bool) -> None:
    model = ec.DDP(nn.Linear(4, 1), world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(20):
        x = torch.full((4, 4), step + (0.0 if same else world.rank / 8)) + torch.arange(4.0)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("same", "num_told"), [(True, 1), (False, 0)])
def test_where_reading_waits_rows_are_read_in_the_first_forward_that_finds_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool, num_told: int
) -> None:
    monkeypatch.setattr(data_watch, "device_of", LateDevice)
    ec.run(train_while_copies_are_late, 2, args=(same,))
    assert capsys.readouterr().err.count(SAME) == num_told


def trace(world: ec.World) -> bool:
    model = ec.DDP(nn.Linear(4, 2), world.group)
    x = torch.arange(8.0).view(2, 4)
    return torch.equal(torch.jit.trace(model, x, check_trace=False)(x), model(x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_model_that_is_traced_is_not_watched() -> None:
    assert all(ec.run(trace, 2))  # a TracerWarning would be an error


def watch_a_forward(world: ec.World) -> int:
    watch = data_watch.DataWatch(world.group)
    batch = torch.randn(8, 4)
    for _ in range(data_watch.NUM_BATCHES + 1):
        watch.begin_forward((batch + world.rank,), {})
    return watch._num_forwards


def test_a_rank_that_is_not_measured_is_not_watched() -> None:
    assert ec.run(watch_a_forward, 1) == [data_watch._FORWARDS]
    assert rank_time.rows() is None


ALONE = """
import torch
{start}
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
"""
STARTS = {  # whether the ranks have met
    "": False,
    "import echelon as ec; world = ec.init()": True,
    "import torch.distributed as dist; dist.init_process_group('gloo')": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("world", ["processes", "threads"])
@pytest.mark.parametrize("start", STARTS)
def test_a_script_that_trains_without_a_world_is_told_once(
    start: str, world: str, tmp_path: Any
) -> None:
    (tmp_path / "train.py").write_text(ALONE.format(start=start))
    words = ("-m", "echelon", "run", "--ranks", "2", "--world", world, str(tmp_path / "train.py"))
    done = run_python(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trains without a world") == (not STARTS[start])
