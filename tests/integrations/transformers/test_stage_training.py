"""Batches of a trainer on a pipeline: tokens count the same in every microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon as ec

pytest.importorskip("transformers")


def token_loss(output: Tensor, labels: Tensor, num_items: int) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / num_items


def model_and_batch() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    labels = torch.randint(5, (6, 3))
    labels[0], labels[3, 1:] = -100, -100  # microbatches with other numbers of tokens
    return model, {"x": torch.randn(6, 3, 4).double(), "labels": labels}


def step(world: ec.World) -> tuple[float, float, dict[str, Tensor]]:
    from echelon.integrations.transformers.stage_training import StageTraining, of_tokens

    model, inputs = model_and_batch()
    training = StageTraining(token_loss, 1, "x")
    plan = of_tokens(ec.Plan(pp=2, microbatches=3))
    pipe: Any = ec.parallelize(model, plan, world, loss_fn=training.loss_fn)
    count = int(inputs["labels"].ne(-100).sum())
    evaluated = training.evaluate(pipe, inputs, count)
    loss = training.step(pipe, inputs, count, finalize=True)
    with pytest.raises(ec.ArgumentError, match="it needs 'x' and 'labels'"):
        training.step(pipe, {"labels": inputs["labels"]}, count, finalize=True)
    stages = pipe.stages.values()
    grads = {name: value.grad for stage in stages for name, value in stage.named_parameters()}
    return evaluated.item(), loss.item(), grads


def test_gradients_are_those_of_the_mean_over_tokens() -> None:
    model, inputs = model_and_batch()
    expected = F.cross_entropy(model(inputs["x"]).flatten(0, 1), inputs["labels"].flatten())
    expected.backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    for evaluated, loss, found in ec.run(step, 2):
        assert [evaluated, loss] == pytest.approx([expected.item()] * 2, rel=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient.as_subclass(Tensor), gradients[name], rtol=1e-12, atol=1e-12
            )


def test_another_reduction_is_refused() -> None:
    from echelon.integrations.transformers.stage_training import of_tokens

    plan = ec.Plan(pp=2, microbatches=2, pipeline={"loss_reduction": "mean"})
    with pytest.raises(ec.ArgumentError, match="num_items_in_batch"):
        of_tokens(plan)
