"""A training step of ``Trainer`` on a pipeline: forward and backward in one call.

The loss of a microbatch is its sum over tokens, divided by the number of tokens of the optimizer
step on all ranks. So the gradients are those of the mean over all tokens, in microbatches of any
length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn

from echelon.errors import ArgumentError
from echelon.pipeline.api import Pipeline
from echelon.pipeline.chunk_spec import TensorChunkSpec
from echelon.plans.plans import Plan

# Called with the output of the last stage, the labels and the number of tokens of the step.
TokenLoss = Callable[[Any, Tensor, Any], Tensor]


@final
class StageTraining:
    """Runs batches of ``Trainer`` on a pipeline.

    Args:
        loss: the sum over tokens of a microbatch, divided by the number of tokens.
        num_replicas: the number of pipelines, over which gradients are averaged.
        main_input: the name of what the first stage takes.
    """

    def __init__(self, loss: TokenLoss, num_replicas: int, main_input: str) -> None:
        self._loss, self._num_replicas, self._main_input = loss, num_replicas, main_input
        self._num_items: Any = None

    def loss_fn(self, output: Any, labels: Tensor) -> Tensor:
        """The loss of a microbatch, for ``ec.Pipeline``."""
        return self._loss(output, labels, self._num_items) * self._num_replicas

    def step(
        self, pipe: Pipeline, inputs: dict[str, Any], num_items: Any, *, finalize: bool
    ) -> Tensor:
        """Forward and backward of a batch; the loss on every rank."""
        first, labels, others = self._split(inputs, num_items)
        loss = pipe.step(first, target=labels, finalize=finalize, loss_everywhere=True, **others)
        assert loss is not None
        return loss

    def evaluate(self, pipe: Pipeline, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """The loss of a batch on every rank, without gradients."""
        first, labels, others = self._split(inputs, num_items)
        loss = pipe.eval_step(first, target=labels, loss_everywhere=True, **others)
        assert loss is not None
        return loss

    def _split(self, inputs: dict[str, Any], num_items: Any) -> tuple[Any, Any, dict[str, Any]]:
        if num_items is None or self._main_input not in inputs:
            raise ArgumentError(
                f"a batch for a pipeline has {sorted(inputs)}: it needs {self._main_input!r} and "
                "'labels'"
            )
        self._num_items = num_items
        others = dict(inputs)
        return others.pop(self._main_input), others.pop("labels"), others


def causal_loss(model: nn.Module) -> TokenLoss:
    """The loss that a causal language model of ``transformers`` computes itself."""
    plain: Any = model

    def loss(output: Any, labels: Tensor, num_items: Any) -> Tensor:
        value: Tensor = plain.loss_function(
            logits=output.logits,
            labels=labels,
            vocab_size=plain.config.vocab_size,
            num_items_in_batch=num_items,
        )
        return value

    return loss


def of_tokens(plan: Plan) -> Plan:
    """The plan with losses of microbatches that are added up, and with masks that have rows."""
    if "loss_reduction" in plan.pipeline:
        raise ArgumentError(
            "the plan has loss_reduction, and EchelonTrainer adds up losses over tokens: leave it "
            "out, and let compute_loss_func divide by num_items_in_batch"
        )
    # Masks of as many tokens as rows: by the conventions of transformers they have rows.
    have_rows = dict.fromkeys(("attention_mask", "token_type_ids"), TensorChunkSpec())
    options = {"kwargs_chunk_spec": have_rows, **plan.pipeline, "loss_reduction": "sum"}
    return replace(plan, pipeline=options)
