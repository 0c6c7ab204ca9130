import torch
from torch.nn.functional import mse_loss

from echelon.laboratory.batch_rows import checked_batches
from echelon.laboratory.evidence import GradientEvidence, StepAgain, norm_of
from echelon.laboratory.one_process import OneProcess
from echelon.laboratory.seen_rows import Forward
from tests.laboratory.tasks import mlp, mlp_with_batch_norm, rows_of_numbers, sgd


def step_again(step: int, make_model: object = mlp) -> StepAgain:
    training = OneProcess(
        make_model=make_model,  # type: ignore[arg-type]
        batches=checked_batches(rows_of_numbers(), 3),
        loss_fn=mse_loss,
        optimizer=sgd,
    )
    return StepAgain(training, training.train(), step)


def rows(step: int, *numbers: int) -> Forward:
    return Forward([(step, number) for number in numbers], None)


def test_a_step_can_be_computed_again_with_the_weights_of_its_time() -> None:
    again = step_again(2)
    gradients = again.whole_gradients()
    all_rows = again.gradients(rows(2, *range(8)))
    assert all(torch.equal(gradients[name], all_rows[name]) for name in gradients)


def test_the_mean_of_equal_parts_is_the_gradient_of_the_batch() -> None:
    shares = [[rows(1, 0, 1, 2, 3)], [rows(1, 4, 5, 6, 7)]]
    evidence = GradientEvidence(step_again(1), shares, [0, 1], None)
    assert evidence.mean_of_means is not None
    for name, whole in evidence.whole.items():
        torch.testing.assert_close(evidence.mean_of_means[name], whole)
    assert not evidence.by_rows  # the parts are equally long
    assert len(evidence.local_norms()) == 2


def test_unequal_parts_are_weighted_by_their_rows() -> None:
    shares = [[rows(1, 0, 1, 2, 3, 4, 5)], [rows(1, 6, 7)]]
    assert GradientEvidence(step_again(1), shares, [0, 1], None).by_rows


def test_outputs_and_buffers_of_some_rows_are_those_of_a_rank() -> None:
    again = step_again(0, mlp_with_batch_norm)
    values, buffers = again.forward(rows(0, 0, 1))
    assert values.outputs["1"][0].tensors[0].shape == (2, 8)
    assert int(buffers["1.num_batches_tracked"]) == 1


def test_the_norm_of_nothing_is_zero() -> None:
    assert norm_of([]) == 0.0
    assert norm_of([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0
