"""Draws the tree of a model, and finds what is in one."""

from __future__ import annotations

import random

from tests.generated.operations import OPS, Spec
from tests.generated.values import VISIBLE

TIED = ("scale", "shift", "matrix", "gain")
FREEZABLE = ("linear", "mlp", "attention", "gru")


class Dice(random.Random):
    """Draws with names for what is drawn often."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def weighted(self, **weights: float) -> str:
        """One of the names, by its weight."""
        return self.choices(list(weights), list(weights.values()))[0]


class ModelDraw:
    """Draws the tree of a model.

    Args:
        staged: for a stage of a pipeline, whose modules run in another order than those of one
            process: nothing may depend on it.
    """

    def __init__(self, dice: Dice, *, staged: bool = False) -> None:
        self.dice, self.staged = dice, staged
        self.style = dice.weighted(trainable=2, mixed=4, frozen=3)
        self.num_modules = 0
        self.ids: list[int] = []
        self.depth_in: list[str] = []  # kinds of the modules around
        self.exotic = dice.chance(0.3)

    def op(self, first: bool) -> Spec:
        """One operation of a cell."""
        dice = self.dice
        names = [name for name in OPS if name not in ("inplace", "batchnorm", "buffer", "large")]
        if not self.exotic:
            names = [n for n in names if n not in ("complex", "gru", "weight_norm", "attention")]
        name = dice.choice(names)
        if dice.chance(0.06):
            name = dice.choice(("batchnorm", "buffer", "inplace"))
            if self.staged and name != "buffer":
                name = "scale"
        if dice.chance(0.03):
            name = "large"
        op: Spec = {"op": name}
        if name == "large":  # from 1 KiB to 64 MiB, seldom more than 2 MiB
            op["numel"] = 2 ** dice.choice((*range(7, 18), *range(14, 18), 19, 21, 23))
            op["numel"] += dice.choice((-1, 0, 1))
        if OPS[name][0] is None:
            return op
        if name == "float":
            op["frozen"] = True  # its gradient would be rounded
        share = {"trainable": 0.05, "mixed": 0.35, "frozen": 0.7}[self.style]
        if dice.chance(share):
            op["frozen"] = True
            if name in FREEZABLE and dice.chance(0.5):
                op["frozen"] = dice.choice(("bias", "weight"))
        if name == "lowrank" and dice.chance(0.3):
            op["frozen_b"] = True
        if name == "buffer" and not self.staged and dice.chance(0.7):
            op["moves"] = True
        if dice.chance(0.3):
            op["use"] = dice.choice(("detach", "no_grad", "twice", "half", "view", "unused"))
        if name in TIED and dice.chance(0.15):
            op["tie"] = dice.randrange(2)
        if dice.chance(0.5):
            op["size"] = dice.randrange(1, 6)
        return op

    def cell(self) -> Spec:
        """Operations with parameters."""
        dice = self.dice
        spec: Spec = {"kind": "cell", "ops": []}
        for i in range(dice.choice((1, 2, 2, 3, 3, 4, 5))):
            spec["ops"].append(self.op(first=i == 0))
        if dice.chance(0.5):
            spec["ops"].append({"op": "tanh"})
        if dice.chance(0.1):
            spec["recomputes"] = dice.choice(("plain", "reentrant"))
        return spec

    def wrapped(self, spec: Spec) -> Spec:
        """Give a module other ways to take its input and to give its output."""
        dice = self.dice
        if dice.chance(0.25):
            hidden = ("object",) if dice.chance(0.1) and not self.staged else ()
            spec["gives"] = dice.choice((*VISIBLE, *hidden))
        if dice.chance(0.25):
            hidden = ("attribute", "closure", "object") if dice.chance(0.5) else ()
            spec["takes"] = dice.choice((*VISIBLE, "keyword", *hidden))
        return spec

    def tree(self, depth: int) -> Spec:
        """A module with whatever is in it."""
        dice = self.dice
        self.num_modules += 1
        if self.ids and dice.chance(0.08):
            return {"kind": "again", "of": dice.choice(self.ids)}
        kind = "cell"
        if depth > 0 and not dice.chance(0.35):
            kind = dice.weighted(
                chain=5, outer=3, residual=3, branch=2, twice=1.5, dead=1, blind=1, skips=1.2,
                recomputed=2, border=1.5, hides=1, parent=0.5,
            )  # fmt: skip
        if self.staged and kind in ("hides", "skips"):
            kind = "chain"  # microbatches of several stages are between each other
        if kind == "cell":
            spec = self.cell()
        elif kind == "parent":
            spec = {"kind": "parent"}
            if dice.chance(0.5):
                spec["frozen"] = dice.choice((True, "bias", "weight"))
        else:
            spec = self.inside(kind, depth)
        spec = self.wrapped(spec)
        if dice.chance(0.25):
            spec["id"] = len(self.ids)
            self.ids.append(spec["id"])
        return spec

    def inside(self, kind: str, depth: int) -> Spec:
        """A module with modules in it."""
        dice = self.dice
        spec: Spec = {"kind": kind}
        if kind == "dead":
            spec["how"] = dice.choice(("unused", "detached"))
        elif kind == "blind":
            spec["how"] = dice.choice(("detached", "no_grad"))
        elif kind == "skips":
            spec |= {"how": dice.choice(("all", "ranks")), "phase": dice.randrange(2)}
        elif kind == "recomputed":
            spec["how"] = dice.choice(("reentrant", "plain"))
        elif kind == "border":
            spec["how"] = dice.choice(("view_in", "view_out", "inplace_out", "slice_out",
                                       "inplace_view_out", "inplace_in"))  # fmt: skip
        elif kind == "hides":
            spec |= {"how": dice.choice(("put", "take")), "key": dice.randrange(2)}
        ids = self.ids
        alone = kind == "skips" and spec["how"] == "ranks"
        if alone:
            self.ids = []  # what a rank leaves out must not run elsewhere
        self.depth_in.append(kind)
        count = dice.choice((1, 1, 2, 2, 3)) if kind in ("chain", "outer", "branch") else 1
        spec["children"] = [self.tree(depth - 1) for _ in range(count)]
        self.depth_in.pop()
        if alone:
            _forget_ids(spec)
            self.ids = ids
        return spec

    def whole(self) -> Spec:
        """A model: some modules after another, of which one at least has parameters."""
        count = self.dice.choice((1, 2, 2, 3, 3, 4))
        children = [self.tree(2) for _ in range(count)]
        # Something to train, or few models would have a loss with a graph.
        cell: Spec = {"kind": "cell", "ops": [{"op": self.dice.choice(("scale", "linear"))}]}
        place = self.dice.weighted(first=4, last=4, nowhere=1)
        if place != "nowhere":
            children.insert(0 if place == "first" else len(children), cell)
        return {"kind": "chain", "children": children}


def _forget_ids(spec: Spec) -> None:
    spec.pop("id", None)
    for child in spec.get("children", []):
        _forget_ids(child)


def walk(spec: Spec) -> list[Spec]:
    """A module's spec and those of all inside."""
    return [spec, *(inner for child in spec.get("children", []) for inner in walk(child))]


def has(spec: Spec, *wanted: str) -> bool:
    """Whether a kind, an operation, or a way of doing something is in a model."""
    for part in walk(spec):
        words = [
            part["kind"],
            f"{part['kind']}:{part.get('how')}",
            part.get("takes"),
            f"gives:{part.get('gives')}",
        ]
        words += [f"recomputes:{part.get('recomputes')}"]
        words += [op["op"] for op in part.get("ops", [])]
        words += [f"use:{op.get('use')}" for op in part.get("ops", [])]
        words += ["tie" for op in part.get("ops", []) if "tie" in op]
        if not set(words).isdisjoint(wanted):
            return True
    return False
