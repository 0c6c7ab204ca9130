"""Tensors that the library makes are on a device that it names."""

from __future__ import annotations

import ast
from pathlib import Path

import echelon

SOURCE = Path(echelon.__file__).parent
# Commands of their own processes, and models on the meta device.
OWN_PROCESS = {"cli", "planner", "testing"}
MAKE = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
    "randint", "randn", "randperm", "tensor", "zeros",
}  # fmt: skip


def makes_elsewhere(node: ast.AST) -> bool:
    """Whether this makes a tensor where ``torch.set_default_device`` says."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in MAKE
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    )


def test_no_tensor_is_made_on_the_default_device_of_the_user() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in OWN_PROCESS
        for node in ast.walk(ast.parse(path.read_text()))
        if makes_elsewhere(node)
    ]
    assert found == []
