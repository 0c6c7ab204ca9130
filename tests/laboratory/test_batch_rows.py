import pytest
import torch

from echelon.errors import ArgumentError
from echelon.laboratory.batch_rows import (
    checked_batches,
    model_call,
    num_rows,
    select_from,
    select_rows,
)


def test_a_pair_a_dict_and_a_tensor_are_batches() -> None:
    x, y = torch.zeros(2, 3), torch.ones(2)
    assert model_call((x, y)).args == (x,)
    assert model_call((x, y)).target is y
    assert model_call(((x, x), y)).args == (x, x)
    assert model_call(({"x": x}, y)).kwargs == {"x": x}
    assert model_call({"x": x, "y": y}).target == {"x": x, "y": y}
    assert model_call(x).target is x


def test_rows_are_selected_from_all_tensors_and_other_values_stay() -> None:
    batch = ({"x": torch.arange(4), "flag": True}, torch.arange(4.0))
    inputs, target = select_rows(batch, [3, 1])
    assert inputs["x"].tolist() == [3, 1]
    assert inputs["flag"] is True
    assert target.tolist() == [3.0, 1.0]
    assert num_rows(batch) == 4


def test_rows_of_several_batches_make_one() -> None:
    batches = [(torch.arange(3), torch.arange(3)), (torch.arange(3) + 10, torch.arange(3) + 10)]
    x, y = select_from(batches, [(1, 2), (0, 0)])
    assert x.tolist() == y.tolist() == [12, 0]


def test_floating_point_values_become_float64_and_integers_stay() -> None:
    [(x, y)] = checked_batches([(torch.ones(2), torch.ones(2, dtype=torch.int64))], 1)
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        (3, "batches is int"),
        (["text"], "batch 0 is a str"),
        ([(1, 2)], "batch 0 has no tensor"),
        ([(torch.ones(2), torch.ones(3))], "have .2, 3. rows"),
        ([(torch.ones(()), torch.ones(()))], "have .0. rows"),
        ([torch.ones(2), (torch.ones(2), torch.ones(2))], "batch 1 has another structure"),
        ([torch.ones(2), torch.ones(2).int()], "batch 1 has another structure"),
    ],
)
def test_batches_without_common_rows_are_refused(batches: object, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        checked_batches(batches, len(batches) if isinstance(batches, list) else 1)
