import torch
from torch.nn.functional import mse_loss

from echelon.laboratory.batch_rows import checked_batches
from echelon.laboratory.comparison import ValueKind
from echelon.laboratory.differences import Tolerance, ValueComparer
from echelon.laboratory.one_process import OneProcess
from echelon.laboratory.value_pairs import CallRows
from echelon.laboratory.value_recorder import TrainingValues
from tests.laboratory.tasks import mlp, rows_of_numbers, sgd

WHOLE = CallRows(
    rows=[[[(step, row) for row in range(8)]] for step in range(3)], parts=[[None]] * 3
)


def trained() -> TrainingValues:
    batches = checked_batches(rows_of_numbers(), 3)
    return OneProcess(make_model=mlp, batches=batches, loss_fn=mse_loss, optimizer=sgd).train()


def comparer(expected: TrainingValues) -> ValueComparer:
    return ValueComparer(expected, [8, 8, 8], Tolerance(expected, ()))


def test_equal_trainings_have_no_differences() -> None:
    values = trained()
    compared = comparer(values)
    assert compared.first([trained(), trained()], [WHOLE, WHOLE]) == []
    assert compared.counts.compared[ValueKind.GRADIENT] == 2 * 4 * 3


def test_the_first_gradient_that_differs_is_named_with_its_rank_and_element() -> None:
    expected, wrong = trained(), trained()
    wrong.steps[1].gradients[2].flat[3] += 0.5
    [(difference, _)] = comparer(expected).first([trained(), wrong], [WHOLE, WHOLE])
    assert (difference.step, difference.kind, difference.name) == (
        1,
        ValueKind.GRADIENT,
        "2.weight",
    )
    assert (difference.rank, difference.ranks) == (1, (1,))
    torch.testing.assert_close(difference.largest, 0.5)
    torch.testing.assert_close(difference.observed - difference.expected, 0.5)


def test_weights_are_compared_at_the_end_too() -> None:
    expected, wrong = trained(), trained()
    wrong.parameters[0].flat.add_(1)
    [(difference, _)] = comparer(expected).first([wrong], [WHOLE])
    assert (difference.step, difference.kind) == (3, ValueKind.PARAMETER)


def test_what_rounding_does_is_allowed_fifty_times() -> None:
    expected, wrong = trained(), trained()
    gradient = wrong.steps[0].gradients[0].flat
    gradient += 1e-4 * float(gradient.abs().max())
    assert comparer(expected).first([wrong], [WHOLE])
    rounding = [{ValueKind.GRADIENT: 1e-5}, {}, {}, {}]
    lenient = ValueComparer(expected, [8, 8, 8], Tolerance(expected, rounding))
    assert lenient.first([wrong], [WHOLE]) == []


def test_outputs_that_depend_on_the_order_of_rows_are_not_compared() -> None:
    expected, other = trained(), trained()
    for tensor in other.steps[0].outputs["1"][0].tensors:
        tensor += 1
    compared = comparer(expected)
    compared.rounding(other, WHOLE)
    assert compared.first([other], [WHOLE]) == []
    assert list(compared.counts.skipped) == ["1"]
