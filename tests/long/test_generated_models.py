"""Many generated models: ``ECHELON_MODELS`` of them from seed ``ECHELON_MODELS_FROM`` on.

Of every hundred seeds, 90 run on simulated ranks, 5 on processes and 5 over gloo. A range that was
run in pieces is the same as the whole: a seed is the same case each time.
"""

from __future__ import annotations

import os

import pytest

from tests.generated.workers import run_range

MODELS = int(os.environ.get("ECHELON_MODELS", "600"))
FROM = int(os.environ.get("ECHELON_MODELS_FROM", "1000"))
CHUNK = 200  # seeds of one test
SHARES = {"threads": (0, 90), "processes": (90, 95), "gloo": (95, 100)}  # of each hundred


def ranges(world: str) -> list[range]:
    """The seeds of a world, in pieces of about equal time."""
    low, high = SHARES[world]
    return [
        range(FROM + first + low * CHUNK // 100, FROM + first + high * CHUNK // 100)
        for first in range(0, MODELS, CHUNK)
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", list(SHARES))
@pytest.mark.parametrize("piece", range(-(-MODELS // CHUNK)))
def test_training_equals_one_process(world: str, piece: int) -> None:
    assert run_range(ranges(world)[piece], None, world) == []
