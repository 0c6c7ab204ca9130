"""The random generators of one rank: Python's, NumPy's, torch's and that of the device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon import streams

__all__ = ["random_states", "restore_random_states"]


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


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Let the generators of this rank go on from ``states``."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    found: Tensor | None = states["device"]
    if found is not None:
        streams.set_random_state(device, found)


def _tensor(keys: object) -> Tensor:
    return torch.from_numpy(np.asarray(keys).astype(np.int64))
