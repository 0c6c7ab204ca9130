"""``ec.Blackbox``: keeps the steps of a run, so that one of them can be computed again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon import checks
from echelon.checkpoint.items import CheckpointItems
from echelon.checkpoint.records import MAX_STEP
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError
from echelon.laboratory.box_recording import BoxOptions, BoxRecording
from echelon.laboratory.kept_values import members
from echelon.laboratory.rank_replay import RankReplay
from echelon.launch.run import entered

EVERY = 100


Batch = TypeVar("Batch")


@final
class Blackbox:
    """Keeps what the steps of a run began with, so that each can be computed again elsewhere.

    Every ``every`` steps it saves the given objects, in the background, and for each step since it
    keeps the batch and the random states of every rank. At any instant the folder has what a replay
    needs, also after a ``kill -9``. ``echelon replay`` runs the script again on simulated ranks of
    one process, where this class gives it the kept batches instead of new ones.

    Law: a replayed step has the bits of the run on every rank, if all that it reads is in the
    objects given here, in its batch, its number or the random streams, and sums run in rank order.

    All ranks make it together, after the model and the optimizer. One pass of the loop is one step
    of the optimizer.

    Args:
        directory: of the run; steps are kept in its folder ``blackbox``.
        model: plain, or shared by ``DDP``, ``FSDP``, ``Pipeline`` or any of them inside another.
        optimizer: over its parameters.
        keep: how many checkpoints to leave, with the steps after them.
        every: how many steps there are from one checkpoint to the next.
        first_step: the number of the first step; more than 1 after a resume.
        group: the ranks that train together; None: all of the world.
        state: anything else that steps read and change, by name: further models and optimizers, a
            learning-rate schedule, ``ec.FiniteGuard``, ``ec.GradScaler``.

    Raises:
        ArgumentError: an argument cannot be used.
        StateError: there is no world, or another black box is at work in the folder.
        CheckpointError: the folder cannot be made.

    Example:
        >>> import tempfile, torch
        >>> from echelon.launch.run import run
        >>> def main(world, folder):
        ...     layer = nn.Linear(1, 1)
        ...     box = Blackbox(folder, model=layer)
        ...     for step, x in box.steps([torch.ones(1), torch.zeros(1)]):
        ...         box.note(loss=layer(x).sum())
        ...     return step
        >>> run(main, ranks=1, args=(tempfile.mkdtemp(),))
        [2]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        keep: int = 2,
        every: int = EVERY,
        first_step: int = 1,
        group: Group | None = None,
        **state: object,
    ) -> None:
        checks.path("directory", directory)
        checks.instance("model", model, nn.Module, or_none=True)
        checks.instance("optimizer", optimizer, Optimizer, or_none=True)
        checks.instance("group", group, Group, or_none=True)
        options = BoxOptions(
            keep=checks.integer("keep", keep, low=1),
            every=checks.integer("every", every, low=1),
            first_step=checks.integer("first_step", first_step, low=1, high=MAX_STEP),
        )
        world = entered()
        if world is None:
            raise StateError("a black box needs a world: call ec.init() before it, or use ec.run")
        self._group = world.group if group is None else group
        given = {"model": model, "optimizer": optimizer, **state}
        self._items = {name: item for name, item in given.items() if item is not None}
        for name in CheckpointItems.sort(self._items, self._group).values:
            raise ArgumentError(
                f"{name} is a {type(self._items[name]).__name__}, which cannot take a state back "
                "in a replay: give objects with state_dict() and load_state_dict()"
            )
        self.step = options.first_step - 1
        self._replay = RankReplay.of(world)
        self._recording: BoxRecording | None = None
        if self._replay is None:
            folder = Path(os.path.abspath(directory))
            self._recording = BoxRecording(world, self._group, folder, self._items, options)

    def steps(
        self, batches: Iterable[Batch], *, build: Callable[..., Batch] | None = None
    ) -> Iterator[tuple[int, Batch]]:
        """The number of each step and its batch; in a replay, those of the run.

        It may be called again, as for the next epoch; steps are counted on. A batch holds values
        of Python, NumPy arrays and tensors on the host, nested in lists, tuples and dicts.

        Args:
            batches: a loader, or anything else to loop over. A replay does not touch it.
            build: makes a batch of keywords, for batches that are dataclasses or mappings of
                another class than dict: their fields are kept.

        Raises:
            ArgumentError: a batch cannot be kept.
        """
        if self._replay is not None:
            for step, batch in self._replay.steps(self._items, self._group, build):
                self.step = step
                yield step, batch
            return
        assert self._recording is not None
        for batch in batches:
            if self.step == MAX_STEP:
                raise StateError(f"a black box keeps steps up to {MAX_STEP}")
            _check_batch(batch, build)
            self.step += 1
            self._recording.begin(self.step, batch)
            yield self.step, batch

    def note(self, **numbers: float | Tensor) -> None:
        """Keep numbers of the current step, such as the loss, which a replay compares with its own.

        If one is not finite, its steps stay longer: those of the ``keep`` newest checkpoints that
        such a step follows.

        Raises:
            ArgumentError: something is no number.
        """
        for name, number in numbers.items():
            if not isinstance(number, int | float | Tensor):
                raise ArgumentError(f"{name} is {number!r:.80}; give a number or a tensor")
        values = {
            name: number.detach().cpu() if isinstance(number, Tensor) else number
            for name, number in numbers.items()
        }
        if self._replay is not None:
            self._replay.note(values)
        elif self._recording is not None:
            self._recording.note(values)

    def keep(self) -> Path | None:
        """Keep the current step for good, with its whole stretch; the folder of the stretch.

        Any rank may call it alone. In a replay it does nothing and returns None.

        Raises:
            StateError: no step has begun.
        """
        if self._recording is None:
            return None
        return self._recording.pin()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and close the files. All ranks call it.

        The end of the world does it, too.
        """
        if self._recording is not None:
            self._recording.close()


def _check_batch(batch: object, build: Callable[..., Any] | None) -> None:
    kept = members(batch)
    if build is None and kept is not batch:
        kind = type(batch).__name__
        raise ArgumentError(
            f"a batch is a {kind}, of which the fields can be kept: give "
            f"box.steps(..., build={kind}), which a replay calls with them"
        )
    if build is not None and not isinstance(kept, Mapping):
        raise ArgumentError(
            f"a batch is a {type(batch).__name__}, which has no fields for build: leave build out"
        )
