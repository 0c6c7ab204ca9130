"""Whether the steps that a load tries were removed or replaced by another job meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from echelon.checkpoint.coordinator import Coordinator
from echelon.checkpoint.place import storage_of
from echelon.checkpoint.step_storage import Place


@final
class TriedSteps:
    """The steps of a load as they were when it began; other jobs may remove and replace them.

    All ranks make it together and call its methods together.
    """

    def __init__(self, coordinator: Coordinator, steps: Sequence[tuple[int, Place]]) -> None:
        self._coordinator, self.steps = coordinator, steps
        self._beginnings: list[bytes | None] = []  # of the manifests, on the first rank
        coordinator.run_on_first("the steps of a load", self._note)

    def _note(self) -> None:
        self._beginnings = [storage_of(folder).beginning(folder) for _, folder in self.steps]

    def have_changed(self) -> bool:
        """Whether one was removed, as by a save with ``keep``, or replaced by another."""

        def look() -> bool:
            now = (storage_of(folder).beginning(folder) for _, folder in self.steps)
            return any(a != b for a, b in zip(self._beginnings, now, strict=True)) or any(
                not storage_of(folder).is_step(folder) for _, folder in self.steps
            )

        changed: bool = self._coordinator.run_on_first("whether steps are still there", look)
        return changed

    def was_replaced(self, step: int) -> bool:
        """Whether another one has the place of a step, so that bytes of both may have been read."""

        def look() -> bool:
            i = [number for number, _ in self.steps].index(step)
            folder = self.steps[i][1]
            return storage_of(folder).beginning(folder) not in (None, self._beginnings[i])

        replaced: bool = self._coordinator.run_on_first("whether the step is still there", look)
        return replaced
