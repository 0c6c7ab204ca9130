"""Which parameters are trained now, and whether all ranks have frozen the same ones.

[Note: when freezing is compared]
A rank cannot know by itself whether the others froze or thawed what it did, and an exchange that
only some ranks issue is a hang. So each rank adds "mine changed" to something that all of them
reduce anyway: DDP to the last bucket, FSDP to the list of parameters that got a gradient. All ranks
read the same answer, and compare names if it is not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import final

from torch import Tensor, nn

from echelon.comm import streams
from echelon.comm.agreement import ObjectGatherer, compare

_requires_grad = attrgetter("requires_grad")


@final
class Trainable:
    """Whether each parameter of a model requires a gradient, as its ranks have last agreed."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], ranks: ObjectGatherer) -> None:
        self._names = [name for name, _ in named]
        self._params = [param for _, param in named]
        self._ranks = ranks
        self._agreed = self._now()
        self._answer: tuple[Tensor, streams.StreamEvent] | None = None

    def _now(self) -> list[bool]:
        return list(map(_requires_grad, self._params))

    def changed(self) -> bool:
        """Whether this rank has frozen or thawed something since the ranks agreed."""
        return self._now() != self._agreed

    def hear(self, answer: Tensor) -> None:
        """Take what a reduction has made of the ranks' ``changed``: zero if none has changed."""
        host = streams.host_memory(1, answer.dtype, answer.device)
        host.copy_(answer, non_blocking=True)
        self._answer = host, streams.new_stream(answer.device, own=False).record_event()

    def compare(self, *, at_once: bool, has_batch: bool = True) -> None:
        """Compare with the other ranks, if one of them has changed. All ranks call it.

        Args:
            at_once: else only if the answer need not be waited for or this rank has changed; the
                next call does it then.
            has_batch: whether this rank still trains; if not, it takes the others' opinion.

        Raises:
            ModelMismatch: on every rank; names the parameter and who has frozen it.
        """
        if self._answer is None:
            return
        answer, event = self._answer
        if not (at_once or event.query() or self.changed()):
            return
        self._answer = None
        event.synchronize()
        if not bool(answer):
            return
        frozen = [n for n, trained in zip(self._names, self._now(), strict=True) if not trained]
        told = self._ranks.all_gather_object(frozen if has_batch else None)
        usual = next(theirs for theirs in told if theirs is not None)
        known = set(usual)
        self._agreed = [name not in known for name in self._names]
        compare(
            "whether they train parameter",
            [self._facts(usual if theirs is None else theirs) for theirs in told],
            "Freeze and thaw the same parameters on every rank.",
        )

    def _facts(self, frozen: Sequence[str]) -> dict[str, str]:
        names = set(frozen)
        return {name: "frozen" if name in names else "trained" for name in self._names}
