"""The gate at which simulated ranks are held after each call, until somebody lets them on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm.primitives import Receive, Send
from echelon.comm.threads.call_watch import CallWatch
from echelon.comm.threads.process_state import wait_for
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import StateError
from echelon.laboratory.data_moves import moves_of, tensors_of
from echelon.laboratory.stepped_call import SteppedCall
from echelon.laboratory.tensor_glance import Contents, TensorGlance
from echelon.pipeline.packed_message import PackedMessage, packed_message_at

# Calls of their own in which ranks agree on the size of an object or of bytes, before these move.
_LENGTHS_OF_OBJECTS = {
    "lengths of objects",
    "lengths of pickled objects",
    "lengths of bytes",
    "object length",
    "pickled object length",
}
_OBJECTS = {"objects", "object"}  # before a colon, after which the caller says what they are
_LOOK_S = 0.5  # how often a held rank looks whether the interpreter ends


@final
class StepGate(CallWatch):
    """Holds the ranks of a world when values have moved, and says what has.

    Args:
        world: whose ranks take turns.
        keep: the number of elements up to which values are kept whole.

    Attributes:
        call: at which the ranks are held; None if they run.
    """

    def __init__(self, world: ThreadWorld, keep: int) -> None:
        self._world, self._keep = world, keep
        self._changed = threading.Condition()
        self._held_threads = threading.Lock()  # a rank may communicate from several threads
        self._is_open = False
        self._number = 0
        self.call: SteppedCall | None = None

    @contextmanager
    def around(
        self, ranks: Sequence[int], calls: Sequence[CollectiveCall], operations: Sequence[Any]
    ) -> Iterator[None]:
        """See ``CallWatch``."""
        signature = calls[0].signature
        if self._is_open or _kind(signature.label) in _LENGTHS_OF_OBJECTS:
            yield
            return
        has_objects = _kind(signature.label) in _OBJECTS and signature.dtype is torch.uint8
        sender = signature.root if has_objects else None  # others have no object before
        before = [
            _RankTensors(operation, self._keep, has_objects, gives=sender in (None, rank))
            for rank, operation in enumerate(operations)
        ]
        yield
        with self._held_threads:
            self._number += 1
            self._hold(self._described(ranks, calls, operations, before))
            with self._world.lock:
                self._world.raise_failure(calls[-1])

    def let_on(self) -> None:
        """Let the ranks go on, if they are held."""
        with self._changed:
            self.call = None
            self._changed.notify_all()

    def open(self) -> None:
        """Let the ranks go on, and hold them no more."""
        self._is_open = True
        self.let_on()

    def end(self, error: BaseException) -> None:
        """Let the ranks go on into an error, which is told them where they communicate."""
        self._world.fail(-1, error)
        self.open()

    def end_at_exit(self) -> None:
        """The same at the end of the interpreter, which waits for the ranks."""
        self.end(StateError("the program has ended"))

    def wait(self, seconds: float) -> None:
        """Return when the ranks are held, or after some seconds."""
        with self._changed:
            if self.call is None:
                wait_for(self._changed, seconds)

    def _hold(self, call: SteppedCall) -> None:
        with self._world.order.held(), self._changed:
            if self._is_open:
                return
            self.call = call
            self._changed.notify_all()
            while self.call is call:
                wait_for(self._changed, _LOOK_S)

    def _described(
        self,
        ranks: Sequence[int],
        calls: Sequence[CollectiveCall],
        operations: Sequence[Any],
        before: Sequence[_RankTensors],
    ) -> SteppedCall:
        signature = calls[0].signature
        is_message = isinstance(operations[0], Send)
        seen = dict(zip(ranks, before, strict=True))
        shape, label = signature.shape, signature.label
        if is_message and (packed := packed_message_at(operations[0].tensor)) is not None:
            label = f"{packed.about}, {label}"
        if signature.op == "subgroup":
            shape = tuple(ranks[member] for member in shape)
        root = None if is_message or signature.root is None else ranks[signature.root]
        return SteppedCall(
            number=self._number,
            op=signature.op,
            reduce=signature.reduce,
            root=root,
            label=label,
            group=calls[0].group,
            ranks=tuple(ranks),
            dtype=signature.dtype,
            shape=shape,
            places={rank: call.place for rank, call in zip(ranks, calls, strict=True)},
            before={rank: s.before for rank, s in seen.items() if s.before is not None},
            after={rank: after for rank, s in seen.items() if (after := s.after()) is not None},
            changed={rank: s.changes() for rank, s in seen.items() if s.contents is not None},
            moves=moves_of(ranks, operations),
        )


def _kind(label: str | None) -> str:
    return (label or "").partition(":")[0]


@final
class _RankTensors:
    """What one rank has before a call, and how to look after it."""

    def __init__(self, operation: object, keep: int, has_objects: bool, *, gives: bool) -> None:
        self._tensors, self._keep = tensors_of(operation), keep
        self._has_objects = has_objects
        self.before: TensorGlance | None = None
        self.contents: Contents | None = None
        self._packed: PackedMessage | None = None
        if self._tensors is None:
            return
        if isinstance(operation, Send | Receive):
            self._packed = packed_message_at(operation.tensor)
        if gives:
            self.before = self._look(self._tensors.inputs)
        if self._tensors.in_place and (self._packed is None or isinstance(operation, Send)):
            self.contents = Contents(self._tensors.outputs, keep)

    def after(self) -> TensorGlance | None:
        if self._tensors is None:
            return None
        return self._look(self._tensors.outputs)

    def _look(self, parts: Sequence[Tensor]) -> TensorGlance:
        if self._packed is not None:
            views = [view.flatten() for view in self._packed.views if view is not None]
            parts = views if len({view.dtype for view in views}) == 1 else parts
        glance = TensorGlance.of(parts, self._keep)
        return glance.with_objects() if self._has_objects else glance

    def changes(self) -> list[tuple[int, int]]:
        return [] if self.contents is None else self.contents.changes()
