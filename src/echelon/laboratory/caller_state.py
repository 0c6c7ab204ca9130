"""State of the process of pytest that a rank in a process of its own takes over.

A fixture may change the working directory, a variable of the environment, the seed of a random
stream, the default dtype or the filters of warnings. Ranks that are threads see it; those that are
processes are forked from a server that was started earlier.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch


@final
@dataclass(frozen=True)
class CallerState:
    """What ``take`` has recorded.

    Attributes:
        folder: the working directory.
        environment: all variables.
        filters: of warnings.
        log_level: of the root logger.
        dtype: torch's default.
        random_states: of torch, Python and, where it is imported, NumPy.
    """

    folder: str
    environment: Mapping[str, str]
    filters: tuple[Any, ...]
    log_level: int
    dtype: torch.dtype
    random_states: tuple[Any, Any, Any]

    @classmethod
    def take(cls) -> CallerState:
        """Record the state of this process."""
        numpy = sys.modules.get("numpy")
        return cls(
            folder=os.getcwd(),
            environment=dict(os.environ),
            filters=tuple(warnings.filters),
            log_level=logging.getLogger().level,
            dtype=torch.get_default_dtype(),
            random_states=(
                torch.get_rng_state(),
                random.getstate(),
                None if numpy is None else numpy.random.get_state(),
            ),
        )

    def restore(self) -> None:
        """Give this process the recorded state."""
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        warnings.resetwarnings()
        warnings.filters[:] = self.filters  # type: ignore[index]
        logging.getLogger().setLevel(self.log_level)
        torch.set_default_dtype(self.dtype)
        of_torch, of_python, of_numpy = self.random_states
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            import numpy

            numpy.random.set_state(of_numpy)
