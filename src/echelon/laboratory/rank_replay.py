"""What a black box does in a replay: it gives one rank the batches of the run, up to a step.

[Note: what a step reads]
The state before the first step is loaded from the checkpoint. Before each step the random streams
are set to what they were in the run, since the loader, which may have drawn from them, does not run
again. So a step computes the same bits if all that it reads is in the model, in the other objects
that the box was given, in the batch, in the number of the step, or in the random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.checkpoint.api import load
from echelon.checkpoint.random_states import RandomStates
from echelon.comm.group import Group
from echelon.comm.world import World
from echelon.errors import BlackboxCorrupt, CheckpointCorrupt, ReplayMismatch
from echelon.laboratory.kept_run import KeptSteps


class StepReplayed(BaseException):
    """Ends a rank after the step that was to be replayed; no error."""


class NoteDifference(NamedTuple):
    """A number that is another one in the replay.

    Attributes:
        rank: on which rank.
        step: of which step.
        name: under which it was noted.
        then: the number in the run, as text.
        now: the number in the replay, as text.
    """

    rank: int
    step: int
    name: str
    then: str
    now: str

    def __str__(self) -> str:
        return (
            f"step {self.step}, rank {self.rank}: {self.name} was {self.then} in the run and is "
            f"{self.now} in the replay"
        )


@final
class RankReplay:
    """The replay of a step on one rank.

    Args:
        kept: what the run has left.
        world: of the rank.
        batch: what has the batch that the last step gets; None for its own.

    Attributes:
        step: the number of the step under way; 0 before the first.
        has_ended: whether the last step has ended without an error.
        num_compared: how many noted numbers were compared with those of the run.
        differences: those that are others.
    """

    def __init__(self, kept: KeptSteps, world: World, batch: KeptSteps | None = None) -> None:
        self._kept, self._world, self._batch = kept, world, batch
        self.step = 0
        self.has_ended = False
        self.num_compared = 0
        self.differences: list[NoteDifference] = []
        self._num_notes = 0  # of this step
        self._random: dict[str, Any] = {}  # the states before this step

    @classmethod
    def of(cls, world: World) -> RankReplay | None:
        """The replay that a rank takes part in; None in a run."""
        replay = world.group.belongings.get(cls)
        assert replay is None or isinstance(replay, cls)
        return replay

    @property
    def is_at_step(self) -> bool:
        """Whether the step that was asked for is under way."""
        return self.step == self._kept.step and not self.has_ended

    def steps(
        self,
        items: Mapping[str, object],
        group: Group,
        build: Callable[..., Any] | None,
    ) -> Iterator[tuple[int, Any]]:
        """The numbers and the batches of the steps up to the one to replay, where it ends.

        Raises:
            StepReplayed: after the last step.
            ReplayMismatch: the script has made a box for another number of ranks.
            CheckpointMismatch: it has built another model or other objects.
        """
        kept = self._kept
        if group.size != kept.facts.ranks:
            pair = (str(kept.facts.ranks), str(group.size))
            raise ReplayMismatch(kept.run, {"number of ranks": pair})
        load(kept.checkpoint, rng=False, group=group, **items)  # type: ignore[arg-type]
        for step in range(kept.first_step, kept.step + 1):
            record = kept.begin(group.rank, step)
            self._restore(record, group)
            if step == kept.step and self._batch is not None:
                record = self._batch.begin(group.rank, self._batch.step)
            self.step, self._num_notes = step, 0
            batch = record["batch"]
            yield step, batch if build is None else build(**batch)
        group.barrier(label="the step is replayed")
        self.has_ended = True
        raise StepReplayed

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Compare numbers of the current step with those that the run has noted."""
        if self._batch is not None and self.is_at_step:
            return
        recorded = self._kept.notes(self._world.rank, self.step)
        if self._num_notes < len(recorded):
            then = recorded[self._num_notes]
            for name, number in numbers.items():
                self.num_compared += 1
                if not are_same_bits(then.get(name), number):
                    self.differences.append(
                        NoteDifference(
                            self._world.rank, self.step, name, _text(then.get(name)), _text(number)
                        )
                    )
        self._num_notes += 1

    def _restore(self, record: Mapping[str, Any], group: Group) -> None:
        """Set the random streams. A record has the states that have changed since the one before.

        Raises:
            BlackboxCorrupt: it has none.
        """
        changed, world_step = record.get("random"), record.get("world_step")
        if not isinstance(changed, dict) or type(world_step) is not int or "batch" not in record:
            raise BlackboxCorrupt("has a step that is none", self._kept.run)
        self._random |= changed
        try:
            states = RandomStates.of(self._random, group.device, self._kept.run)
        except CheckpointCorrupt as error:
            raise BlackboxCorrupt(str(error), self._kept.run) from error
        states.restore(group.device)
        self._world.step = int(world_step)


def are_same_bits(first: object, second: object) -> bool:
    """Whether two numbers, or tensors of numbers, have the same bits; a NaN equals itself."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        return torch.equal(_bits(first), _bits(second))
    if isinstance(first, float) and isinstance(second, float):
        return first.hex() == second.hex()
    return type(first) is type(second) and first == second


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _text(number: object) -> str:
    if isinstance(number, Tensor) and number.numel() == 1:
        number = number.item()
    return f"{number!r:.60}"
