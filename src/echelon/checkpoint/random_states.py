"""The random generators of one rank: Python's, NumPy's, torch's and that of the device."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from echelon import streams
from echelon.errors import CheckpointCorrupt

__all__ = ["RandomStates", "random_states"]

_NUM_KEYS = 624  # of the Mersenne twister


def random_states(device: torch.device) -> dict[str, Any]:
    """What the generators of this rank would go on from.

    Simulated ranks share those of Python, NumPy and the device.
    """
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": [kind, _tensor(keys), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "device": streams.random_state(device),
    }


@final
@dataclass(frozen=True, eq=False)
class RandomStates:
    """States that the generators of this rank can go on from. Made by ``of``, which has tried."""

    of_python: tuple[Any, ...]
    of_numpy: tuple[Any, ...]
    of_torch: Tensor
    of_device: Tensor | None

    @classmethod
    def of(cls, states: object, device: torch.device, path: object) -> RandomStates:
        """What ``random_states`` gave. Nothing is restored.

        Args:
            path: of the checkpoint, for the error.

        Raises:
            CheckpointCorrupt: they are none.
        """
        try:
            return cls._tried(states, streams.random_state(device))
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
        if type(position) is not int or not 0 <= position <= _NUM_KEYS:  # NumPy looks there blindly
            raise ValueError(f"NumPy's position is {position!r:.40}")
        if has_gauss not in (0, 1) or keys.shape != (_NUM_KEYS,):
            raise ValueError("NumPy's keys are none")
        device = None
        if now is not None and states["device"] is not None:  # else of another kind of device
            device = states["device"]
            if (device.dtype, device.shape) != (now.dtype, now.shape):
                raise ValueError("that of the device is of another form")
        found = cls(
            (version, tuple(numbers.tolist()), gauss),
            (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached),
            states["torch"],
            device,
        )
        random.Random().setstate(found.of_python)
        np.random.RandomState().set_state(found.of_numpy)
        torch.Generator().set_state(found.of_torch)
        return found

    def restore(self, device: torch.device) -> None:
        """Let the generators of this rank go on from here."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_device is not None:
            streams.set_random_state(device, self.of_device)


def _items(found: object) -> list[Any]:
    if type(found) is not list:
        raise TypeError(f"{found!r:.40} is no list")
    return found


def _tensor(keys: object) -> Tensor:
    return torch.from_numpy(np.asarray(keys).astype(np.int64))
