"""Which samples a rank reads next: its part of each batch, and how far the whole job is.

A number of samples that all ranks together have consumed says where the job stands in its order,
so that another number of ranks can go on from there.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, TypeVar, final

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from echelon.checks import integer
from echelon.comm.group import Group
from echelon.errors import ArgumentError, RankError, StateError
from echelon.train.sample_order import SampleOrder

Batch = TypeVar("Batch")

_BLOCK = 1024  # positions that are looked up together: each look-up costs half a millisecond
_END = object()
_USE_AS = "give DataLoader(dataset, batch_sampler=sampler)"


class _Reading:
    """One way through a loader, from a position to the end of the epoch."""

    def __init__(self, epoch: int, position: int, single: bool) -> None:
        self.epoch, self.position = epoch, position
        self.single = single  # whether the loader asks for samples one by one
        self.opening = True  # whether the loader may still ask for an iterator
        self.num_drawn = 0  # batches that the loader has asked for
        self.num_given = 0  # of them, those that it has delivered


@final
class ResumableSampler(Sampler[Any]):
    """The batches of one rank, in an order that does not depend on the number of ranks.

    A batch of ``batch_size`` samples is cut over the ranks: rank 0 takes the first of them. Where
    the size does not divide, lower ranks have one sample more; ``weight`` makes the mean over
    ranks the mean over samples. Loop over ``batches(loader)``, which counts what the loop has
    taken, not what the loader has read ahead; the loader itself refuses to be iterated.

    Law: in each epoch every sample is taken exactly once (with ``drop_last``: at most once), in
    the same order on any number of ranks, however often the job stops and goes on.

    It draws from no global generator, and the loader that it reads from does not either.

    Args:
        num_samples: of the data set.
        batch_size: samples of a step, over all ranks; at least one a rank.
        group: the ranks that share a batch (of a mesh, the data-parallel axis), or this one's
            ``(rank, size)``. Ranks of a group compare their states when they begin to read.
        seed: of the order; each epoch has its own.
        shuffle: whether to shuffle at all.
        drop_last: whether the last batch of an epoch is left out if it is not full. Otherwise it
            is short; a rank for which it has no sample gets None.

    Raises:
        ArgumentError: the batch has fewer samples than there are ranks, or an epoch has no batch.

    Example:
        >>> data = torch.arange(7)
        >>> sampler = ResumableSampler(len(data), 4, (0, 1), shuffle=False)
        >>> loader = DataLoader(data, batch_sampler=sampler)
        >>> first = next(sampler.batches(loader))
        >>> for rank in range(2):
        ...     part = ResumableSampler(len(data), 4, (rank, 2), shuffle=False)
        ...     part.load_state_dict(sampler.state_dict())
        ...     print(list(part.batches(DataLoader(data, batch_sampler=part))))
        [tensor([4, 5])]
        [tensor([6])]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        group: Group | tuple[int, int],
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self._order = SampleOrder(
            num_samples=num_samples,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self._group = group if isinstance(group, Group) else None
        self._rank, self._size = _rank_and_size(group)
        if batch_size < self._size:
            raise ArgumentError(
                f"a batch of {batch_size} samples has none for some of {self._size} ranks: "
                f"batch_size counts those of all ranks, so give at least {self._size}"
            )
        self._epoch = self._position = 0
        self._reading: _Reading | None = None
        self._weight: float | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; once the loop has the last of one, that is the next."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch all ranks together have consumed."""
        return self._position

    @property
    def num_batches(self) -> int:
        """How many batches a whole epoch has, on every rank."""
        return self._order.num_batches

    @property
    def weight(self) -> float:
        """What this rank's mean counts in the mean over ranks, for the batch in hand.

        The gradient of ``sampler.weight * loss``, averaged over ranks, is that of the mean over all
        samples of the batch, also where ranks have unequal parts of it. 1 where they are equal, 0
        where this rank got None.
        """
        if self._weight is None:
            raise StateError("weight is that of a batch: ask in the loop over batches(loader)")
        return self._weight

    def batches(self, loader: Iterable[Batch], epochs: int | None = 1) -> Iterator[Batch | None]:
        """What ``loader`` makes of the batches, from where the job stands to the end of an epoch.

        A batch counts as consumed when the loop gets it, so save after its step. A loop that was
        left early goes on where it was left.

        Args:
            loader: a ``DataLoader`` with this sampler as ``batch_sampler=``, or as ``sampler=``
                with the ``batch_size`` of one rank; or anything else that iterates over this
                sampler, which then gives lists of samples.
            epochs: how many to go through, counting the one that has begun; None: no end.

        Raises:
            ArgumentError: the loader reads other samples than this sampler names, or in no order.
            StateError: the ranks of the group stand at different positions.
        """
        if epochs is not None:
            integer("epochs", epochs, low=1)
        single = self._is_single(loader)
        if self._group is not None:
            self._check_agreement(self._group)
        return self._batches(loader, single, epochs)

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, the same on every rank, and what it must be continued with.

        Whole numbers and bools by name, fit for JSON.
        """
        return {**asdict(self._order), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that any number of ranks has saved.

        Raises:
            ArgumentError: it is no such state, or one of another data set, batch size, seed or
                order; nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise ArgumentError(f"state is {state!r:.80}; give what state_dict() returned")
        expected = self.state_dict()
        if set(state) != set(expected):
            raise ArgumentError(
                f"this is no state of a ResumableSampler: it has {sorted(map(str, state))}, "
                f"not {sorted(expected)}"
            )
        differs = [
            f"{name} is {state[name]!r:.80} there and {value!r} here"
            for name, value in asdict(self._order).items()
            if type(state[name]) is not type(value) or state[name] != value
        ]
        if differs:
            raise ArgumentError(
                f"the state is of another order of samples: {', '.join(differs)}. To go on from it "
                "would repeat some samples and drop others: use what it was saved with"
            )
        epoch = integer("epoch of the state", state["epoch"])
        position = integer("position of the state", state["position"], high=self._order.end - 1)
        if position % self._order.batch_size:
            raise ArgumentError(
                f"position of the state is {position}, inside a batch of {self._order.batch_size}"
            )
        self._epoch, self._position = epoch, position
        self._reading = self._weight = None

    def __len__(self) -> int:
        """Batches of a whole epoch, as ``num_batches``, so ``len(loader)`` is that.

        A loader with this sampler as ``sampler=`` counts samples, and makes batches of them itself:
        it gets the number of samples of this rank.
        """
        if sys._getframe(1).f_code is BatchSampler.__len__.__code__:
            num_full, rest = divmod(self._order.end, self._order.batch_size)
            full, last = range(self._order.batch_size), range(rest)
            return num_full * len(self._share(full)) + len(self._share(last))
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        """For the loader that ``batches`` reads from.

        Raises:
            StateError: nobody reads through ``batches``.
        """
        reading = self._reading
        if reading is None or not reading.opening:
            raise StateError(
                "a loader reads ahead, so this sampler cannot know which samples were used: "
                "write `for batch in sampler.batches(loader)`, not `for batch in loader`"
            )
        lists = self._lists(reading)
        yield from chain.from_iterable(lists) if reading.single else lists

    def _batches(
        self, loader: Iterable[Batch], single: bool, epochs: int | None
    ) -> Iterator[Batch | None]:
        num_read = 0
        while epochs is None or num_read < epochs:
            yield from self._rest_of_epoch(loader, _Reading(self._epoch, self._position, single))
            num_read += 1

    def _rest_of_epoch(self, loader: Iterable[Batch], reading: _Reading) -> Iterator[Batch | None]:
        self._reading = reading
        try:
            with self._own_draws():
                iterator = iter(loader)
            for whole_batch in self._order.batches(reading.position):
                share = self._share(whole_batch)
                batch = self._next(iterator, reading) if share else None
                self._weight = len(share) * self._size / len(whole_batch)
                at_end = whole_batch.stop == self._order.end
                self._epoch, self._position = (
                    (reading.epoch + 1, 0) if at_end else (reading.epoch, whole_batch.stop)
                )
                yield batch
                if self._reading is not reading:
                    raise StateError(
                        "this loop over batches was overtaken: load_state_dict() or another call "
                        "of batches() has moved the sampler. Go on with the newest loop"
                    )
            if next(iterator, _END) is not _END:
                raise StateError(f"the loader gives more batches than it asks for: {_USE_AS}")
        finally:
            if self._reading is reading:
                self._reading = self._weight = None

    def _next(self, iterator: Iterator[Batch], reading: _Reading) -> Batch:
        """The next batch of the loader, which must be one that it has asked for."""
        batch: Any = next(iterator, _END)
        reading.opening = False
        if batch is _END:
            raise StateError(
                f"the loader ended after {reading.num_given} batches, before the epoch did: give "
                "one that leaves out no batch, and that can be iterated again"
            )
        reading.num_given += 1
        if reading.num_given > reading.num_drawn:
            raise StateError(f"the loader gives batches that it never asked for: {_USE_AS}")
        delivered: Batch = batch
        return delivered

    def _lists(self, reading: _Reading) -> Iterator[list[int]]:
        """This rank's samples of each batch; batches in which it has none are left out."""
        shares = filter(None, map(self._share, self._order.batches(reading.position)))
        num_together = max(1, _BLOCK * self._size // self._order.batch_size)
        while block := list(islice(shares, num_together)):
            positions = list(chain.from_iterable(block))
            samples = iter(self._order.samples(reading.epoch, positions))
            for share in block:
                reading.num_drawn += 1
                yield list(islice(samples, len(share)))

    def _share(self, batch: range) -> range:
        """This rank's positions of a batch; of a shorter batch never more than of a longer one."""
        each, more = divmod(len(batch), self._size)
        start = batch.start + self._rank * each + min(self._rank, more)
        return range(start, start + each + (self._rank < more))

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Let a loader draw the seed of its workers from here, not from the global generator.

        Or a job that goes on inside an epoch would draw once more than one that did not stop.
        """
        where = (self._order.seed, self._epoch, self._position, self._rank)
        digest = hashlib.shake_256(f"workers {where}".encode()).digest(8)
        generator = vars(torch.random)["default_generator"]  # of a simulated rank, its own
        before = generator.get_state()
        generator.manual_seed(int.from_bytes(digest, "little"))
        try:
            yield
        finally:
            generator.set_state(before)

    def _is_single(self, loader: object) -> bool:
        """Whether ``loader`` asks for samples one by one; refuse one that reads others."""
        if not isinstance(loader, DataLoader):
            if not isinstance(loader, Iterable):
                raise ArgumentError(f"loader is {loader!r:.80}: {_USE_AS}")
            return False
        dataset, num_samples = loader.dataset, self._order.num_samples
        if isinstance(dataset, Sized) and len(dataset) != num_samples:
            raise ArgumentError(
                f"the data set of the loader has {len(dataset)} samples, and this sampler was made "
                f"for {num_samples}: give both the same"
            )
        if not loader.in_order:
            raise ArgumentError("the loader has in_order=False: nobody would know what was used")
        if loader.batch_sampler is self or (loader.sampler is self and loader.batch_size is None):
            return False
        if loader.sampler is not self:
            kind = type(loader.sampler).__name__
            raise ArgumentError(f"the loader reads from a {kind}, not from this one: {_USE_AS}")
        share = len(self._share(range(self._order.batch_size)))
        if loader.batch_size != share or (loader.drop_last and not self._order.drop_last):
            raise ArgumentError(
                f"the loader has batch_size={loader.batch_size}, drop_last={loader.drop_last}. "
                f"This rank's part of a batch is {share}, and the sampler decides about the last "
                f"one: {_USE_AS}"
            )
        return True

    def _check_agreement(self, group: Group) -> None:
        states = group.all_gather_object(self.state_dict())
        if any(state != states[0] for state in states):
            rows = "\n".join(f"  rank {rank}: {state}" for rank, state in enumerate(states))
            raise StateError(
                f"the ranks of group {group.name!r} do not read the same data:\n{rows}\n"
                "Make the sampler alike on all of them, and load the same state."
            )


def _rank_and_size(group: object) -> tuple[int, int]:
    if isinstance(group, Group):
        return group.rank, group.size
    if not isinstance(group, tuple) or len(group) != 2:
        raise ArgumentError(
            f"group is {group!r:.80}; give a Group such as world.group or mesh['dp'], "
            "or a tuple (rank, size)"
        )
    size = integer("size", group[1], low=1)
    rank = integer("rank", group[0])
    if rank >= size:
        raise RankError("rank", rank, size)
    return rank, size
