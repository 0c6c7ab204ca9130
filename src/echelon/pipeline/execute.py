"""Runs the actions of one rank in the order of its schedule; one executor for every schedule.

There is one slot for each stage of this rank and each microbatch, and the actions move its values::

                   stage before           slot of the stage            stage after

    [1] RECV_F   ────────────────> fwd_recv
    [2] F                          fwd_recv or fwd_input ─> output
    [3] SEND_F                                              output ──────────────>
    [4] RECV_B                                            bwd_recv <──────────────
    [5] B or I       input_grads <─ bwd_recv or output_grads
    [6] SEND_B   <── input_grads
    [7] W            gradients of weights that I has put off

Where the next stage is on this rank, too, F fills the ``fwd_input`` of its slot and B the
``output_grads`` of the slot before, and nothing is sent. Law: the action that uses a value frees
it, and after a step all slots are empty.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor

from echelon import events
from echelon.errors import CommError, ModelMismatch, StageError, WorldError
from echelon.pipeline.boundary import BoundaryValue, TensorSpec
from echelon.pipeline.link import BackwardRecv, ForwardRecv, Link, PendingSend
from echelon.pipeline.microbatch import Batch
from echelon.pipeline.schedules.ir import Action, Kind, Schedule
from echelon.pipeline.send_completion import SendCompletion
from echelon.pipeline.stage import Stage

_NUM_LISTED = 20  # actions before a failure that its message lists
_NO_BATCH = Batch(inputs=(), kwargs=(), targets=(), weights=(), loss_fn=None, training=False)


@final
@dataclass(slots=True, eq=False)
class _Slot:
    """One stage and one microbatch: where its values go, and those that are there now.

    Attributes:
        is_first: whether the stage is the first of the model.
        is_last: whether the stage is the last of the model.
        to_previous: the link to the stage before; None if that is on this rank, or if none is.
        to_next: the link to the stage after; None if that is on this rank, or if none is.
        previous: the slot of the stage before, if that is on this rank.
        next: the slot of the stage after, if that is on this rank.
        sent_before_input: the sends that have arrived when ``fwd_recv`` has.
        sent_before_grads: the sends that have arrived when ``bwd_recv`` has.
    """

    stage: Stage
    microbatch: int
    is_first: bool
    is_last: bool
    to_previous: Link | None
    to_next: Link | None
    previous: _Slot | None = None
    next: _Slot | None = None
    sent_before_input: Sequence[Action] = ()
    sent_before_grads: Sequence[Action] = ()

    # Each of these is None outside of a step.
    fwd_recv: ForwardRecv | None = None
    fwd_input: BoundaryValue | None = None
    input_specs: tuple[TensorSpec, ...] | None = None  # of the inputs that get a gradient
    output: BoundaryValue | None = None
    output_specs: tuple[TensorSpec, ...] | None = None  # of the outputs that get a gradient
    bwd_recv_is_due: bool | None = None  # RECV_B came before F, which knows what to receive
    bwd_recv: BackwardRecv | None = None
    output_grads: list[Tensor | None] | None = None
    input_grads: list[Tensor | None] | None = None

    def is_empty(self) -> bool:
        """Whether no value of a step is left."""
        return _values_of(self) == _NO_VALUES

    def clear(self) -> None:
        """Drop what a failed step has left."""
        for name in _VALUES:
            setattr(self, name, None)


_VALUES = [value.name for value in fields(_Slot) if value.default is None]
_VALUES = _VALUES[_VALUES.index("fwd_recv") :]
_values_of, _NO_VALUES = attrgetter(*_VALUES), (None,) * len(_VALUES)


@final
class Executor:
    """The stages of one rank, and their links to stages on other ranks.

    Args:
        schedule: lowered: with its transfers.
        rank: the rank in the schedule.
        stages: those of this rank, by number.
        to_previous: by stage, the link to the stage before, where that is on another rank.
        to_next: by stage, the link to the stage after.
        world_rank: the rank in events.
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
        self._max_unpolled_sends = 2 * schedule.num_ranks
        self._slots = {
            (index, i): _Slot(
                stage,
                i,
                is_first=index == 0,
                is_last=index == schedule.num_stages - 1,
                to_previous=to_previous.get(index),
                to_next=to_next.get(index),
            )
            for index, stage in stages.items()
            for i in range(schedule.num_microbatches)
        }
        completion = SendCompletion.of(schedule, rank)
        for (index, i), slot in self._slots.items():
            slot.previous, slot.next = (
                self._slots.get((index - 1, i)),
                self._slots.get((index + 1, i)),
            )
            slot.sent_before_input = completion.by_input.get((index, i), ())
            slot.sent_before_grads = completion.by_gradient.get((index, i), ())
        self._program = [
            (action, self._bind(action)) for item in schedule.orders[rank] for action in item.parts
        ]
        self.most_alive = 0  # microbatches of stages whose activations were held at once
        self._reset(_NO_BATCH)

    def _bind(self, action: Action) -> Callable[[], None]:
        """What an action calls."""
        kind, i, stage = action
        if i is None:
            parallel = self._stages[stage].data_parallel
            return {
                Kind.UNSHARD: parallel.unshard,
                Kind.RESHARD: parallel.reshard,
                Kind.REDUCE: parallel.reduce_gradients,
            }[kind]
        slot = self._slots[stage, i]
        run: dict[Kind, Callable[[_Slot], None]] = {
            Kind.RECV_F: self._recv_forward,
            Kind.F: self._forward,
            Kind.SEND_F: partial(self._send_forward, action),
            Kind.RECV_B: self._recv_backward,
            Kind.B: partial(self._backward, slot.stage.backward),
            Kind.I: partial(self._backward, slot.stage.backward_input),
            Kind.SEND_B: partial(self._send_backward, action),
            Kind.W: self._backward_weight,
        }
        return partial(run[kind], slot)

    def _reset(self, batch: Batch) -> None:
        self._batch = batch
        self._waited_s = 0.0  # for what the action under way needs
        self._start_s = 0.0  # of the action under way, where somebody listens
        self._recent: deque[Action] = deque(maxlen=_NUM_LISTED)
        self._pending_sends: dict[Action, PendingSend] = {}  # the oldest first

    def run(self, batch: Batch, *, finalize: bool = True) -> None:
        """Carry out all actions; afterwards nothing of the step is held.

        Args:
            finalize: whether gradients are reduced.

        Raises:
            StageError: a stage or the loss raised; names the action and those before it.
        """
        self._reset(batch)
        self.most_alive = 0
        try:
            # 1. Every action of this rank, in the order of the schedule.
            for action, run in self._program:
                if action.kind is Kind.REDUCE and not finalize:
                    continue
                if events.listening():
                    self._run_timed(action, run)
                else:
                    self._run_action(action, run)
            # 2. The sends that no received message has told to be complete.
            self._wait_for_sends()
            # 3. The ranks that still read sharded parameters, which the optimizer may write next.
            #    A reduction has waited for them already.
            if not (batch.training and finalize):
                for stage in self._stages.values():
                    stage.data_parallel.wait_for_readers()
        except BaseException:
            for stage in self._stages.values():
                stage.forget()
            for slot in self._slots.values():
                slot.clear()
            self._reset(_NO_BATCH)
            raise
        # 4. Nothing is left over.
        assert not batch.training or self._is_empty()
        self._reset(_NO_BATCH)

    def _is_empty(self) -> bool:
        is_alive = any(stage.num_alive for stage in self._stages.values())
        return not is_alive and all(slot.is_empty() for slot in self._slots.values())

    def _run_timed(self, action: Action, run: Callable[[], None]) -> None:
        """Run an action, and tell listeners how long it took and how much of that was waiting."""
        self._waited_s, self._start_s = 0.0, time.perf_counter()
        try:
            self._run_action(action, run)
        finally:
            events.emit(
                "pipeline.action",
                self._start_s,
                time.perf_counter() - self._start_s,
                rank=self._world_rank,
                action=str(action),
                kind=action.kind,
                training=self._batch.training,
                waited_s=self._waited_s,
            )

    def _run_action(self, action: Action, run: Callable[[], None]) -> None:
        try:
            run()
        except (CommError, ModelMismatch, WorldError) as error:  # of the ranks, not of a stage
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
        training = self._batch.training
        slot.fwd_recv = slot.to_previous.recv_forward(slot.microbatch, training=training)

    def _forward(self, slot: _Slot) -> None:
        batch, stage, i = self._batch, slot.stage, slot.microbatch
        value = batch.inputs[i] if slot.is_first else self._take_input(slot)
        kwargs = batch.kwargs[i] if batch.kwargs else {}
        with torch.set_grad_enabled(batch.training):
            if not slot.is_last:
                self._hand_on(slot, stage.forward(i, value, kwargs))
            elif batch.loss_fn is None:
                batch.outputs[i] = stage.forward(i, value, kwargs).unflatten()
            else:
                loss = stage.loss(i, value, kwargs, partial(batch.loss, i))
                batch.losses[i] = loss * batch.weights[i]
        self.most_alive = max(self.most_alive, sum(s.num_alive for s in self._stages.values()))

    def _take_input(self, slot: _Slot) -> Any:
        if slot.fwd_recv is None:
            value, slot.fwd_input = slot.fwd_input, None
            assert value is not None
        else:
            recv, slot.fwd_recv = slot.fwd_recv, None
            value = recv.wait()
            self._waited_s = time.perf_counter() - self._start_s
            self._release_sends(slot.sent_before_input)
        if self._batch.training:
            slot.input_specs = value.spec.requiring_grad
        return value.unflatten()

    def _hand_on(self, slot: _Slot, output: BoundaryValue) -> None:
        """Keep the output for its send, or give it to the next stage on this rank."""
        if self._batch.training:
            slot.output_specs = output.spec.requiring_grad
        if slot.next is not None:
            output.require_grad()
            slot.next.fwd_input = output
            return
        slot.output = output
        if slot.bwd_recv_is_due:
            slot.bwd_recv_is_due = None
            self._recv_backward(slot)

    def _send_forward(self, action: Action, slot: _Slot) -> None:
        assert slot.to_next is not None
        output, slot.output = slot.output, None
        assert output is not None
        training = self._batch.training
        send = slot.to_next.send_forward(slot.microbatch, output, training=training)
        self._add_send(action, send)

    # [4] to [7]: backward --------------------------------------------------------------------

    def _recv_backward(self, slot: _Slot) -> None:
        assert slot.to_next is not None
        if slot.output_specs is None:
            slot.bwd_recv_is_due = True
        else:
            slot.bwd_recv = slot.to_next.recv_backward(slot.microbatch, slot.output_specs)

    def _backward(
        self,
        backward: Callable[[int, list[Tensor | None]], list[Tensor | None]],
        slot: _Slot,
    ) -> None:
        grads = backward(slot.microbatch, self._take_output_grads(slot))
        if slot.is_first:
            return
        assert slot.input_specs is not None
        if not grads:  # no gradient came to this stage
            grads = [None] * len(slot.input_specs)
        if slot.previous is None:
            slot.input_grads = grads
        else:
            slot.input_specs, slot.previous.output_grads = None, grads

    def _take_output_grads(self, slot: _Slot) -> list[Tensor | None]:
        if slot.is_last:
            i = slot.microbatch
            # The gradient of the weighted loss, without a multiplication in the graph.
            return [torch.full_like(self._batch.losses[i], self._batch.weights[i])]
        slot.output_specs = None
        if slot.bwd_recv is None:
            grads, slot.output_grads = slot.output_grads, None
            assert grads is not None
            return grads
        recv, slot.bwd_recv = slot.bwd_recv, None
        grads = recv.wait()
        self._waited_s = time.perf_counter() - self._start_s
        self._release_sends(slot.sent_before_grads)
        return grads

    def _send_backward(self, action: Action, slot: _Slot) -> None:
        assert slot.to_previous is not None
        specs, grads = slot.input_specs, slot.input_grads
        slot.input_specs = slot.input_grads = None
        assert specs is not None
        assert grads is not None
        self._add_send(action, slot.to_previous.send_backward(slot.microbatch, specs, grads))

    def _backward_weight(self, slot: _Slot) -> None:
        slot.stage.backward_weight(slot.microbatch)

    # Sends under way -------------------------------------------------------------------------

    def _add_send(self, action: Action, send: PendingSend) -> None:
        """Remember a send, after the oldest ones that are done were released."""
        pending = self._pending_sends
        while pending:
            oldest = next(iter(pending))
            if not pending[oldest].is_done(poll=len(pending) >= self._max_unpolled_sends):
                break
            pending.pop(oldest).wait()
        pending[action] = send

    def _release_sends(self, arrived: Sequence[Action]) -> None:
        """Free what was sent, now that it is known to be there."""
        for action in arrived:
            send = self._pending_sends.pop(action, None)
            if send is not None:
                send.wait()

    def _wait_for_sends(self) -> None:
        try:
            for send in self._pending_sends.values():
                send.wait()
        except CommError as error:
            error.add_note(f"at the end of its actions, after {self._last_actions()}")
            raise
