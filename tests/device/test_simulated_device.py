"""The simulated device computes what the CPU does, and names what no wait orders."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import StateError
from echelon.testing.device.native import device_library
from echelon.testing.device.simulated import Order, RaceReport, simulated_device
from tests.device.compiler import needs_compiler

pytestmark = needs_compiler
ORDERS = list(Order)


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


# Numbers ---------------------------------------------------------------------------------------


def trained(model: nn.Module, device: str, dtype: torch.dtype) -> list[float]:
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, generator=generator).to(device)
    y = torch.randint(4, (16,), generator=generator).to(device)
    losses = []
    for _ in range(3):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_has_the_numbers_of_the_cpu_and_equal_bits_in_every_order(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    wanted = trained(model, "cpu", dtype)
    seen = []
    for order in ORDERS:
        with simulated_device(order) as device:
            losses = trained(model, "sim", dtype)
            assert losses == pytest.approx(wanted, abs=1e-6 if dtype == torch.float32 else 1e-2)
            assert not device.report()
            seen.append((losses, device.digests()))
    assert seen[1:] == seen[:-1]


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: x.t()[1:].unsqueeze(0).expand(2, -1, -1).reshape(-1) + 1,
    "of masks": lambda x: x[x > 4],
    "positions": lambda x: (x > 4).nonzero(),
    "by indices": lambda x: x[:, torch.tensor([0, 2])],
    "into": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "a mean into its output": lambda x: F.mse_loss(x, x + 1),
    "complex parts": lambda x: torch.view_as_real(torch.complex(x, x + 1)),
    "a convolution": lambda x: F.conv2d(x.view(1, 1, 3, 4), x[:2, :2].reshape(1, 1, 2, 2) + 1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3),
    "a sort": lambda x: x.flatten().sort(descending=True).values,
    "unique values": lambda x: (x // 3).unique(),
    "windows": lambda x: x.unfold(1, 2, 1).sum(-1),
    "writes in place": lambda x: x.clone().mul_(2).index_fill_(0, x[0, :1].long(), 7.0),
    "growth": lambda x: x.clone().resize_(2, 2),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_gives_what_it_gives_on_the_cpu(name: str, order: Order) -> None:
    x = torch.arange(12.0).view(3, 4)
    with simulated_device(order):
        result = OPERATIONS[name](x.to("sim"))
        assert result.device.type == "sim"
        torch.testing.assert_close(result.cpu(), OPERATIONS[name](x))


def test_draws_are_the_same_in_every_order_and_can_be_repeated() -> None:
    drawn = []
    for order in ORDERS:
        with simulated_device(order):
            torch.manual_seed(3)
            state = torch.get_device_module("sim").get_rng_state()
            first = torch.rand(4, device="sim").cpu(), torch.randperm(5, device="sim").cpu()
            torch.get_device_module("sim").set_rng_state(state)
            assert torch.equal(torch.rand(4, device="sim").cpu(), first[0])
            dropped = F.dropout(torch.ones(64, device="sim")).cpu()
            assert set(dropped.tolist()) == {0.0, 2.0}
            drawn.append([*first[0].tolist(), *first[1].tolist(), *dropped.tolist()])
    assert drawn[1:] == drawn[:-1]


# Memory ----------------------------------------------------------------------------------------


def test_host_and_device_are_two_memories() -> None:
    with simulated_device():
        x = torch.ones(3, device="sim")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="convert sim"):
            x.numpy()
        assert (x + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number is part of the launch


def test_memory_is_used_again_at_once_and_has_no_values_until_it_is_written() -> None:
    with simulated_device():
        x = torch.ones(100, device="sim")
        address = x.data_ptr()
        del x
        y = torch.empty(100, device="sim")
        assert y.data_ptr() == address
        assert y.isnan().all().item()


def test_memory_that_another_thread_drops_while_work_runs_is_used_again() -> None:
    with simulated_device():
        dropped = [torch.ones(4, device="sim")]
        memory = dropped[0].untyped_storage().data_ptr()

        def work() -> bool:  # garbage is collected in any thread
            thread = threading.Thread(target=dropped.clear, daemon=True)
            thread.start()
            thread.join(10)
            return not thread.is_alive()

        device_library().launch("work", [], [], work)
        assert torch.ones(4, device="sim").untyped_storage().data_ptr() == memory


# Races -----------------------------------------------------------------------------------------


def reads_before_a_write_is_done() -> None:
    side, x = torch.Stream("sim"), torch.zeros(4, device="sim")
    side.wait_stream(current())
    with side:
        x.add_(1)
    x.sum()


def writes_before_a_read_is_done() -> None:
    side, x = torch.Stream("sim"), torch.zeros(4, device="sim")
    side.wait_stream(current())
    with side:
        x.sum()
    x.add_(1)


def writes_twice() -> None:
    side, x = torch.Stream("sim"), torch.zeros(4, device="sim")
    side.wait_stream(current())
    with side:
        x.fill_(1)
    x.fill_(2)


def drops_what_another_stream_uses() -> None:
    side = torch.Stream("sim")
    with side:
        x = torch.ones(4, device="sim")
    current().wait_stream(side)
    x.sum()
    del x
    with side:
        torch.ones(4, device="sim")


def records_a_stream_that_waits_too_late() -> None:
    user, recorded, x = torch.Stream("sim"), torch.Stream("sim"), torch.ones(4, device="sim")
    user.wait_stream(current())
    with user:
        x.sum()
    x.record_stream(recorded)
    del x
    recorded.wait_stream(user)  # which the allocator does not ask any more
    torch.ones(4, device="sim")


def reads_a_copy_that_is_not_done() -> None:
    host = torch.empty(4).pin_memory()
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    host.sum()


def lists_a_copy_that_is_not_done() -> None:
    host = torch.empty(4).pin_memory()
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    host.tolist()


def fills_a_pinned_buffer_again() -> None:
    host = torch.ones(4).pin_memory()
    host.to("sim", non_blocking=True)
    host.fill_(2)


RACES = {
    reads_before_a_write_is_done: ("read after write", "add.out", "sum"),
    writes_before_a_read_is_done: ("write after read", "sum", "add.out"),
    writes_twice: ("write after write", "fill_", "fill_"),
    drops_what_another_stream_uses: ("use after free", "sum", "allocation"),
    records_a_stream_that_waits_too_late: ("use after free", "sum", "allocation"),
    reads_a_copy_that_is_not_done: ("read after write", "copy_", "sum"),
    lists_a_copy_that_is_not_done: ("read after write", "copy_", "read"),
    fills_a_pinned_buffer_again: ("write after read", "copy_", "fill_"),
}


def raced(program: Callable[[], None], order: Order) -> RaceReport:
    with simulated_device(order) as device:
        program()
        return device.report()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", RACES, ids=lambda program: program.__name__)
def test_a_race_is_named_with_both_operations_in_every_order(
    program: Callable[[], None], order: Order
) -> None:
    kind, first, second = RACES[program]
    report = raced(program, order)
    [finding] = report.findings
    assert finding.kind == kind
    assert first.startswith(finding.first.name)
    assert second.startswith(finding.second.name)
    assert str(report).count(f"in {program.__name__}") == 2
    assert "missing: " in str(report)


def waits_for_a_write() -> None:
    side, x = torch.Stream("sim"), torch.zeros(4, device="sim")
    side.wait_stream(current())
    with side:
        x.add_(1)
    event = side.record_event()
    current().wait_event(event)
    x.sum()


def records_the_stream() -> None:
    side = torch.Stream("sim")
    with side:
        x = torch.ones(4, device="sim")
    current().wait_stream(side)
    x.sum()
    x.record_stream(current())
    del x
    with side:
        torch.ones(4, device="sim")


def waits_for_a_copy() -> None:
    host = torch.empty(4).pin_memory()
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    current().record_event().synchronize()
    host.sum()


def asks_until_a_copy_is_done() -> None:
    host = torch.empty(4).pin_memory()
    host.copy_(torch.ones(4, device="sim"), non_blocking=True)
    event = current().record_event()
    while not event.query():
        pass
    host.sum()


def touches_other_halves() -> None:
    side, x = torch.Stream("sim"), torch.zeros(8, device="sim")
    side.wait_stream(current())
    with side:
        x[:4].add_(1)
    x[4:].add_(1)


def synchronizes() -> None:
    side, x = torch.Stream("sim"), torch.zeros(4, device="sim")
    side.wait_stream(current())
    with side:
        x.add_(1)
    torch.accelerator.synchronize()
    x.add_(1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "program",
    [
        waits_for_a_write,
        records_the_stream,
        waits_for_a_copy,
        asks_until_a_copy_is_done,
        touches_other_halves,
        synchronizes,
    ],
    ids=lambda program: program.__name__,
)
def test_what_waits_is_no_race(program: Callable[[], None], order: Order) -> None:
    assert raced(program, order).findings == ()


def test_a_second_device_is_refused_and_the_first_goes_on() -> None:
    with simulated_device() as device:
        with pytest.raises(StateError, match="has a simulated device already"), simulated_device():
            pass
        writes_twice()
        assert len(device.report().findings) == 1


def test_an_error_in_the_work_of_a_stream_is_raised_where_it_is_waited_for() -> None:
    with simulated_device(Order.LAZY):
        index = torch.tensor([9], device="sim")
        F.embedding(index, torch.ones(3, 2, device="sim"))
        with pytest.raises(IndexError, match="out of range"):
            torch.accelerator.synchronize()
