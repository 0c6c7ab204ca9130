"""Runs the list of one rank, action by action, exactly as it stands.

There is one executor for every schedule. What it does with a value is the same on all of them: an
input is there when its forward asks for it, is freed by it, and an output is gone when the next
stage has it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from echelon import events
from echelon.errors import CommError, ModelMismatch, StageError, WorldError
from echelon.pipeline.boundary import BoundarySpec, TensorSpec
from echelon.pipeline.link import Arrival, GradientArrival, Link, Sending
from echelon.pipeline.schedules.ir import Action, Kind, Schedule
from echelon.pipeline.send_completion import SendCompletion
from echelon.pipeline.stage import Output, Stage

_LAST = 20  # actions that an error lists

Loss = Callable[[Any, Any], Tensor]


@final
@dataclass(slots=True)
class Batch:
    """One step: what goes in on this rank, and what comes out.

    Attributes:
        inputs: by microbatch, the arguments of the first stage; empty where another rank has it.
        kwargs: by microbatch, keyword arguments of every stage of this rank.
        targets: by microbatch, what the loss compares with.
        weights: by microbatch, what its loss counts.
        loss_fn: None where there is no loss.
        training: whether backwards follow.
        losses: by microbatch, weighted; filled where the last stage is.
        outputs: by microbatch, what the last stage gave where there is no loss.
    """

    inputs: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any]
    weights: Sequence[float]
    loss_fn: Loss | None
    training: bool
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


_Key = tuple[int, int]  # stage, microbatch


@final
class Executor:
    """The stages of one rank, and what is between them and the others.

    Args:
        schedule: lowered: with its transfers.
        rank: of the schedule.
        stages: those of this rank, by number.
        before: by stage, the way to the stage before it, where that is on another rank.
        after: by stage, the way to the stage after it.
        world_rank: what events call this rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        before: Mapping[int, Link],
        after: Mapping[int, Link],
        world_rank: int,
    ) -> None:
        self._world_rank = world_rank
        self._order = schedule.orders[rank]
        self._receipts = SendCompletion.of(schedule, rank)
        self._many = 2 * schedule.num_ranks  # sends under way
        self._last = schedule.num_stages - 1
        self._stages, self._before, self._after = stages, before, after
        self._run = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.SEND_F: self._send,
            Kind.RECV_F: self._expect,
            Kind.SEND_B: self._send_gradients,
            Kind.RECV_B: self._expect_gradients,
            Kind.REDUCE: self._reduce_stage,
            Kind.UNSHARD: self._gather_stage,
            Kind.RESHARD: self._release_stage,
        }
        self.most_alive = 0  # microbatches of stages whose activations were held at once
        self._begin()

    def _begin(self) -> None:
        self._batch: Batch | None = None
        self._waited_s = 0.0  # for what the action under way needs
        self._start_s = 0.0  # of the action under way, where somebody listens
        self._recent: deque[Action] = deque(maxlen=_LAST)
        self._sending: dict[Action, Sending] = {}  # the oldest first
        self._values: dict[
            _Key, tuple[BoundarySpec, list[Tensor]]
        ] = {}  # inputs from a stage of ours
        self._arrivals: dict[_Key, Arrival] = {}
        self._outputs: dict[_Key, Output] = {}
        self._input_forms: dict[_Key, tuple[TensorSpec, ...]] = {}  # that get a gradient
        self._output_forms: dict[_Key, tuple[TensorSpec, ...]] = {}
        self._grads: dict[_Key, list[Tensor | None]] = {}  # of the outputs, from a stage of ours
        self._grad_arrivals: dict[_Key, GradientArrival] = {}
        self._early: set[_Key] = set()  # gradients to be received for outputs that are not there
        self._input_grads: dict[_Key, list[Tensor | None]] = {}

    def run(self, batch: Batch, *, finalize: bool = True) -> None:
        """Carry out all actions; afterwards nothing of the step is held.

        Raises:
            StageError: a stage or the loss raised; names the action and those before it.
        """
        self._begin()
        self._batch = batch
        self.most_alive = 0
        try:
            for item in self._order:
                for action in item.parts:
                    if action.kind is Kind.REDUCE and not finalize:
                        continue
                    if events.listening():
                        self._tell(action, training=batch.training)
                    else:
                        self._do(action)
            self._end_sending()
            # A reduction tells that all have read the parameters, which may be written now.
            for stage in () if batch.training and finalize else self._stages.values():
                stage.sharing.rest()
        except BaseException:
            for stage in self._stages.values():
                stage.forget()
            self._begin()
            raise
        self._check_empty()
        self._begin()

    def _tell(self, action: Action, *, training: bool) -> None:
        """Do it, and tell listeners how long it took and how much of that was waiting."""
        self._waited_s, self._start_s = 0.0, time.perf_counter()
        try:
            self._do(action)
        finally:
            events.emit(
                "pipeline.action",
                self._start_s,
                time.perf_counter() - self._start_s,
                rank=self._world_rank,
                action=str(action),
                kind=action.kind,
                training=training,
                waited_s=self._waited_s,
            )

    def _do(self, action: Action) -> None:
        try:
            self._run[action.kind](action)
        except (CommError, ModelMismatch, WorldError) as error:  # of the ranks, not of a stage
            error.add_note(f"in action {action}, after {self._last_actions()}")
            raise
        except Exception as error:
            raise StageError(
                action.stage, action.microbatch, str(action), list(map(str, self._recent)), error
            ) from error
        self._recent.append(action)

    def _end_sending(self) -> None:
        try:
            for sending in self._sending.values():
                sending.wait()
        except CommError as error:
            error.add_note(f"at the end of its actions, after {self._last_actions()}")
            raise

    def _last_actions(self) -> str:
        return " ".join(map(str, self._recent)) or "none"

    def _check_empty(self) -> None:
        held = [
            *self._values,
            *self._arrivals,
            *self._outputs,
            *self._input_forms,
            *self._output_forms,
            *self._grads,
            *self._grad_arrivals,
            *self._input_grads,
            *(index for index, stage in self._stages.items() if stage.num_alive),
        ]
        assert self._batch is None or not (held and self._batch.training), held

    # Forward ---------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        batch, stage, mb = self._batch, action.stage, action.microbatch
        assert batch is not None
        assert mb is not None
        value = batch.inputs[mb] if stage == 0 else self._take_input((stage, mb))
        part, kwargs = self._stages[stage], batch.kwargs[mb] if batch.kwargs else {}
        with torch.set_grad_enabled(batch.training):
            if stage == self._last:
                self._end_of_model(part, mb, value, kwargs)
            else:
                output = part.forward(mb, value, kwargs)
                self._hand_on((stage, mb), output)
        self.most_alive = max(self.most_alive, sum(one.num_alive for one in self._stages.values()))

    def _end_of_model(self, part: Stage, mb: int, value: Any, kwargs: Mapping[str, Any]) -> None:
        batch = self._batch
        assert batch is not None
        if batch.loss_fn is None:
            output = part.forward(mb, value, kwargs)
            batch.outputs[mb] = output.form.assemble(output.tensors)
            return
        loss_fn, weight = batch.loss_fn, batch.weights[mb]
        target = batch.targets[mb] if batch.targets else None
        loss = part.loss(mb, value, kwargs, lambda y: loss_fn(y, target))
        batch.losses[mb] = loss * weight

    def _take_input(self, key: _Key) -> Any:
        arrival = self._arrivals.pop(key, None)
        if arrival is None:
            form, tensors = self._values.pop(key)
        else:
            form, tensors = arrival.take()
            self._waited_s = time.perf_counter() - self._start_s
            self._let_go(self._receipts.by_input.get(key, ()))
        self._input_forms[key] = tuple(one for one in form.tensors if one.requires_grad)
        return form.assemble(tensors)

    def _hand_on(self, key: _Key, output: Output) -> None:
        stage, mb = key
        self._output_forms[key] = tuple(one for one in output.form.tensors if one.requires_grad)
        if stage in self._after:
            self._outputs[key] = output
            if key in self._early:
                self._early.remove(key)
                self._post_gradients(key)
            return
        for one, tensor in zip(output.form.tensors, output.tensors, strict=True):
            tensor.requires_grad_(one.requires_grad)
        self._values[stage + 1, mb] = output.form, output.tensors

    def _send(self, action: Action) -> None:
        assert action.microbatch is not None
        assert self._batch is not None
        output = self._outputs.pop((action.stage, action.microbatch))
        link = self._after[action.stage]
        self._keep(action, link.send(action.microbatch, output, training=self._batch.training))

    def _expect(self, action: Action) -> None:
        assert action.microbatch is not None
        assert self._batch is not None
        link = self._before[action.stage]
        arrival = link.expect(action.microbatch, training=self._batch.training)
        self._arrivals[action.stage, action.microbatch] = arrival

    def _keep(self, action: Action, sending: Sending) -> None:
        while self._sending:
            oldest = next(iter(self._sending))
            if not self._sending[oldest].done(ask=len(self._sending) >= self._many):
                break
            self._sending.pop(oldest).wait()
        self._sending[action] = sending

    def _let_go(self, arrived: Sequence[Action]) -> None:
        """Free what was sent, now that it is known to be there."""
        for action in arrived:
            sending = self._sending.pop(action, None)
            if sending is not None:
                sending.wait()

    # Backward --------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        self._back(action, self._stages[action.stage].backward)

    def _backward_input(self, action: Action) -> None:
        self._back(action, self._stages[action.stage].backward_input)

    def _backward_weight(self, action: Action) -> None:
        assert action.microbatch is not None
        self._stages[action.stage].backward_weight(action.microbatch)

    def _back(
        self, action: Action, half: Callable[[int, list[Tensor | None]], list[Tensor | None]]
    ) -> None:
        stage, mb = action.stage, action.microbatch
        assert mb is not None
        found = half(mb, self._take_gradients((stage, mb)))
        if stage == 0:
            return
        if not found:  # nothing came back to this stage
            found = [None] * len(self._input_forms[stage, mb])
        if stage in self._before:
            self._input_grads[stage, mb] = found
        else:
            self._input_forms.pop((stage, mb))
            self._grads[stage - 1, mb] = found

    def _take_gradients(self, key: _Key) -> list[Tensor | None]:
        if key[0] == self._last:
            assert self._batch is not None
            # The gradient of the weighted loss, without a multiplication in the graph.
            return [torch.full_like(self._batch.losses[key[1]], self._batch.weights[key[1]])]
        self._output_forms.pop(key)
        arrival = self._grad_arrivals.pop(key, None)
        if arrival is None:
            return self._grads.pop(key)
        grads = arrival.take()
        self._waited_s = time.perf_counter() - self._start_s
        self._let_go(self._receipts.by_gradient.get(key, ()))
        return grads

    def _send_gradients(self, action: Action) -> None:
        assert action.microbatch is not None
        key = action.stage, action.microbatch
        forms, grads = self._input_forms.pop(key), self._input_grads.pop(key)
        link = self._before[action.stage]
        self._keep(action, link.send_gradients(action.microbatch, forms, grads))

    def _expect_gradients(self, action: Action) -> None:
        assert action.microbatch is not None
        key = action.stage, action.microbatch
        if key in self._output_forms:
            self._post_gradients(key)
        else:
            self._early.add(key)

    def _post_gradients(self, key: _Key) -> None:
        stage, mb = key
        link = self._after[stage]
        self._grad_arrivals[key] = link.expect_gradients(mb, self._output_forms[key])

    # Whole stages ----------------------------------------------------------------------------

    def _reduce_stage(self, action: Action) -> None:
        self._stages[action.stage].sharing.reduce()

    def _gather_stage(self, action: Action) -> None:
        self._stages[action.stage].sharing.gather()

    def _release_stage(self, action: Action) -> None:
        self._stages[action.stage].sharing.release()
