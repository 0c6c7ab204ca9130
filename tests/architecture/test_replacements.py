"""Attributes of others are replaced in three ways: see [Note: ways to replace an attribute]."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import Modules, read_modules

# Which modules assign attributes by their names, and why.
BY_NAME = {
    "process.replacement": "the first way: what all ranks of a process find",
    "comm.threads.replaced_names": "the second way: what each simulated rank finds for itself",
    "comm.threads.global_hooks": "the second way: torch's flag beside the hooks of this rank",
    "comm.threads.process_state": "the second way: what warnings has shown goes with its filters",
    "pipeline.weight_gradients": "the third way: the forward of a layer that a stage has alone",
    "comm.compiler_bypass": "a mark on a function of echelon, for the compiler",
    "comm.threads.kept_by_threads": "what a thread keeps is on the thread",
    "comm.threads.output_names": "what code outside of ranks sets of a logger is on the logger",
    "diagnosis.rank_monitor": "a mark on a function of echelon, for the compiler",
    "ddp.buckets": "gradients of parameters, in a loop that stays in C",
    "fsdp.unit": "classes and memory of parameters, in loops that stay in C",
    "integrations.transformers.trainer": "fields of the control that its callbacks assign",
    "laboratory.shared_breakpoints": "fields of its own object",
    "launch.served_program": "a mark on a function of echelon, for the compiler",
    "modules.optimizer_trial": "attributes of a copy that it makes",
    "modules.plain_steps": "the class of a tensor of echelon",
    "modules.wrapper": "attributes of the module for which it stands",
    "process.lossy_streams": "the mode of a stream that it has made",
}
OURS = "here"  # process.this_rank, whose attributes are there to be assigned
# What Python and torch document as something to assign.
SETTINGS = {"argv", "path", "stdout", "stderr", "deterministic", "benchmark"}


def imported(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Names of what a module imports, and names of the namespaces (``vars``) of anything."""
    others, namespaces = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            others |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            others |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            value = ast.unparse(node.value)
            if value in others:
                others |= names
            elif re.fullmatch(r"vars\([\w.]+\)", value):
                namespaces |= names
    return others, namespaces


def assigned(tree: ast.Module) -> Iterator[tuple[bool, str]]:
    """Attributes that a module assigns by their names, and then those of what it imports."""
    others, namespaces = imported(tree)
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if isinstance(node, ast.Call) and any(
            ast.unparse(used) in ("setattr", "delattr") for used in (node.func, *node.args)
        ):
            yield True, text
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if text.startswith("vars(") or ast.unparse(node.value) in namespaces:
                yield True, text
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            holder = ast.unparse(node.value)
            if holder.partition(".")[0] in others - {OURS} and "(" not in holder:
                yield False, text


def by_hand(modules: Modules) -> list[str]:
    """Attributes of others that are replaced in no way of the three."""
    return [
        f"{module} assigns {text}: use Replacement, or Place if each rank has its own"
        for module, tree in modules.items()
        for is_by_name, text in assigned(tree)
        if (module not in BY_NAME if is_by_name else text.rpartition(".")[2] not in SETTINGS)
    ]


def test_attributes_of_others_are_replaced_in_three_ways() -> None:
    modules = read_modules()
    assert by_hand(modules) == []
    assert {name for name in BY_NAME if any(by for by, _ in assigned(modules[name]))} == set(
        BY_NAME
    )


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.excepthook = f",
        "import torch.nn as nn\nnn.Module.forward = f",
        "import torch\ndel torch.nn.Module.forward",
        "from a import b\nsetattr(b, 'name', f)",
        "from a import b\nlist(map(setattr, [b], ['name'], [f]))",
        "from a import b\nvars(b)['name'] = f",
        "from a import b\nnames = vars(b)\nnames['name'] = f",
        "from a import B\nB.name = f",
        "from a import B\nclass_: Any = B\nclass_.name = f",
    ],
)
def test_every_replacement_by_hand_is_seen(source: str) -> None:
    assert len(by_hand({"a.b": ast.parse(source)})) == 1
