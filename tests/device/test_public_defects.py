"""Defects of streams that libraries had, each as a program of a few lines, and mended.

Each program has the order of streams of a public thread, which its docstring names. With
``mended`` it has the wait that the thread has added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.testing.device import RaceReport, served_cuda, simulated_device
from echelon.testing.device.simulated import Order
from tests.device.compiler import needs_compiler

pytestmark = needs_compiler


def current_stream() -> torch.Stream:
    return torch.cuda.current_stream()


def on_device(size: int = 4) -> Tensor:
    return torch.ones(size, device="cuda")


# Copies between the host and the device ----------------------------------------------------------


def hook_reads_an_offloaded_gradient(mended: bool) -> None:
    """FSDP2: a hook sees a gradient on its way to the host (pytorch #180666)."""
    weight, reduce = torch.zeros(4), torch.cuda.Stream()
    with torch.cuda.stream(reduce):
        gradient = on_device().to("cpu", non_blocking=True)
        offloaded = reduce.record_event()
    if mended:
        offloaded.synchronize()
    weight.sub_(gradient)


def optimizer_writes_what_is_copied_to_the_device(mended: bool) -> None:
    """An optimizer on the host writes parameters of which the last copy is under way (ao #584)."""
    copies, master, weight = torch.cuda.Stream(), torch.ones(4).pin_memory(), on_device()
    copies.wait_stream(current_stream())
    for _ in range(2):
        master.mul_(0.9)
        with torch.cuda.stream(copies):
            weight.copy_(master, non_blocking=True)
        if mended:
            copies.synchronize()


def pinned_buffer_is_filled_again(mended: bool) -> None:
    """One pinned buffer for the block numbers of all steps (vllm #48085)."""
    pinned, numbers = torch.zeros(4, dtype=torch.int64).pin_memory(), on_device().long()
    copied = torch.cuda.Event()
    for step in range(2):
        if mended:
            copied.synchronize()
        pinned.fill_(step)
        numbers.copy_(pinned, non_blocking=True)
        copied.record()


def numpy_of_a_copy_under_way(mended: bool) -> None:
    """The values of ``.to("cpu", non_blocking=True)``, read at once (pytorch #86264)."""
    values = (on_device() * 2).to("cpu", non_blocking=True)
    if mended:
        torch.cuda.synchronize()
    values.numpy()


def weights_are_used_before_they_are_there(mended: bool) -> None:
    """Group offloading lets no stream wait for its transfers (diffusers #13502)."""
    transfers, host = torch.cuda.Stream(), torch.ones(4).pin_memory()
    with torch.cuda.stream(transfers):
        weight = host.to("cuda", non_blocking=True)
    if mended:
        current_stream().wait_stream(transfers)
    weight.square()


# Memory that is handed out again ----------------------------------------------------------------


def nested_batch_is_not_recorded(mended: bool) -> None:
    """A prefetcher records the tensors of a batch, and not those in its dict (ray #66344)."""
    copies = torch.cuda.Stream()
    for _ in range(2):
        with torch.cuda.stream(copies):
            batch = {"x": torch.ones(4).pin_memory().to("cuda", non_blocking=True)}
        current_stream().wait_stream(copies)
        if mended:
            batch["x"].record_stream(current_stream())
        batch["x"].square()
        del batch


def weights_are_offloaded_while_they_are_used(mended: bool) -> None:
    """Offloading drops the weights of a layer that still computes (diffusers #14657)."""
    transfers, host = torch.cuda.Stream(), torch.ones(4).pin_memory()
    for _ in range(2):
        with torch.cuda.stream(transfers):
            weight = host.to("cuda", non_blocking=True)
        current_stream().wait_stream(transfers)
        weight.square()
        if mended:
            current_stream().synchronize()
        del weight


def recorded_on_its_own_stream(mended: bool) -> None:
    """``current_stream()`` is the stream of the transfers where it is called (diffusers #12721)."""
    transfers, host, compute = torch.cuda.Stream(), torch.ones(4).pin_memory(), current_stream()
    for _ in range(2):
        with torch.cuda.stream(transfers):
            weight = host.to("cuda", non_blocking=True)
            weight.record_stream(compute if mended else current_stream())
        current_stream().wait_stream(transfers)
        weight.square()
        del weight


def bucket_is_dropped_while_it_is_reduced(mended: bool) -> None:
    """ZeRO 2 reduces a flat bucket on a stream, and drops it (deepspeed #7965)."""
    reduction = torch.cuda.Stream()
    for _ in range(2):
        bucket = torch.cat([torch.full((4,), 2.0, device="cuda")])
        reduction.wait_stream(current_stream())
        with torch.cuda.stream(reduction):
            bucket.div_(2)
        if mended:
            bucket.record_stream(reduction)
        del bucket


def storage_is_emptied_while_it_is_copied(mended: bool) -> None:
    """A table is stashed on the host, and its storage emptied at once (torchrec #4231)."""
    copies, table, stash = torch.cuda.Stream(), on_device(), torch.empty(4).pin_memory()
    copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        stash.copy_(table, non_blocking=True)
    if mended:
        table.record_stream(copies)
    table.untyped_storage().resize_(0)
    torch.full((4,), -1.0, device="cuda")


def activation_is_dropped_while_it_is_offloaded(mended: bool) -> None:
    """Activations go to the host on a stream of their own (llama-cookbook #115)."""
    offload = torch.cuda.Stream()

    def pack(x: Tensor) -> Tensor:
        offload.wait_stream(current_stream())
        host = torch.empty(x.shape).pin_memory()
        with torch.cuda.stream(offload):
            host.copy_(x.detach(), non_blocking=True)
        if mended:
            x.record_stream(offload)
        return host

    x = on_device().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda host: host.to("cuda")):
        y = (x * 2).square()
        y = torch.exp_(y + 1)
    current_stream().wait_stream(offload)


# Streams that wait for nobody, or for the wrong one -----------------------------------------------


def shard_is_gathered_before_the_optimizer_is_done(mended: bool) -> None:
    """The copy into the input of an all-gather reads fresh shards (pytorch #197827)."""
    copies, shard = torch.cuda.Stream(), on_device()
    with torch.cuda.stream(copies):
        gathered = torch.empty(16, device="cuda")
    shard.sub_(0.1)
    if mended:
        copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        gathered[:4].copy_(shard)


def gather_begins_before_its_input_is_there(mended: bool) -> None:
    """FSDP2 has a stream to copy in and one to gather (pytorch #117973)."""
    copies, gather, shard = torch.cuda.Stream(), torch.cuda.Stream(), on_device()
    copies.wait_stream(current_stream())
    with torch.cuda.stream(copies):
        part = shard.mul(2)
    if mended:
        gather.wait_stream(copies)
    with torch.cuda.stream(gather):
        part.repeat(4)
    current_stream().wait_stream(gather)
    copies.wait_stream(gather)


def waits_for_the_default_stream_only(mended: bool) -> None:
    """ZeRO 3 waits for the default stream, and gradients come from another (deepspeed #7898)."""
    backward, reduce = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(backward):
        gradient = on_device().mul_(3)
        reduce.wait_stream(current_stream() if mended else torch.cuda.default_stream())
        with torch.cuda.stream(reduce):
            gradient.div(2)
        backward.wait_stream(reduce)


def waits_for_one_of_two_producers(mended: bool) -> None:
    """A bucket is filled on two streams, and one is waited for (deepspeed #8061)."""
    producers = torch.cuda.Stream(), torch.cuda.Stream()
    reduce, bucket = torch.cuda.Stream(), torch.empty(8, device="cuda")
    for start, producer in zip((0, 4), producers, strict=True):
        producer.wait_stream(current_stream())
        with torch.cuda.stream(producer):
            bucket[start : start + 4].fill_(start)
    for producer in producers if mended else producers[1:]:
        reduce.wait_stream(producer)
    with torch.cuda.stream(reduce):
        bucket.div_(2)
    current_stream().wait_stream(reduce)


def two_buffers_and_no_events(mended: bool) -> None:
    """Two buckets take turns, and nothing says that one is free again (deepspeed #5545)."""
    reduce, free = torch.cuda.Stream(), [torch.cuda.Event(), torch.cuda.Event()]
    buckets = [torch.empty(4, device="cuda") for _ in free]
    for step in range(3):
        if mended:
            free[step % 2].wait()
        buckets[step % 2].fill_(step)
        reduce.wait_stream(current_stream())
        with torch.cuda.stream(reduce):
            buckets[step % 2].square()
            free[step % 2].record()


def asks_for_the_current_stream_too_late(mended: bool) -> None:
    """In the body of a stream, that stream is the current one (torchtitan #2581)."""
    offload, activation, pool = torch.cuda.Stream(), on_device(), torch.empty(4).pin_memory()
    compute = current_stream()
    with torch.cuda.stream(offload):
        offload.wait_stream(compute if mended else current_stream())
        pool.copy_(activation, non_blocking=True)


def optimizer_steps_on_another_stream(mended: bool) -> None:
    """The step begins on its stream before the backward is done (torchrec #2071)."""
    model = nn.Linear(4, 1, bias=False, device="cuda")
    torch.cuda.synchronize()
    steps, optimizer = torch.cuda.Stream(), torch.optim.SGD(model.parameters(), foreach=False)
    model(on_device()).backward()
    if mended:
        steps.wait_stream(current_stream())
    with torch.cuda.stream(steps):
        optimizer.step()
    current_stream().wait_stream(steps)


def callback_runs_on_the_default_stream(mended: bool) -> None:
    """DDP finishes on the default stream what was reduced on the user's (pytorch #37944)."""
    gradient, users = on_device(), torch.cuda.Stream()
    users.wait_stream(current_stream())
    with torch.cuda.stream(users):
        bucket = gradient.mul(2)
    with torch.cuda.stream(users if mended else torch.cuda.default_stream()):
        gradient.copy_(bucket)


# Collectives ------------------------------------------------------------------------------------


def all_to_all_is_not_waited_for(mended: bool) -> None:
    """Experts compute on tokens that are on their way (OLMo-core #716 separates the wait)."""
    tokens = torch.empty(4, device="cuda")
    handle = dist.all_to_all_single(tokens, on_device(), async_op=True)
    if mended:
        handle.wait()
    tokens.square()


def sent_activation_is_dropped(mended: bool) -> None:
    """A pipeline frees the activation that it still sends (Megatron-LM #4047)."""
    activation = on_device()
    handle = dist.isend(activation, 1)
    assert handle is not None
    if mended:
        handle.wait()
    activation.data = torch.empty(0, device="cuda")
    on_device()
    handle.wait()


class Named(NamedTuple):
    """A race: its kind, and of both operations the name and the line."""

    kind: str
    first: str
    first_line: str
    second: str
    second_line: str


DEFECTS: dict[Callable[[bool], None], Named] = {
    hook_reads_an_offloaded_gradient: Named(
        "read after write", "copy_", 'on_device().to("cpu"', "sub_", "weight.sub_(gradient)"
    ),
    optimizer_writes_what_is_copied_to_the_device: Named(
        "write after read", "copy_", "weight.copy_(master", "mul_", "master.mul_(0.9)"
    ),
    pinned_buffer_is_filled_again: Named(
        "write after read", "copy_", "numbers.copy_(pinned", "fill_", "pinned.fill_(step)"
    ),
    numpy_of_a_copy_under_way: Named(
        "read after write", "copy_", '* 2).to("cpu"', "read", "values.numpy()"
    ),
    weights_are_used_before_they_are_there: Named(
        "read after write", "copy_", 'host.to("cuda"', "pow", "weight.square()"
    ),
    nested_batch_is_not_recorded: Named(
        "use after free", "pow", 'batch["x"].square()', "allocation", "batch = {"
    ),
    weights_are_offloaded_while_they_are_used: Named(
        "use after free", "pow", "weight.square()", "allocation", 'weight = host.to("cuda"'
    ),
    recorded_on_its_own_stream: Named(
        "use after free", "pow", "weight.square()", "allocation", 'weight = host.to("cuda"'
    ),
    bucket_is_dropped_while_it_is_reduced: Named(
        "use after free", "div", "bucket.div_(2)", "allocation", "torch.full((4,), 2.0"
    ),
    storage_is_emptied_while_it_is_copied: Named(
        "use after free", "copy_", "stash.copy_(table", "allocation", "torch.full((4,), -1.0"
    ),
    activation_is_dropped_while_it_is_offloaded: Named(
        "use after free", "copy_", "host.copy_(x.detach()", "allocation", "torch.exp_(y + 1)"
    ),
    shard_is_gathered_before_the_optimizer_is_done: Named(
        "read after write", "sub", "shard.sub_(0.1)", "copy_", "gathered[:4].copy_(shard)"
    ),
    gather_begins_before_its_input_is_there: Named(
        "read after write", "mul", "shard.mul(2)", "copy_", "part.repeat(4)"
    ),
    waits_for_the_default_stream_only: Named(
        "read after write", "mul", "on_device().mul_(3)", "div", "gradient.div(2)"
    ),
    waits_for_one_of_two_producers: Named(
        "write after write", "fill_", "bucket[start : start + 4]", "div", "bucket.div_(2)"
    ),
    two_buffers_and_no_events: Named(
        "write after read", "pow", "buckets[step % 2].square()", "fill_", "buckets[step % 2].fill_"
    ),
    asks_for_the_current_stream_too_late: Named(
        "read after write", "fill_", 'torch.ones(size, device="cuda")', "copy_", "pool.copy_("
    ),
    optimizer_steps_on_another_stream: Named(
        "read after write", "mm", "backward()", "add", "optimizer.step()"
    ),
    callback_runs_on_the_default_stream: Named(
        "read after write", "mul", "gradient.mul(2)", "copy_", "gradient.copy_(bucket)"
    ),
    all_to_all_is_not_waited_for: Named(
        "read after write", "alltoall_base", "dist.all_to_all_single(", "pow", "tokens.square()"
    ),
    sent_activation_is_dropped: Named(
        "use after free", "send", "dist.isend(activation, 1)", "allocation", "torch.ones(size"
    ),
}


def raced(program: Callable[[bool], None], order: Order, *, mended: bool) -> RaceReport:
    with simulated_device(order, seed=1) as device, served_cuda():
        program(mended)
        return device.report()


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("program", DEFECTS, ids=lambda program: program.__name__)
def test_a_public_defect_is_named_with_both_lines(
    program: Callable[[bool], None], order: Order, four_ranks: None
) -> None:
    report, named = raced(program, order, mended=False), DEFECTS[program]
    found = {
        (each.kind, each.first.name.partition(".")[0], each.second.name.partition(".")[0])
        for each in report.findings
    }
    assert (named.kind, named.first, named.second) in found, str(report)
    first, _, second = str(report).partition("  second: ")
    assert named.first_line in first, str(report)
    assert named.second_line in second, str(report)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("program", DEFECTS, ids=lambda program: program.__name__)
def test_a_mended_defect_is_no_race(
    program: Callable[[bool], None], order: Order, four_ranks: None
) -> None:
    assert str(raced(program, order, mended=True)) == "no races"
