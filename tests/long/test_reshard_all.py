"""Every layout loads what every other has saved, bit for bit; fast tests have a part of these."""

from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.test_reshard import load, save
from tests.checkpoint.whole import check_equal


@pytest.mark.parametrize("optimizer", ["adamw-one", "sgd"])
@pytest.mark.parametrize("source", LAYOUTS)
def test_all_others_have_the_same_model_and_optimizer(
    source: str, optimizer: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[source]
    expected: Any = ec.run(save, layout.ranks, args=(layout, optimizer, tmp_path))[0]
    for target, other in LAYOUTS.items():
        trained = len(target) % 2 == 0
        for state in ec.run(load, other.ranks, args=(other, optimizer, tmp_path, trained)):
            check_equal(state, expected, f"{source} to {target}")
