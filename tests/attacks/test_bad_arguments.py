"""Whatever is given as an argument, the answer is a typed error that names it, and nothing is lost.

Every public call of a group, with one argument at a time replaced by what users pass by mistake.
All cases of a world run in one start; after each of them the ranks still work together.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.errors import EchelonError
from echelon.planner.transformer import Transformer
from tests.attacks.bad_values import bad_values
from tests.worlds import KINDS, run_world

NO_TENSORS = [None, 1.0, [1.0, 2.0], "tensor", torch.eye(4).to_sparse()]
NO_OUTPUTS = [*NO_TENSORS, torch.zeros(1).expand(4), torch.zeros(2, 1).expand(2, 2)]
NO_RANKS = [-1, 2, 1.0, "0", None, True, [0], math.nan]
NO_SPLITS = ["22", 2, [2.0, 2.0], ["2", "2"], [5, -1], [2], [1, 1], [2, 2, 0], [None, 4]]
NO_OPS = ["avg", "SUM", None, 0, [], ["sum"], torch.distributed.ReduceOp.SUM]
NO_LABELS = [[1], 1, b"label", {"a": 1}]
NO_TAGS = [-1, 2**31, "a", None, 1.5]
NO_NUMELS = [-1, 1.5, "4", None, True, 10**14, 2**70, [4]]
NO_DTYPES = [None, "float32", float, 4, torch.qint8]
NO_LISTS = [3, torch.zeros(2, 4), [torch.zeros(4)], [torch.zeros(4), None], "ab"]

# A method, its good arguments, and for some of them what to replace them by.
Case = tuple[str, dict[str, Any], dict[str, list[Any]]]


def collectives(rank: int) -> list[Case]:
    four, eight = torch.zeros(4), torch.zeros(8)
    pair = [torch.zeros(4), torch.zeros(4)]
    mine = pair if rank == 0 else None  # what only the root gives
    reducing = {"op": NO_OPS, "label": NO_LABELS}
    shape = [torch.tensor(1.0), torch.zeros(3)]  # no dim 0; not a multiple of the ranks
    return [
        ("all_reduce", {"tensor": four}, {"tensor": NO_OUTPUTS, **reducing}),
        (
            "reduce_scatter_single",
            {"output": torch.zeros(2), "input": four},
            {"output": [*NO_OUTPUTS, eight], "input": [*NO_TENSORS, eight], **reducing},
        ),
        (
            "reduce_scatter_single",
            {"output": torch.zeros(2), "input": four, "splits": [2, 2]},
            {"output": [eight], "input": [eight], "splits": NO_SPLITS},
        ),
        (
            "all_gather_single",
            {"output": eight, "input": four},
            {"output": [*NO_OUTPUTS, four], "input": [*NO_TENSORS, eight], "label": NO_LABELS},
        ),
        (
            "all_gather",
            {"outputs": pair, "input": four},
            {"outputs": [None, *NO_LISTS], "input": [*NO_TENSORS, eight], "label": NO_LABELS},
        ),
        ("broadcast", {"tensor": four, "src": 0}, {"tensor": NO_TENSORS, "src": NO_RANKS}),
        (
            "reduce",
            {"tensor": four, "dst": 0},
            {"tensor": NO_OUTPUTS, "dst": NO_RANKS, **reducing},
        ),
        (
            "gather",
            {"tensor": four, "outputs": mine, "dst": 0},
            {"tensor": NO_TENSORS, "outputs": NO_LISTS, "dst": NO_RANKS, "label": NO_LABELS},
        ),
        (
            "scatter",
            {"tensor": four, "inputs": mine, "src": 0},
            {"tensor": NO_OUTPUTS, "inputs": NO_LISTS, "src": NO_RANKS, "label": NO_LABELS},
        ),
        (
            "all_to_all_single",
            {"output": four, "input": torch.zeros(4)},
            {"output": [*NO_OUTPUTS, *shape], "input": [*NO_TENSORS, *shape]}
            | {"output_splits": NO_SPLITS, "input_splits": NO_SPLITS, "label": NO_LABELS},
        ),
    ]


def messages_and_memory(rank: int) -> list[Case]:
    four, peer = torch.zeros(4), 1 - rank
    return [
        ("barrier", {}, {"label": NO_LABELS}),
        ("broadcast_object", {"item": 1}, {"src": NO_RANKS}),
        ("gather_bytes", {"data": b"1"}, {"data": [None, 1, "text"], "dst": NO_RANKS}),
        ("all_gather_object", {}, {"item": [lambda: 1, (part for part in "ab")]}),
        *(
            (op, {"tensor": four, "dst": peer}, {"tensor": NO_TENSORS, "dst": [*NO_RANKS, rank]})
            for op in ("send", "isend")
        ),
        *(
            (op, {"tensor": four, "src": peer}, {"tensor": NO_OUTPUTS, "tag": NO_TAGS})
            for op in ("recv", "irecv")
        ),
        (
            "subgroup",
            {"ranks": [0, 1]},
            {
                "ranks": [None, [], 0, "01", [2], [0.0], [None], [True], [-1, 0]],
                "device": ["meta", "cuda:9", "gpu", 1.5, torch.float32],
            },
        ),
        ("window", {"numel": 4}, {"numel": NO_NUMELS, "dtype": NO_DTYPES}),
        ("shared_tensor", {"numel": 4}, {"numel": NO_NUMELS, "dtype": NO_DTYPES}),
    ]


def bad_calls(rank: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A method, its arguments, and the one of them that is bad."""
    for method, good, bad in [*collectives(rank), *messages_and_memory(rank)]:
        for name, values in bad.items():
            for value in values:
                yield method, {**good, name: value}, name


def untyped_answers(world: ec.World) -> list[str]:
    """What does not end in a typed error; after each call the ranks still work together."""
    found = []
    for method, arguments, name in bad_calls(world.rank):
        what = f"{method}({name}={arguments[name]!r:.60})"
        try:
            getattr(world.group, method)(**arguments)
        except EchelonError as error:
            if not isinstance(error, ec.ArgumentError | ec.SharedMemoryError):
                found.append(f"{what}: {type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"{what}: {type(error).__name__}: {error}")
        else:
            found.append(f"{what}: accepted")
        total = torch.ones(1)
        world.group.all_reduce(total)
        if total.item() != world.size:
            found.append(f"{what}: then the sum of ones is {total.item()}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_argument_of_a_call_is_refused_and_the_group_lives_on(kind: str) -> None:
    assert run_world(kind, untyped_answers, 2) == [[], []]


def bad_meshes(world: ec.World) -> list[str]:
    untyped = []
    for axes in ({}, {"a": 2.0}, {"a": "2"}, {"a": None}, {"a": 0}, {"a": -2}, {"a": 3}):
        try:
            world.mesh(**axes)
            untyped.append(f"{axes}: accepted")
        except ec.ArgumentError:
            pass
        except Exception as error:
            untyped.append(f"{axes}: {error!r}")
    return untyped


def test_a_bad_mesh_is_refused() -> None:
    assert ec.run(bad_meshes, 2) == [[], []]


@pytest.mark.parametrize("axis", ["tp", ["dp"], None, 0])
def test_an_axis_that_a_mesh_does_not_have_is_refused(axis: object) -> None:
    with pytest.raises(ec.ArgumentError, match="this mesh has no axis"):
        ec.run(lambda world: world.mesh(dp=-1)[axis], 2)


def test_a_model_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
    for wrapper in (ec.DDP, ec.FSDP):
        with pytest.raises(ec.ArgumentError, match="'weight' was made in inference mode"):
            ec.run(lambda world, wrapper=wrapper: wrapper(model, world.group), 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ranks", value) for value in (0, -1, 1.0, "2", None, True, math.nan, 2**40)),
        *(("world", value) for value in ("mpi", None, 3, [])),
        *(("timeout", value) for value in (0, -1, math.nan, math.inf, "3", None, True)),
        *(("args", value) for value in (3, None, "ab", {1: 2})),
        *(("device", value) for value in ("x", 7.5, "cuda:99", [], "meta")),
        *(("fn", value) for value in (None, 3, "main")),
    ],
)
def test_a_bad_argument_of_run_is_refused(name: str, value: object) -> None:
    good = {"fn": bad_meshes, "ranks": 2, "world": "threads", "timeout": 5.0, "device": "cpu"}
    with pytest.raises(ec.ArgumentError):
        ec.run(**{**good, name: value})


@pytest.mark.parametrize("norm", [None, "1", -1.0, math.nan, [1.0], True])
def test_a_bad_bound_of_a_norm_is_refused(norm: object) -> None:
    with pytest.raises(ec.ArgumentError, match="max_norm is"):
        ec.clip_grad_norm_(torch.nn.Linear(1, 1), norm)


@pytest.mark.parametrize("model", [None, [torch.nn.Parameter(torch.ones(1))], 3])
def test_norms_are_taken_of_models(model: object) -> None:
    with pytest.raises(ec.ArgumentError, match="give the wrapped model"):
        ec.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("value", [3, "replicate", [0], torch.ones(1), torch.nn.Linear(1, 1)])
def test_a_group_of_replicas_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ec.ArgumentError, match="replicate is"):
        ec.run(lambda world: ec.FSDP(torch.nn.Linear(1, 1), world.group, replicate=value), 1)


@pytest.mark.parametrize("value", [0, "", [], ()])
def test_a_strategy_that_is_empty_is_refused_by_a_plan_that_shards_nothing(value: Any) -> None:
    with pytest.raises(ec.ArgumentError, match="strategy is"):
        ec.Plan(dp=2, strategy=value)


def test_a_bound_beyond_what_torch_takes_as_an_integer_is_a_number_like_others() -> None:
    layer = torch.nn.Linear(1, 1)
    layer.weight.grad = torch.full((1, 1), 3.0)
    assert ec.clip_grad_norm_(layer, 2**70, 2**70).item() == 3.0
    assert layer.weight.grad.item() == 3.0


# Constructors and functions, by the types of their arguments --------------------------------------

SCHEDULE = ec.pipeline.schedule("1f1b", 2, 4, 2)
SIZES = Transformer(
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    ffn=32,
    gated=False,
    vocab=100,
    seq=16,
    tied=True,
)

# To add a call, add a line: its good arguments, of which one at a time is replaced.
CALLS: dict[Callable[..., Any], Callable[[ec.World], dict[str, Any]]] = {
    ec.DDP: lambda world: {"module": torch.nn.Linear(1, 1), "group": world.group},
    ec.FSDP: lambda world: {"module": torch.nn.Linear(1, 1), "group": world.group},
    ec.Pipeline: lambda world: {
        "stages": [torch.nn.Linear(1, 1)],
        "group": world.group,
        "microbatches": 1,
    },
    ec.FiniteGuard: lambda world: {"model": torch.nn.Linear(1, 1), "group": world.group},
    ec.GradScaler: lambda world: {"group": world.group},
    ec.StopSignals: lambda world: {"group": world.group},
    ec.ResumableSampler: lambda world: {"num_samples": 4, "batch_size": 2, "group": world.group},
    ec.SampleStream: lambda world: {
        "source": [1, 2, 3, 4],
        "batch_size": 2,
        "group": world.group,
    },
    ec.Mixture: lambda world: {"sources": {"a": [1, 2]}},
    ec.PackedSequences: lambda world: {"source": [torch.ones(3, dtype=torch.int64)], "length": 2},
    ec.shared_dataset: lambda world: {"build": lambda: torch.ones(1), "group": world.group},
    ec.Plan: lambda world: {},
    ec.plan: lambda world: {"model": SIZES, "cluster": "2 A100", "global_batch": 4},
    ec.MixedPrecision: lambda world: {},
    ec.parallelize: lambda world: {
        "model": torch.nn.Linear(1, 1),
        "plan": ec.Plan(),
        "world": world,
    },
    ec.compare: lambda world: {
        "make_model": lambda: torch.nn.Linear(1, 1),
        "batches": [(torch.ones(2, 1), torch.ones(2, 1))] * 3,
        "plan_or_function": ec.Plan(),
        "loss_fn": torch.nn.functional.mse_loss,
        "optimizer": torch.optim.SGD,
    },
    ec.EMA: lambda world: {"model": torch.nn.Linear(1, 1)},
    ec.all_gather_rows: lambda world: {"tensor": torch.ones(2), "group": world.group},
    ec.clip_grad_norm_: lambda world: {"model": torch.nn.Linear(1, 1), "max_norm": 1.0},
    ec.observe.CommMeter: lambda world: {"rank": 0},
    ec.observe.MemoryMeter: lambda world: {"rank": 0},
    ec.observe.Trace: lambda world: {"rank": 0},
    ec.observe.Progress: lambda world: {"total_steps": 1},
    ec.observe.RunInfo: lambda world: {"total_steps": 1},
    ec.observe.tensor_bytes: lambda world: {"model": torch.nn.Linear(1, 1)},
    ec.observe.Recorder: lambda world: {
        "world": world,
        "folder": os.devnull,
        "info": ec.observe.RunInfo(total_steps=1),
    },
    ec.observe.MetricsWriter: lambda world: {"path": os.devnull},
    ec.observe.came_last: lambda world: {"world": world},
    ec.observe.held_up: lambda world: {"world": world},
    ec.observe.read_metrics: lambda world: {"path": os.devnull},
    ec.observe.write_report: lambda world: {"folder": os.devnull},
    ec.observe.write_comparison: lambda world: {"first": os.devnull, "second": os.devnull},
    ec.observe.track: lambda world: {"world": world, "folder": os.devnull},
    ec.observe.send_run: lambda world: {"folder": os.devnull},
    ec.observe.matmul_flops: lambda world: {"device": world.device},
    ec.observe.merge_traces: lambda world: {
        "trace": os.devnull,
        "profiles": [],
        "output": os.devnull,
    },
    ec.pipeline.schedule: lambda world: {
        "name": "1f1b",
        "stages": 2,
        "microbatches": 4,
        "ranks": 2,
    },
    ec.pipeline.check: lambda world: {"schedule": SCHEDULE},
    ec.pipeline.choose: lambda world: {"ranks": 2, "microbatches": 4},
    ec.pipeline.judge: lambda world: {"source": "0F0"},
    ec.pipeline.lower: lambda world: {"schedule": SCHEDULE},
    ec.pipeline.measured_costs: lambda world: {"steps": [], "num_stages": 2},
    ec.pipeline.partition: lambda world: {"costs": [1.0, 2.0, 3.0], "stages": 2},
    ec.pipeline.simulate: lambda world: {"schedule": SCHEDULE},
    ec.pipeline.split: lambda world: {
        "module": torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)),
        "num_stages": 2,
    },
    ec.pipeline.TensorChunkSpec: lambda world: {"split_dim": 0},
    ec.pipeline.to_page: lambda world: {"what": SCHEDULE},
    ec.pipeline.to_svg: lambda world: {"what": SCHEDULE},
    ec.pipeline.to_text: lambda world: {"what": SCHEDULE},
    ec.save: lambda world: {"directory": os.devnull, "step": 1},
    ec.async_save: lambda world: {"directory": os.devnull, "step": 1},
    ec.load: lambda world: {"directory": os.devnull},
    ec.steps: lambda world: {"directory": os.devnull},
    ec.Blackbox: lambda world: {"directory": os.devnull},
    ec.StepRecord: lambda world: {"world": world},
    ec.init: lambda world: {},
    ec.replay: lambda world: {"directory": os.devnull, "fn": bad_meshes},
    ec.prepare_run: lambda world: {"directory": os.devnull},
    ec.step_through: lambda world: {"fn": bad_meshes, "ranks": 1},
    ec.run: lambda world: {"fn": bad_meshes, "ranks": 1},
    ec.testing.slow: lambda world: {"seconds": 1.0},
    ec.testing.run_ranks: lambda world: {"fn": bad_meshes, "ranks": 1},
    ec.testing.run_faulty: lambda world: {
        "fn": bad_meshes,
        "ranks": 1,
        "fault": ec.testing.slow(0.0),
        "rank": 0,
    },
    ec.testing.FaultyGroup: lambda world: {
        "inner": world.group,
        "fault": ec.testing.slow(0.0),
    },
    ec.units.by_function: lambda world: {"function": lambda module, depth: True},
    ec.units.by_size: lambda world: {"num_parameters": 3},
}

# What takes any values (show, gather_samples), has no arguments or only those of torch (whole,
# by_type, local_shard), is made by the library and not by users, or is called too often to look at
# what it gets (events).
UNCHECKED = {
    *("AsyncSave", "Cause", "Comparison", "Group", "Loaded", "Mesh", "NoteDifference", "Window"),
    *("RecordedCall", "Replay", "SteppedCall", "SteppedRun", "ValueDifference", "Work", "World"),
    *("Replicate", "ShardInfo", "local_shard"),
    *("show", "whole", "by_type", "plan_units", "Member", "Rule", "UnitPlan", "Fault"),
    *("CallLateness", "CameLast", "CommTotal", "HeldUp", "Lateness"),
    *("Action", "Choice", "Idle", "Measurement", "Pair", "Schedule", "ScheduleVerdict"),
    *("Simulation", "Step", "Timeline", "Wait"),
    *("Plans", "SharedColumn", "StorePath", "Tracker", "Tracking", "gather_samples"),
}


def test_every_public_call_is_among_those_that_are_given_bad_arguments() -> None:
    calls = {
        name: value
        for module in (ec, ec.observe, ec.pipeline, ec.testing, ec.units)
        for name in module.__all__
        if callable(value := getattr(module, name))
        and not (inspect.isclass(value) and issubclass(value, BaseException | Enum))
    }
    assert {name for name, call in calls.items() if call not in CALLS} == UNCHECKED


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_the_type_of_an_argument_forbids_is_refused(call: Callable[..., Any]) -> None:
    def main(world: ec.World) -> list[str]:
        untyped = []
        for name, value in bad_values(call):
            try:
                call(**{**CALLS[call](world), name: value})
            except ec.ArgumentError:
                continue
            except Exception as error:
                untyped.append(f"{name}={value!r:.60}: {type(error).__name__}: {error}")
            else:
                untyped.append(f"{name}={value!r:.60}: accepted")
        return untyped

    assert ec.run(main, 1) == [[]]
