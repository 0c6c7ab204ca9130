"""The batches of one rank from a stream of samples, whose length nobody need know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, final

from torch.utils.data import default_collate

from echelon.checks import flag, function, integer
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError
from echelon.train.shares import (
    check_batch_size,
    check_same_data,
    epochs_left,
    rank_and_size,
    share_of,
    shares_of,
    weight_of,
)
from echelon.train.source_cursor import END, Source, SourceCursor


@final
class SampleStream:
    """The batches of one rank from a source that is read in order, such as a streamed data set.

    Every rank reads all samples of the source, so that their order does not depend on the number of
    ranks, and keeps its share of each batch. What costs time belongs into ``transform``, which gets
    the samples of this rank alone. To read in workers, give a ``StatefulDataLoader`` of torchdata
    with ``batch_size=None`` as the source.

    Law: in each epoch every sample is taken exactly once (with ``drop_last``: at most once), in the
    order of the source, on any number of ranks, however often the job is stopped and resumed.

    Args:
        source: an iterable that gives the same samples each time, or a function that makes one
            for an epoch. If it has ``set_epoch``, it is told the epoch. If it has ``state_dict``
            and ``load_state_dict``, a resumed job continues from its state; otherwise it reads the
            samples before its position once more.
        batch_size: the number of samples of a step on all ranks together; at least one per rank.
        group: the ranks that share a batch, or the tuple ``(rank, size)`` of this rank.
        drop_last: whether the last batch of an epoch is left out if it is not full. Otherwise it
            is short, and a rank for which it has no sample gets None.
        transform: called with each sample of this rank.
        collate: makes a batch of a list of samples.

    Raises:
        ArgumentError: the batch has fewer samples than there are ranks, or the source can be read
            only once.

    Example:
        >>> stream = SampleStream(range(7), 4, (0, 1))
        >>> next(stream.batches())
        tensor([0, 1, 2, 3])
        >>> for rank in range(2):
        ...     part = SampleStream(range(7), 4, (rank, 2))
        ...     part.load_state_dict(stream.state_dict())
        ...     print(list(part.batches()))
        [tensor([4, 5])]
        [tensor([6])]
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        group: Group | tuple[int, int],
        *,
        drop_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._batch_size = integer("batch_size", batch_size, low=1)
        flag("drop_last", drop_last)
        function("transform", transform, "a sample", or_none=True)
        function("collate", collate, "a list of samples")
        self._drop_last = drop_last
        self._transform, self._collate = transform, collate
        self._cursor = SourceCursor(source)
        self._group = group if isinstance(group, Group) else None
        self._rank, self._size = rank_and_size(group)
        check_batch_size(batch_size, self._size)
        self._shares: tuple[int, ...] = ()
        self._loop: object = None

    @property
    def group(self) -> Group | None:
        """The ranks that share a batch; None where the stream was given ``(rank, size)``."""
        return self._group

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, as far as is known: nobody knows the end before it."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch all ranks together have consumed."""
        return self._cursor.position

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of samples of the current batch that each rank has.

        Raises:
            StateError: it is read outside of the loop over ``batches``.
        """
        if not self._shares:
            raise StateError("the shares and the weight are those of a batch: ask in the loop")
        return self._shares

    @property
    def weight(self) -> float:
        """The weight of this rank's mean in the mean over ranks, as that of a sampler."""
        return weight_of(self.shares, self._rank)

    def batches(self, epochs: int | None = 1, *, total_epochs: int | None = None) -> Iterator[Any]:
        """The batches from the position of the job to the end of an epoch.

        A batch counts as consumed when the loop gets it, so save after its step.

        Args:
            epochs: the number of epochs, counting the one that has begun; None: no end.
            total_epochs: in place of ``epochs``: the number of epochs of the whole job, counting
                those before it was resumed. There is no batch if all of them are over.

        Raises:
            ArgumentError: both numbers of epochs are given.
            StateError: the ranks of the group are at different positions, or an epoch is empty.
        """
        epochs = epochs_left(epochs, total_epochs, self.epoch)
        if self._group is not None:
            self._check_agreement(self._group)
        return self._batches(epochs)

    def state_dict(self) -> dict[str, Any]:
        """The position of the job, which is the same on every rank, and the state of the source."""
        return {
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            **self._cursor.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that any number of ranks has saved.

        Raises:
            ArgumentError: it is not such a state, or has another batch size; nothing has changed
                then.
        """
        if not isinstance(state, Mapping) or not {"batch_size", "drop_last"} <= set(state):
            raise ArgumentError(f"state is {state!r:.80}; give what state_dict() returned")
        inner = dict(state)
        there = inner.pop("batch_size"), inner.pop("drop_last")
        here = self._batch_size, self._drop_last
        if there != here:
            raise ArgumentError(
                f"the state is of batches with batch_size, drop_last = {there}, and they are "
                f"{here} here: use what it was saved with"
            )
        self._cursor.load_state_dict(inner)
        self._loop, self._shares = None, ()

    def _batches(self, epochs: int | None) -> Iterator[Any]:
        loop = self._loop = object()
        num_read = 0
        try:
            while epochs is None or num_read < epochs:
                yield from self._rest_of_epoch(loop)
                num_read += 1
        finally:
            if self._loop is loop:
                self._loop, self._shares = None, ()

    def _rest_of_epoch(self, loop: object) -> Iterator[Any]:
        cursor, is_empty = self._cursor, self._cursor.position == 0
        epoch, at_end = cursor.epoch, False
        while not at_end:
            samples = list(islice(iter(cursor.read, END), self._batch_size))
            at_end = len(samples) < self._batch_size
            if not samples or (at_end and self._drop_last):
                break
            is_empty = False
            self._shares = shares_of(len(samples), self._size)
            share = [samples[i] for i in share_of(range(len(samples)), self._rank, self._size)]
            if self._transform is not None:
                share = [self._transform(sample) for sample in share]
            yield self._collate(share) if share else None
            if self._loop is not loop:
                raise StateError(
                    "this loop over batches was overtaken: load_state_dict() or another call of "
                    "batches() has moved the stream. Go on with the newest loop"
                )
        if is_empty:
            raise StateError(f"the source has no batch of {self._batch_size} in epoch {epoch}")

    def _check_agreement(self, group: Group) -> None:
        place = {
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            "epoch": self.epoch,
            "position": self.position,
        }
        check_same_data(group, place, "stream")
