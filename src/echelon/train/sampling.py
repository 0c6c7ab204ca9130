"""Which samples a rank reads next: its part of each batch, and how far the whole job is.

The state is the number of samples that all ranks together have consumed. It does not depend on the
number of ranks, so a job can be resumed on another number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any, TypeVar, cast, final

from torch.utils.data import BatchSampler, DataLoader, Sampler

from echelon.checks import integer
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError
from echelon.train.sample_order import SampleOrder
from echelon.train.shares import (
    check_batch_size,
    check_same_data,
    epochs_left,
    rank_and_size,
    share_of,
    shares_of,
    weight_of,
)
from echelon.train.worker_seed import seeded_workers

Batch = TypeVar("Batch")

_BLOCK = 1024  # positions that are looked up together: each look-up costs half a millisecond
_END = object()
_USE_AS = "give DataLoader(dataset, batch_sampler=sampler)"


@dataclass(slots=True)
class _EpochPass:
    """One pass through a loader, from a position to the end of the epoch.

    Attributes:
        samples_singly: whether the loader asks for samples, not for lists of them.
        is_opening: whether the loader may still ask for an iterator.
        num_requested: the number of batches that the loader has asked for.
        num_delivered: the number of batches that the loader has delivered.
    """

    epoch: int
    position: int
    samples_singly: bool
    is_opening: bool = True
    num_requested: int = 0
    num_delivered: int = 0


@final
class ResumableSampler(Sampler[Any]):
    """The batches of one rank, in an order that does not depend on the number of ranks.

    A batch of ``batch_size`` samples is divided among the ranks, and rank 0 gets the first of them.
    If the size is not a multiple of the number of ranks, lower ranks have one sample more; with
    ``weight`` the mean over ranks is the mean over samples. Loop over ``batches(loader)``, which
    counts the batches that the loop has taken, not those that the loader has read ahead; a loop
    over the loader itself is refused.

    Law: in each epoch every sample is taken exactly once (with ``drop_last``: at most once), in
    the same order on any number of ranks, however often the job is stopped and resumed.

    Neither the sampler nor the loader that it is given to draws from a global generator.

    Args:
        num_samples: the number of samples of the data set.
        batch_size: the number of samples of a step on all ranks together; at least one per rank.
        group: the ranks that share a batch (for a mesh, the data-parallel axis), or the tuple
            ``(rank, size)`` of this rank. Ranks of a group compare their states when they begin to
            read.
        seed: the seed of the order, which differs from epoch to epoch.
        shuffle: whether to shuffle.
        drop_last: whether the last batch of an epoch is left out if it is not full. Otherwise it
            is short, and a rank for which it has no sample gets None.

    Raises:
        ArgumentError: the batch has fewer samples than there are ranks, or an epoch has no batch.

    Example:
        >>> import torch
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
        self._rank, self._size = rank_and_size(group)
        check_batch_size(batch_size, self._size)
        self._epoch = self._position = 0
        self._pass: _EpochPass | None = None
        self._shares: tuple[int, ...] = ()

    @property
    def group(self) -> Group | None:
        """The ranks that share a batch; None where the sampler was given ``(rank, size)``."""
        return self._group

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; it is the next epoch once the loop has the last batch."""
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
        """The weight of this rank's mean in the mean over ranks, for the current batch.

        The gradient of ``sampler.weight * loss``, averaged over ranks, is that of the mean over all
        samples of the batch, also if ranks have parts of unequal size. The weight is 1 if the parts
        are equal, and 0 if this rank got None.

        Raises:
            StateError: it is read outside of the loop over ``batches``.
        """
        return weight_of(self.shares, self._rank)

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of samples of the current batch that each rank has.

        Raises:
            StateError: it is read outside of the loop over ``batches``.
        """
        if not self._shares:
            raise StateError(
                "the shares and the weight are those of a batch: ask in the loop over "
                "batches(loader)"
            )
        return self._shares

    def batches(
        self,
        loader: Iterable[Batch],
        epochs: int | None = 1,
        *,
        total_epochs: int | None = None,
    ) -> Iterator[Batch | None]:
        """The batches that ``loader`` makes, from the position of the job to the end of an epoch.

        A batch counts as consumed when the loop gets it, so save after its step. After a loop that
        was left early, the next loop continues with the next batch.

        Args:
            loader: a ``DataLoader`` with this sampler as ``batch_sampler=``, or as ``sampler=``
                with the ``batch_size`` of one rank; or anything else that iterates over this
                sampler, which then gives lists of samples.
            epochs: the number of epochs, counting the one that has begun; None: no end.
            total_epochs: in place of ``epochs``: the number of epochs of the whole job, counting
                those before it was resumed. There is no batch if all of them are over.

        Raises:
            ArgumentError: the loader reads other samples than those of this sampler, or not in
                their order; or both numbers of epochs are given.
            StateError: the ranks of the group are at different positions.
        """
        epochs = epochs_left(epochs, total_epochs, self._epoch)
        singly = self._check_loader(loader)
        if self._group is not None:
            check_same_data(self._group, self.state_dict(), "sampler")
        return self._batches(loader, singly, epochs)

    def state_dict(self) -> dict[str, Any]:
        """The position of the job, which is the same on every rank, and the order of its samples.

        The values are integers and bools, so JSON can hold them.
        """
        return {**asdict(self._order), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that any number of ranks has saved.

        Raises:
            ArgumentError: it is not such a state, or has another data set, batch size, seed or
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
        self._pass, self._shares = None, ()

    def __len__(self) -> int:
        """The number of batches of a whole epoch, so that ``len(loader)`` is ``num_batches``.

        A loader with this sampler as ``sampler=`` makes batches itself, by a ``BatchSampler`` that
        asks for the number of samples; it gets the number of samples of this rank.
        """
        caller = sys._getframe(1)  # the method of a BatchSampler has it as its first argument
        if isinstance(next(iter(caller.f_locals.values()), None), BatchSampler):
            num_full, rest = divmod(self._order.end, self._order.batch_size)
            full, last = range(self._order.batch_size), range(rest)
            return num_full * len(self._share(full)) + len(self._share(last))
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        """The samples for the loader that ``batches`` reads from.

        Raises:
            StateError: no loop over ``batches`` is under way.
        """
        epoch_pass = self._pass
        if epoch_pass is None or not epoch_pass.is_opening:
            raise StateError(
                "a loader reads ahead, so this sampler cannot know which samples were used: "
                "write `for batch in sampler.batches(loader)`, not `for batch in loader`"
            )
        lists = self._lists(epoch_pass)
        yield from chain.from_iterable(lists) if epoch_pass.samples_singly else lists

    def _batches(
        self, loader: Iterable[Batch], singly: bool, epochs: int | None
    ) -> Iterator[Batch | None]:
        num_read = 0
        while epochs is None or num_read < epochs:
            yield from self._rest_of_epoch(loader, _EpochPass(self._epoch, self._position, singly))
            num_read += 1

    def _rest_of_epoch(
        self, loader: Iterable[Batch], epoch_pass: _EpochPass
    ) -> Iterator[Batch | None]:
        self._pass = epoch_pass
        try:
            with seeded_workers(self._order.seed, self._epoch, self._position, self._rank):
                iterator = iter(loader)
            for whole_batch in self._order.batches(epoch_pass.position):
                share = self._share(whole_batch)
                batch = self._next(iterator, epoch_pass) if share else None
                self._shares = shares_of(len(whole_batch), self._size)
                at_end = whole_batch.stop == self._order.end
                self._epoch, self._position = (
                    (epoch_pass.epoch + 1, 0) if at_end else (epoch_pass.epoch, whole_batch.stop)
                )
                yield batch
                if self._pass is not epoch_pass:
                    raise StateError(
                        "this loop over batches was overtaken: load_state_dict() or another call "
                        "of batches() has moved the sampler. Go on with the newest loop"
                    )
            if next(iterator, _END) is not _END:
                raise StateError(f"the loader gives more batches than it asks for: {_USE_AS}")
        finally:
            if self._pass is epoch_pass:
                self._pass, self._shares = None, ()

    def _next(self, iterator: Iterator[Batch], epoch_pass: _EpochPass) -> Batch:
        """The next batch of the loader, which must have asked for it."""
        batch = next(iterator, _END)
        epoch_pass.is_opening = False
        if batch is _END:
            raise StateError(
                f"the loader ended after {epoch_pass.num_delivered} batches, before the epoch did: "
                "give one that leaves out no batch, and that can be iterated again"
            )
        epoch_pass.num_delivered += 1
        if epoch_pass.num_delivered > epoch_pass.num_requested:
            raise StateError(f"the loader gives batches that it never asked for: {_USE_AS}")
        return cast(Batch, batch)

    def _lists(self, epoch_pass: _EpochPass) -> Iterator[list[int]]:
        """This rank's samples of each batch; batches in which it has none are left out."""
        shares = filter(None, map(self._share, self._order.batches(epoch_pass.position)))
        num_together = max(1, _BLOCK * self._size // self._order.batch_size)
        while block := list(islice(shares, num_together)):
            positions = list(chain.from_iterable(block))
            samples = iter(self._order.samples(epoch_pass.epoch, positions))
            for share in block:
                epoch_pass.num_requested += 1
                yield list(islice(samples, len(share)))

    def _share(self, batch: range) -> range:
        """This rank's positions of a batch; of a shorter batch never more than of a longer one."""
        return share_of(batch, self._rank, self._size)

    def _check_loader(self, loader: object) -> bool:
        """Whether ``loader`` asks for samples one by one; a loader of other samples is refused."""
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
