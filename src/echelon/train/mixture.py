"""One endless source of samples that are drawn from several, in given proportions."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, final

from echelon.checks import integer, mapping, number
from echelon.errors import ArgumentError, StateError
from echelon.train.source_cursor import END, Source, SourceCursor


@final
class Mixture:
    """Samples of several sources, each drawn with a probability; a source for a ``SampleStream``.

    Which source a sample comes from is a function of the seed and of its position alone. Each
    source is read in its own order, and begins again at its own end, so a small one has more
    epochs than a large one. The mixture has no end: train for a number of steps.

    Law: the samples after a state are those that follow in a mixture that was not stopped.

    Args:
        sources: by name; each as for ``SampleStream``.
        weights: in which proportion they are drawn, by name; None: equally often.
        seed: of the choice of sources.

    Raises:
        ArgumentError: there is no source, or a weight is missing, negative or not finite, or all
            are zero.

    Example:
        >>> from itertools import islice
        >>> web, books = range(100), range(100, 103)
        >>> mixture = Mixture({"web": web, "books": books}, {"web": 2, "books": 1})
        >>> list(islice(mixture, 8))
        [0, 1, 100, 2, 101, 3, 102, 4]
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ArgumentError(f"sources is {sources!r:.80}; give a dict of sources by name")
        weights = dict.fromkeys(sources, 1.0) if weights is None else weights
        mapping("weights", weights)
        if set(weights) != set(sources):
            raise ArgumentError(f"weights are of {sorted(weights)}, and sources {sorted(sources)}")
        self._weights = {
            name: number(f"weight of {name!r}", weights[name], 0.0) for name in sources
        }
        numbers = self._weights.values()
        if not sum(numbers):
            raise ArgumentError(f"weights are {weights}; give some that are not 0")
        self._seed = integer("seed", seed, high=2**64 - 1)
        self._ends = list(accumulate(numbers))
        self._cursors = {name: SourceCursor(source, name) for name, source in sources.items()}
        self._position = 0

    @property
    def epochs(self) -> dict[str, int]:
        """How often each source was read to its end."""
        return {name: cursor.epoch for name, cursor in self._cursors.items()}

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning; there is only one epoch, because there is no end."""
        self._position = 0
        for cursor in self._cursors.values():
            cursor.begin_epoch(0)

    def __iter__(self) -> Iterator[Any]:
        """The samples from the position on.

        Raises:
            StateError: a source has no sample.
        """
        names = [*self._cursors]
        while True:
            name = names[self._choice(self._position)]
            cursor = self._cursors[name]
            sample = cursor.read()
            if sample is END:
                sample = cursor.read()
                if sample is END:
                    raise StateError(f"source {name!r} of the mixture has no sample")
            self._position += 1
            yield sample

    def _choice(self, position: int) -> int:
        """The number of the source of a sample."""
        digest = hashlib.blake2b(f"{self._seed} {position}".encode(), digest_size=7).digest()
        fraction = int.from_bytes(digest, "little") / (1 << 56)
        return bisect_right(self._ends, fraction * self._ends[-1])

    def state_dict(self) -> dict[str, Any]:
        """The position, and those of the sources."""
        return {
            "seed": self._seed,
            "weights": dict(self._weights),
            "position": self._position,
            "sources": {name: cursor.state_dict() for name, cursor in self._cursors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            ArgumentError: it is of other sources, weights or another seed.
        """
        here = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(here):
            raise ArgumentError(f"state is {state!r:.80}; give what state_dict() returned")
        for key in ("seed", "weights"):
            if state[key] != here[key]:
                raise ArgumentError(
                    f"{key} of the mixture: {state[key]!r} in the state and {here[key]!r} here: "
                    "use what it was saved with"
                )
        position = integer("position of the state", state["position"])
        for name, cursor in self._cursors.items():
            cursor.load_state_dict(state["sources"][name])
        self._position = position
