"""A record has what a rank sent and the memory of its tensors, the same in every run."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import echelon as ec
from echelon.page import view_of


def train(world: ec.World) -> ec.StepRecord:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)  # 16 KiB
    x = torch.full((8, 64), float(world.rank))  # 2 KiB
    with ec.StepRecord(world, model, x) as record:
        loss = model(x).square().mean()
        loss.backward()
        world.group.all_reduce(model.weight.grad, "mean", label="weight")
        big = torch.ones(1024, 64)  # 256 KiB, and its end
        del big
        world.group.barrier()
    return record


def test_calls_have_their_sizes_and_labels_in_order() -> None:
    for record in ec.run(train, 3):
        calls = [(call.op, call.nbytes, call.label) for call in record.calls]
        assert calls == [("all_reduce", 64 * 64 * 4, "weight"), ("barrier", 0, None)]
        assert record.sent_nbytes == 64 * 64 * 4
        assert 0 < record.calls[0].after < record.calls[1].after < len(record.memory)


def test_memory_counts_what_is_held_made_and_gone() -> None:
    record = ec.run(train, 2)[1]
    held = (64 * 64 + 8 * 64) * 4
    assert record.memory[0] == held
    assert record.peak_nbytes >= held + 64 * 64 * 4 + 1024 * 64 * 4  # with gradient and big
    gradient = 64 * 64 * 4
    assert held + gradient <= record.memory[-1] < held + gradient + 1024 * 64


def test_the_record_of_a_rank_does_not_depend_on_who_does_the_work_of_a_group() -> None:
    first = [(record.calls, record.memory) for record in ec.run(train, 4)]
    assert first[1:] == first[:-1]
    for _ in range(10):
        assert [(record.calls, record.memory) for record in ec.run(train, 4)] == first


def test_views_and_tied_tensors_count_once() -> None:
    def main(world: ec.World) -> list[int]:
        tensor = torch.ones(1000)
        optimizer = torch.optim.SGD([nn.Parameter(tensor)], lr=0.1)
        with ec.StepRecord(world, [tensor, tensor[:10]], optimizer, {"a": tensor}) as record:
            tensor[5:].view(5, -1).mul_(2)
        return record.memory

    assert set(ec.run(main, 1)[0]) == {4000}


def test_a_tensor_that_wraps_others_counts_what_they_have() -> None:
    def main(world: ec.World) -> list[int]:
        pair = TwoTensor(torch.ones(100), torch.ones(100))
        with ec.StepRecord(world, pair) as record:
            double = 2 * pair
            del double
        return record.memory

    assert ec.run(main, 1)[0][:2] == [800, 1600]


def test_a_record_of_a_block_that_fails_ends_with_it() -> None:
    def main(world: ec.World) -> tuple[int, int]:
        record = ec.StepRecord(world)
        with pytest.raises(KeyError), record:
            world.group.barrier()
            raise KeyError("x")
        world.group.barrier()
        torch.ones(100)
        return len(record.calls), record.peak_nbytes

    assert ec.run(main, 2) == [(1, 0), (1, 0)]


def test_a_record_is_shown_and_its_repr_is_short(capsys: Any) -> None:
    record = ec.run(train, 2)[0]
    assert repr(record).startswith("<StepRecord of rank 0: 2 calls, 16.0 KiB sent, peak ")
    assert "<svg" in record._repr_html_()
    ec.show(record)
    shown = capsys.readouterr().out
    assert "A step of rank 0" in shown
    assert "█" in shown
    assert [part.title for part in view_of(record).parts] == ["Sent", "Memory of tensors"]


def test_what_is_no_tensor_and_a_second_block_are_refused() -> None:
    def main(world: ec.World) -> None:
        with pytest.raises(ec.ArgumentError, match=r"held has 3, a int; give modules"):
            ec.StepRecord(world, [3])
        record = ec.StepRecord(world)
        with record:
            pass
        with pytest.raises(ec.StateError, match="make another"):
            record.__enter__()

    ec.run(main, 1)
    with pytest.raises(ec.ArgumentError, match="world"):
        ec.StepRecord(None)  # type: ignore[arg-type]
