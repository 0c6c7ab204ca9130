"""The position in one source of samples: how many were read, and how to get there again.

A source is an iterable that can be iterated again, or a function that makes one for an epoch. Where
it has ``state_dict`` and ``load_state_dict``, as streams of Hugging Face and the loaders of
torchdata have, it continues from its state; otherwise its first samples are read and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

from torch.utils.data import DataLoader

from echelon.checks import integer
from echelon.errors import ArgumentError, StateError
from echelon.train.worker_seed import seeded_workers

Source = Iterable[Any] | Callable[[int], Iterable[Any]]

END: Final = object()
# Of Hugging Face. Its state leaves out what is in its memory, so that those samples would be lost.
_FORGETFUL = "BufferShuffledExamplesIterable"


@final
class SourceCursor:
    """Reads one source, epoch after epoch.

    Law: with a cursor that has loaded the state of another, one reads what the other reads next.

    Args:
        source: the source.
        name: of the source, for messages.

    Attributes:
        epoch: of the next sample.
        position: how many samples of the epoch were read.

    Raises:
        ArgumentError: the source can be read only once, or gives batches.
    """

    def __init__(self, source: Source, name: str = "source") -> None:
        _check_source(source, name)
        self._source, self._name = source, name
        self.epoch = self.position = 0
        self._iterator: Iterator[Any] | None = None
        self._reading: Any = None  # what the iterator reads
        self._loaded: Any = None  # a state that the source has not taken yet

    def read(self) -> Any:
        """The next sample, or ``END`` at the end of an epoch; then the next epoch begins."""
        if self._iterator is None:
            self._iterator = self._open()
        sample = next(self._iterator, END)
        if sample is END:
            self.begin_epoch(self.epoch + 1)
        else:
            self.position += 1
        return sample

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.position = epoch, 0
        self._iterator = self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """The position, and the state of the source if it has one."""
        state = self._loaded
        if self._iterator is not None and self.position and _has_state(self._reading):
            state = self._reading.state_dict()
        return {
            "epoch": self.epoch,
            "position": self.position,
            "source": state,
            "num_workers": getattr(self._source, "num_workers", 0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned, perhaps of another process.

        Raises:
            ArgumentError: it is no such state, or another number of workers has read the source.
        """
        expected = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(expected):
            raise ArgumentError(f"{self._name}: {state!r:.80} is no state of a source")
        if state["num_workers"] != expected["num_workers"]:
            raise ArgumentError(
                f"{self._name} was read by {state['num_workers']} workers, and has "
                f"{expected['num_workers']} here, which read it in another order: use as many"
            )
        self.begin_epoch(integer("epoch of the state", state["epoch"]))
        self.position = integer("position of the state", state["position"])
        self._loaded = state["source"]

    def _open(self) -> Iterator[Any]:
        """An iterator at the position."""
        source = self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        self._reading = source if isinstance(source, Iterable) else source(self.epoch)
        num_skipped = self.position
        if self._loaded is not None:
            if not _has_state(self._reading):
                raise StateError(
                    f"{self._name} has no load_state_dict() to continue from its state"
                )
            self._reading.load_state_dict(self._loaded)
            num_skipped, self._loaded = 0, None
        with seeded_workers("source", self._name, self.epoch, self.position):
            iterator: Iterator[Any] = iter(self._reading)
        for i in range(num_skipped):
            if next(iterator, END) is END:
                raise StateError(
                    f"{self._name} ended after {i} samples of epoch {self.epoch}, of which "
                    f"{num_skipped} were read when the state was saved: is it another one?"
                )
        return iterator


def _check_source(source: object, name: str) -> None:
    if isinstance(source, DataLoader) and source.batch_size is not None:
        raise ArgumentError(
            f"{name} is a loader that makes batches: give it batch_size=None, so that it gives "
            "samples; whoever reads it makes batches that do not depend on the number of ranks"
        )
    if isinstance(source, Iterator):
        raise ArgumentError(
            f"{name} is a {type(source).__name__}, which can be read only once: give what it was "
            "made from, or a function that makes one for an epoch"
        )
    if not isinstance(source, Iterable) and not callable(source):
        raise ArgumentError(
            f"{name} is {source!r:.80}; give an iterable, or a function of an epoch"
        )


def _has_state(source: Any) -> bool:
    """Whether a source continues exactly where its state was taken."""
    has_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    stream = getattr(source, "dataset", source)  # of a loader
    return has_state and not _is_forgetful(getattr(stream, "_ex_iterable", None))


def _is_forgetful(stage: Any) -> bool:
    """Whether a stage of a stream of Hugging Face, or one before it, has a shuffle buffer."""
    if stage is None:
        return False
    before = [getattr(stage, "ex_iterable", None), *(getattr(stage, "ex_iterables", None) or ())]
    return type(stage).__name__ == _FORGETFUL or any(map(_is_forgetful, before))
