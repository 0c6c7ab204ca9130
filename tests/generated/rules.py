"""The rules of units that cases name."""

from __future__ import annotations

from typing import Any

from torch import nn

import echelon as ec
from tests.generated.modules import Part

LAYERS = (nn.Sequential, nn.LayerNorm, nn.Conv1d, nn.Embedding, nn.GRU, nn.BatchNorm1d)


def _half(module: nn.Module, numel: int) -> bool:
    return isinstance(module, (Part, *LAYERS)) and numel % 2 == 0


def _every(module: nn.Module, numel: int) -> bool:
    return isinstance(module, (Part, *LAYERS))


def rule_of(name: str) -> Any:
    """The rule of units of that name."""
    units = ec.units
    rules = {
        "cell": lambda: units.by_type("Cell", "Parent"),
        "outer": lambda: units.by_type("Outer"),
        "cell+outer": lambda: units.by_type("Cell", "Outer"),
        "cell+chain": lambda: units.by_type("Cell", "Chain", "Residual", "Outer", "Branch"),
        "linear": lambda: units.by_type(nn.Linear, nn.LayerNorm, nn.Embedding),
        "size1": lambda: units.by_size(1),
        "size9": lambda: units.by_size(9),
        "size30": lambda: units.by_size(30),
        "half": lambda: units.by_function(_half),
        "every": lambda: units.by_function(_every),
        "whole": units.whole,
    }
    return rules[name]()
