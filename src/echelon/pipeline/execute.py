"""Runs the actions of one rank in the order of its schedule; one executor for every schedule.

Each microbatch in each stage of this rank has a slot, whose values the actions fill and use::

                   stage before           slot of the stage            stage after

    [1] RECV_F   ────────────────> fwd_recv
    [2] F                          fwd_recv or fwd_input ─> output
    [3] SEND_F                                              output ──────────────>
    [4] RECV_B                                            bwd_recv <──────────────
    [5] B or I       input_grads <─ bwd_recv or output_grads
    [6] SEND_B   <── input_grads
    [7] W            gradients of weights that I has deferred

If the next stage is on the same rank, F fills the ``fwd_input`` of its slot, B fills the
``output_grads`` of the previous slot, and nothing is sent. Law: the action that uses a value frees
it, and after a step all slots are empty.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from echelon import events
from echelon.diagnosis import rank_time
from echelon.diagnosis.step_rows import Activity
from echelon.errors import ArgumentError, CommError, ModelMismatch, StageError, WorldError
from echelon.pipeline.boundary import BoundaryValue, TensorSpec
from echelon.pipeline.link import Link, Received
from echelon.pipeline.microbatch import Batch
from echelon.pipeline.schedules.dataflow import OUTPUT
from echelon.pipeline.schedules.ir import Action, Kind, Schedule
from echelon.pipeline.send_completion import PendingSends, sends_complete_at
from echelon.pipeline.stage import Stage
from echelon.pipeline.step_specs import StepSpecs

_Received = TypeVar("_Received")
_NUM_LISTED = 20  # actions before a failure that its message lists
# The time of sends and receives counts as the forward or the backward that they serve.
_ACTIVITIES = {
    **dict.fromkeys((Kind.RECV_F, Kind.F, Kind.SEND_F), Activity.FORWARD),
    **dict.fromkeys((Kind.RECV_B, Kind.B, Kind.I, Kind.W, Kind.SEND_B), Activity.BACKWARD),
}
_NO_BATCH = Batch(
    inputs=(),
    kwargs=(),
    targets=(),
    weights=(),
    loss_fn=None,
    specs=StepSpecs(training=False),
)


@dataclass(slots=True)
class _StepValues:
    """What a step holds of one microbatch in one stage; each is empty outside of a step."""

    fwd_recv: Received[BoundaryValue] | None = None
    fwd_input: BoundaryValue | None = None
    input_specs: tuple[TensorSpec, ...] | None = None  # of the inputs that get a gradient
    output: BoundaryValue | None = None
    output_specs: tuple[TensorSpec, ...] | None = None  # of the outputs that get a gradient
    is_bwd_recv_due: bool = False  # RECV_B ran before F, which knows what to receive
    bwd_recv: Received[list[Tensor | None]] | None = None
    output_grads: list[Tensor | None] | None = None
    input_grads: list[Tensor | None] | None = None


@final
@dataclass(slots=True, eq=False)
class _Slot:
    """One microbatch in one stage: the values of the step, and where they come from and go.

    Attributes:
        stage: of this rank.
        microbatch: its index.
        is_first: whether the stage is the first of the model.
        is_last: whether the stage is the last of the model.
        to_previous: the link to the previous stage; None if that is on this rank or does not exist.
        to_next: the link to the next stage; None if that is on this rank or does not exist.
        previous: the slot of the previous stage, if that is on this rank.
        next: the slot of the next stage, if that is on this rank.
        sent_before_input: sends of this rank that must have arrived once ``fwd_recv`` has.
        sent_before_grads: sends of this rank that must have arrived once ``bwd_recv`` has.
        values: of the step.
    """

    stage: Stage
    microbatch: int
    is_first: bool
    is_last: bool
    to_previous: Link | None
    to_next: Link | None
    sent_before_input: Sequence[Action]
    sent_before_grads: Sequence[Action]
    previous: _Slot | None = None
    next: _Slot | None = None
    values: _StepValues = field(default_factory=_StepValues)


@final
class Executor:
    """Runs a lowered schedule with the stages of this rank and their links, both by stage index.

    Events show ``world_rank``, which may differ from the ``rank`` in the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        to_previous: Mapping[int, Link],
        to_next: Mapping[int, Link],
        world_rank: int,
    ) -> None:
        self._world_rank, self._stages = world_rank, stages
        # Up to 2p - 1 sends wait for a message in the warm-up of ZB-H2, the longest of the
        # schedules with bounded memory; more are polled.
        self._pending_sends = PendingSends(max_unpolled=2 * schedule.num_ranks)
        complete = sends_complete_at(schedule, rank)
        self._slots = {
            (index, i): _Slot(
                stage,
                i,
                is_first=index == 0,
                is_last=index == schedule.num_stages - 1,
                to_previous=to_previous.get(index),
                to_next=to_next.get(index),
                sent_before_input=complete.get(
                    Action(kind=Kind.RECV_F, microbatch=i, stage=index), ()
                ),
                sent_before_grads=complete.get(
                    Action(kind=Kind.RECV_B, microbatch=i, stage=index), ()
                ),
            )
            for index, stage in stages.items()
            for i in range(schedule.num_microbatches)
        }
        for (index, i), slot in self._slots.items():
            slot.previous = self._slots.get((OUTPUT.source(index), i))
            slot.next = self._slots.get((OUTPUT.target(index), i))
        self._program = [
            (action, int(_ACTIVITIES.get(action.kind, Activity.OTHER)), self._bind(action))
            for item in schedule.orders[rank]
            for action in item.parts
        ]
        self.peak_num_alive = 0  # microbatches of stages whose activations were held at once
        self._reset(_NO_BATCH)

    def _bind(self, action: Action) -> Callable[[], None]:
        """The call that carries out an action."""
        kind, i, stage = action
        if i is None:
            parallel = self._stages[stage].data_parallel
            return {
                Kind.UNSHARD: parallel.unshard,
                Kind.RESHARD: parallel.reshard,
                Kind.REDUCE: parallel.reduce_gradients,
            }[kind]
        slot = self._slots[stage, i]
        match kind:
            case Kind.RECV_F:
                return partial(self._recv_forward, slot)
            case Kind.F:
                return partial(self._forward, slot)
            case Kind.SEND_F:
                return partial(self._send_forward, action, slot)
            case Kind.RECV_B:
                return partial(self._recv_backward, slot)
            case Kind.B:
                return partial(self._backward, slot.stage.backward, slot)
            case Kind.I:
                return partial(self._backward, slot.stage.backward_input, slot)
            case Kind.SEND_B:
                return partial(self._send_backward, action, slot)
            case Kind.W:
                return partial(slot.stage.backward_weight, i)
        raise AssertionError(f"{kind} has no microbatch")

    def _reset(self, batch: Batch) -> None:
        self._batch = batch
        self._start_s: float | None = None  # when the current action began, if somebody listens
        self._waited_s = 0.0  # from then until the value that it received had arrived
        self._recent: deque[Action] = deque(maxlen=_NUM_LISTED)
        self._pending_sends.forget()

    def run(self, batch: Batch, *, finalize: bool = True) -> None:
        """Carry out all actions; without ``finalize`` gradients are not reduced.

        An exception of a stage or of the loss is a ``StageError`` that names the action and those
        before it. Afterwards nothing of the step is held, also if it failed.
        """
        self._reset(batch)
        self.peak_num_alive = 0
        clock = rank_time.current()
        before = rank_time.NOTHING if clock is None else clock.begin_stages()
        try:
            for action, activity, run in self._program:
                if action.kind is Kind.REDUCE and not finalize:
                    continue
                if clock is not None:
                    clock.begin(activity)
                if events.listening():
                    self._run_timed(action, run)
                else:
                    self._run_action(action, run)
            if batch.training and batch.losses and not batch.has_graph:
                raise ArgumentError(
                    "the loss depends on nothing that requires a gradient, in any microbatch, so "
                    "step() would train nothing: loss_fn or a stage takes its values out of the "
                    "graph (by detach(), item() or torch.no_grad()), or all parameters are frozen. "
                    "Let it depend on them, or use eval_step(), which trains nothing"
                )
            # Some sends are not known to be complete by any message that was received.
            self._wait_for_sends()
            # Other ranks may still read sharded parameters, which the optimizer may write next.
            # A reduction has waited for them already.
            if not (batch.training and finalize):
                for stage in self._stages.values():
                    stage.data_parallel.wait_for_readers()
            assert not batch.training or self._is_empty()
        except BaseException:
            self._drop_step()
            raise
        finally:
            self._reset(_NO_BATCH)
            if clock is not None:
                clock.end(before)

    def _drop_step(self) -> None:
        """Forget what a step that failed holds."""
        for stage in self._stages.values():
            stage.forget()
        for slot in self._slots.values():
            slot.values = _StepValues()

    def _is_empty(self) -> bool:
        is_alive = any(stage.num_alive for stage in self._stages.values())
        values = [slot.values for slot in self._slots.values()]
        return not is_alive and values.count(_StepValues()) == len(values)

    def _run_timed(self, action: Action, run: Callable[[], None]) -> None:
        """Run an action, and emit how long it took and how much of that was waiting."""
        start_s = self._start_s = time.perf_counter()
        self._waited_s = 0.0
        try:
            self._run_action(action, run)
        finally:
            events.emit(
                "pipeline.action",
                start_s,
                time.perf_counter() - start_s,
                rank=self._world_rank,
                action=str(action),
                kind=action.kind,
                training=self._batch.training,
                waited_s=self._waited_s,
            )

    def _run_action(self, action: Action, run: Callable[[], None]) -> None:
        try:
            run()
        except (CommError, ModelMismatch, WorldError) as error:  # no stage is at fault
            error.add_note(f"in action {action}, after {self._last_actions()}")
            raise
        except Exception as error:
            raise StageError(
                action.stage, action.microbatch, str(action), list(map(str, self._recent)), error
            ) from error
        self._recent.append(action)

    def _last_actions(self) -> str:
        return " ".join(map(str, self._recent)) or "none"

    # [1] to [3]: forward ---------------------------------------------------------------------

    def _recv_forward(self, slot: _Slot) -> None:
        assert slot.to_previous is not None
        slot.values.fwd_recv = slot.to_previous.recv_forward(slot.microbatch, self._batch.specs)

    def _forward(self, slot: _Slot) -> None:
        batch, stage, i = self._batch, slot.stage, slot.microbatch
        value = batch.inputs[i] if slot.is_first else self._take_input(slot)
        kwargs = batch.kwargs[i] if batch.kwargs else {}
        with torch.set_grad_enabled(batch.training):
            if not slot.is_last:
                self._pass_to_next(slot, stage.forward(i, value, kwargs))
            elif batch.loss_fn is None:
                batch.outputs[i] = stage.forward(i, value, kwargs).unflatten()
            else:
                loss = stage.loss(i, value, kwargs, partial(batch.loss, i))
                weight = batch.weights[i]  # the mean of a loss over no targets is NaN
                batch.losses[i] = loss.detach() * weight if weight else torch.zeros_like(loss)
                batch.has_graph |= loss.requires_grad
        num_alive = sum(stage.num_alive for stage in self._stages.values())
        self.peak_num_alive = max(self.peak_num_alive, num_alive)

    def _take_input(self, slot: _Slot) -> Any:
        values = slot.values
        if values.fwd_recv is None:
            value, values.fwd_input = values.fwd_input, None
            assert value is not None
        else:
            recv, values.fwd_recv = values.fwd_recv, None
            value = self._timed_wait(recv.wait, slot.sent_before_input)
        if self._batch.training:
            values.input_specs = value.spec.requiring_grad
        return value.unflatten()

    def _timed_wait(
        self, wait: Callable[[], _Received], sent_before: Sequence[Action]
    ) -> _Received:
        """Wait for a value, and release what was sent before it.

        ``waited_s`` of the event counts from the start of the action.
        """
        value = wait()
        if self._start_s is not None:
            self._waited_s = time.perf_counter() - self._start_s
        self._pending_sends.release(sent_before)
        return value

    def _pass_to_next(self, slot: _Slot, output: BoundaryValue) -> None:
        """Keep the output for its send, or give it to the next stage on this rank."""
        values = slot.values
        if self._batch.training:
            values.output_specs = output.spec.requiring_grad
        if slot.next is not None:
            output.require_grad()
            slot.next.values.fwd_input = output
            return
        values.output = output
        if values.is_bwd_recv_due:
            values.is_bwd_recv_due = False
            self._recv_backward(slot)

    def _send_forward(self, action: Action, slot: _Slot) -> None:
        assert slot.to_next is not None
        output, slot.values.output = slot.values.output, None
        assert output is not None
        send = slot.to_next.send_forward(slot.microbatch, output, self._batch.specs)
        self._pending_sends.add(action, send)

    # [4] to [7]: backward --------------------------------------------------------------------

    def _recv_backward(self, slot: _Slot) -> None:
        assert slot.to_next is not None
        specs = slot.values.output_specs
        if specs is None:
            slot.values.is_bwd_recv_due = True
        else:
            slot.values.bwd_recv = slot.to_next.recv_backward(
                slot.microbatch, specs, self._batch.specs
            )

    def _backward(
        self,
        backward: Callable[[int, list[Tensor | None]], list[Tensor | None]],
        slot: _Slot,
    ) -> None:
        grads = backward(slot.microbatch, self._take_output_grads(slot))
        if slot.is_first:
            return
        specs = slot.values.input_specs
        assert specs is not None
        if not grads:  # the stage did not receive any gradient
            grads = [None] * len(specs)
        if slot.previous is None:
            slot.values.input_grads = grads
        else:
            slot.values.input_specs, slot.previous.values.output_grads = None, grads

    def _take_output_grads(self, slot: _Slot) -> list[Tensor | None]:
        if slot.is_last:
            i = slot.microbatch
            weight = self._batch.weights[i]  # 0: the loss may be NaN, and its gradients, too
            # The gradient of the weighted loss, without a multiplication in the graph.
            return [torch.full_like(self._batch.losses[i], weight) if weight else None]
        values = slot.values
        values.output_specs = None
        if values.bwd_recv is None:
            grads, values.output_grads = values.output_grads, None
            assert grads is not None
            return grads
        recv, values.bwd_recv = values.bwd_recv, None
        return self._timed_wait(recv.wait, slot.sent_before_grads)

    def _send_backward(self, action: Action, slot: _Slot) -> None:
        assert slot.to_previous is not None
        specs, grads = slot.values.input_specs, slot.values.input_grads
        slot.values.input_specs = slot.values.input_grads = None
        assert specs is not None
        assert grads is not None
        send = slot.to_previous.send_backward(slot.microbatch, specs, grads, self._batch.specs)
        self._pending_sends.add(action, send)

    def _wait_for_sends(self) -> None:
        try:
            self._pending_sends.wait()
        except CommError as error:
            error.add_note(f"at the end of its actions, after {self._last_actions()}")
            raise
