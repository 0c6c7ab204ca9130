"""The random generators of one rank: Python's, NumPy's, torch's and that of the device.

[Note: new ranks]
If another number of ranks loads, each rank that has saved goes on from its own states. A new rank
with the states of the first one would draw the same numbers: the same dropout, the same noise. So
its generators are seeded by the checksum of the first rank's state and the number of the rank. A
generator that two or more ranks had in one state stays equal on all ranks, which may rely on it.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from echelon.checkpoint.checksum import checksum
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError, CheckpointCorrupt

GENERATORS = ("python", "numpy", "torch", "device")
_NUM_KEYS = 624  # of the Mersenne twister


@final
class RandomChanges:
    """The states of this rank's generators, of which only those that have changed are given.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: dict[str, Any] = {}  # as the generators give them

    def forget(self) -> None:
        """Give all states the next time."""
        self._last.clear()

    def states(self) -> dict[str, Any]:
        """The states that have changed since the last time; at first those of all generators.

        Raises:
            ArgumentError: NumPy's generator was exchanged for another kind.
        """
        changed: dict[str, Any] = {}
        python = random.getstate()
        if self._last.get("python") != python:
            self._last["python"] = python
            version, numbers, gauss = python
            changed["python"] = [version, _tensor(numbers), gauss]
        kind, keys, *rest = _numpy_state()
        last_keys, last_rest = self._last.get("numpy", (None, None))
        if last_rest != rest or not np.array_equal(keys, last_keys):
            self._last["numpy"] = keys, rest
            changed["numpy"] = [kind, _tensor(keys), *rest]
        for name, state in (
            ("torch", torch.get_rng_state()),
            ("device", device_of(self._device).random_state()),
        ):
            last = self._last.get(name)
            if name not in self._last or not _are_equal(last, state):
                self._last[name] = changed[name] = state
        return changed


def _numpy_state() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=True)
    if not isinstance(state, tuple):
        raise ArgumentError(
            f"NumPy's global generator is a {state['bit_generator']} and not the MT19937 that it "
            "begins with, so its state cannot be saved: give rng=False, and the state by a name"
        )
    return state


def _are_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


@final
@dataclass(frozen=True, eq=False)
class RandomStates:
    """States for the generators of this rank, validated by ``of``."""

    of_python: tuple[Any, ...]
    of_numpy: tuple[Any, ...]
    of_torch: Tensor
    of_device: Tensor | None

    @classmethod
    def of(cls, states: object, device: torch.device, path: object) -> RandomStates:
        """Validate what ``RandomChanges.states`` returned at first. Nothing is restored.

        Raises:
            CheckpointCorrupt: these are no states of generators.
        """
        try:
            return cls._tried(states, device_of(device).random_state())
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            problem = str(error)
        raise CheckpointCorrupt(f"has no states of random generators: {problem:.200}", path)

    @classmethod
    def _tried(cls, states: Any, now: Tensor | None) -> RandomStates:
        version, numbers, gauss = _items(states["python"])
        kind, keys, position, has_gauss, cached = _items(states["numpy"])
        if not (gauss is None or type(gauss) is float) or type(cached) is not float:
            raise ValueError("a number that was drawn ahead is none")
        if type(position) is not int or not 0 <= position <= _NUM_KEYS:  # NumPy does not check it
            raise ValueError(f"NumPy's position is {position!r:.40}")
        if has_gauss not in (0, 1) or keys.shape != (_NUM_KEYS,):
            raise ValueError("NumPy's keys are none")
        device = None
        if now is not None and states["device"] is not None:  # else of another kind of device
            device = states["device"]
            if (device.dtype, device.shape) != (now.dtype, now.shape):
                raise ValueError("that of the device is of another form")
        states_of_rank = cls(
            (version, tuple(numbers.tolist()), gauss),
            (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached),
            states["torch"],
            device,
        )
        random.Random().setstate(states_of_rank.of_python)
        np.random.RandomState().set_state(states_of_rank.of_numpy)
        torch.Generator().set_state(states_of_rank.of_torch)
        return states_of_rank

    def for_rank(self, rank: int, which: Collection[str], device: torch.device) -> RandomStates:
        """The states for a new rank. See [Note: new ranks].

        Law: they depend on these states and ``rank`` alone, and differ between ranks.

        Args:
            which: the ``GENERATORS`` that get states of their own; the others keep these.
        """
        states = self
        if "python" in which:
            seed = _seed("python", rank, np.array(self.of_python[1], "<u8"))
            states = replace(states, of_python=random.Random(seed).getstate())
        if "numpy" in which:
            _, keys, position, *_ = self.of_numpy
            seed = _seed("numpy", rank, np.array([*keys, position], "<u8"))
            words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
            states = replace(states, of_numpy=tuple(np.random.RandomState(words).get_state()))
        if "torch" in which:
            seed = _seed("torch", rank, self.of_torch.numpy())
            states = replace(states, of_torch=torch.Generator().manual_seed(seed).get_state())
        if "device" in which and self.of_device is not None:
            seed = _seed("device", rank, self.of_device.numpy())
            states = replace(
                states, of_device=torch.Generator(device).manual_seed(seed).get_state()
            )
        return states

    def restore(self, device: torch.device) -> None:
        """Set this rank's generators."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        if self.of_device is not None:
            device_of(device).set_random_state(self.of_device)


def _seed(generator: str, rank: int, state: np.ndarray[Any, Any]) -> int:
    """A seed of 64 bits for a generator of ``rank``, from the state of another rank's."""
    return int(checksum(f"{generator} of rank {rank} from ".encode() + state.tobytes()), 16)


def _items(value: object) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{value!r:.40} is no list")
    return value


def _tensor(keys: object) -> Tensor:
    return torch.from_numpy(np.array(keys, np.int64))
