"""FSDP2 of the installed torch on the simulated device, as rank 0 of four that are not there."""

from __future__ import annotations

import linecache
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from echelon.testing.device import SimulatedDevice, simulated_device
from echelon.testing.device.report import Frame
from tests.device.compiler import needs_compiler

pytestmark = needs_compiler
BF16: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
OFFLOADED: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not resharded": {"reshard_after_forward": False},
    "reduced in bf16": BF16,
    "offloaded": OFFLOADED,
    "HSDP": {},
    "HSDP, reduced in bf16": BF16,
    "HSDP, offloaded": OFFLOADED,
    "HSDP, reduced in bf16, offloaded": BF16 | OFFLOADED,
}
# Waits that stay silent in every configuration here, and which others have to be missing, too,
# before a race is found that those do not have alone. The stream of the all-gathers follows that of
# the copies into them, which waits for the same (pytorch #177147).
_STREAM = "self._comm_ctx.all_gather_stream"
_COPIED_IN = "foreach_all_gather: all_gather_stream.wait_stream(all_gather_copy_in_stream)"
_LAST_USE = (
    "FSDPParamGroup._wait_all_gather_streams_on_event: "
    "self.comm_ctx.all_gather_stream.wait_event(event)"
)
COVERED = {
    f"FSDPState._root_pre_forward: {_STREAM}.wait_stream(current_stream)": {
        _COPIED_IN,
        _LAST_USE,
        "foreach_reduce: reduce_scatter_stream.wait_stream(current_stream)",  # of one communicator
    },
    f"FSDPState._post_forward: {_STREAM}.wait_event(all_gather_state.event)": {_COPIED_IN},
    _LAST_USE: {_COPIED_IN},
    "FSDPState._root_post_backward_final_callback: "
    "self._device_handle.current_stream().wait_event(rs_state.event)": {
        "FSDPParamGroup.finalize_backward: self.device_handle.current_stream().wait_event(event)"
    },
}


def sharded(name: str) -> nn.Sequential:
    """Four blocks."""
    options = OPTIONS[name]
    shape, names = ((2, 2), ("replicate", "shard")) if "HSDP" in name else ((4,), ("shard",))
    mesh = init_device_mesh("sim", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
    model = nn.Sequential(*blocks)
    if "offload_policy" not in options:
        model.to("sim")
    for block in (*model, model):
        fully_shard(block, mesh=mesh, **options)
    return model


def train(name: str) -> None:
    """Three steps."""
    model = sharded(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(8, 16, device="sim")  # a copy from the host would wait for the step before
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class KeptBuffer(DefaultAllGather):
    """Gathers into the same memory each time."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.buffer is None:
            self.buffer = torch.empty(*size, dtype=dtype, device=device)
            torch.accelerator.synchronize()
        return self.buffer


def train_in_kept_buffers(name: str) -> None:
    """Two steps. Memory that is not allocated again shows what it is that the gathers wait for."""
    model, buffers = sharded(name), [KeptBuffer(), KeptBuffer()]
    for i, block in enumerate(model):
        assert isinstance(block, FSDPModule)
        block.set_custom_all_gather(buffers[i % 2])
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(8, 16, device="sim")
    model(x).square().mean().backward()
    optimizer.step()
    model(x).square().mean().backward()  # at a line of its own: places tell the steps apart


def trained(
    name: str, without: Collection[Frame] = (), train: Callable[[str], None] = train
) -> SimulatedDevice:
    with simulated_device(without=without) as device:
        train(name)
        torch.accelerator.synchronize()
        device.look()
    return device


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_races(name: str, four_ranks: None) -> None:
    assert str(trained(name).report()) == "no races"


def waits_of(device: SimulatedDevice) -> set[Frame]:
    """The lines that wait."""
    return {next(frame for frame in stack if not frame.is_ours) for stack in device.waits}


def site(frame: Frame) -> str:
    """The function of a line, and the line itself."""
    return f"{frame.function}: {linecache.getline(frame.file, frame.line).strip()}"


@pytest.mark.slow
def test_each_wait_that_is_left_out_is_found(four_ranks: None) -> None:
    names = defaultdict(list)
    for name in OPTIONS:
        for frame in waits_of(trained(name)):
            if "/fsdp/" in frame.file:
                names[frame].append(name)
    found = {frame: [n for n in of if trained(n, [frame]).report()] for frame, of in names.items()}
    assert len(found) >= 12
    assert {site(frame) for frame, where in found.items() if not where} == set(COVERED)


def races(without: Collection[Frame]) -> set[tuple[str, ...]]:
    """The races of the training in kept buffers, by what they are and where."""
    findings = trained("plain", without, train_in_kept_buffers).report().findings
    return {(each.kind, *each.first[:2], *each.second[:2]) for each in findings}


@pytest.mark.parametrize("line", COVERED, ids=lambda line: line.partition(": ")[0])
def test_a_covered_wait_is_found_where_those_that_cover_it_are_missing(
    line: str, four_ranks: None
) -> None:
    device = trained("plain", train=train_in_kept_buffers)
    assert str(device.report()) == "no races"
    frames = {site(frame): frame for frame in waits_of(device)}
    covering = [frames[each] for each in COVERED[line]]
    assert not races([frames[line]])
    assert races([frames[line], *covering]) - races(covering)


# Defects that PyTorch had, put back -------------------------------------------------------------


def drop_the_buffer_of_the_all_reduce(patch: pytest.MonkeyPatch) -> None:
    """Of HSDP, before the collective has read it (pytorch #140044, #180665)."""
    plain = FSDPParamGroup.post_backward

    def post_backward(group: Any, *args: Any) -> None:
        plain(group, *args)
        if group._all_reduce_state is not None:
            group._all_reduce_state = group._all_reduce_state._replace(all_reduce_input=None)

    patch.setattr(FSDPParamGroup, "post_backward", post_backward)


def drop_the_input_of_the_reduce_scatter(patch: pytest.MonkeyPatch) -> None:
    plain = FSDPParamGroup.post_backward

    def post_backward(group: Any, *args: Any) -> None:
        plain(group, *args)
        states = group.comm_ctx.reduce_scatter_states
        states[:] = [state._replace(reduce_scatter_input=None) for state in states]

    patch.setattr(FSDPParamGroup, "post_backward", post_backward)


def gather_before_the_last_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FSDPParamGroup, "_wait_all_gather_streams_on_event", lambda group, event: None)


@pytest.mark.parametrize(
    ("defect", "name", "collective"),
    [
        (drop_the_buffer_of_the_all_reduce, "HSDP, reduced in bf16", "allreduce"),
        (drop_the_input_of_the_reduce_scatter, "plain", "_reduce_scatter_base"),
        (gather_before_the_last_use, "plain", "_allgather_base"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_defect_that_was_public_is_named(
    defect: Callable[[pytest.MonkeyPatch], None],
    name: str,
    collective: str,
    four_ranks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defect(monkeypatch)
    findings = trained(name).report().findings
    assert any(collective in (each.first.name, each.second.name) for each in findings)
