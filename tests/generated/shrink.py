"""Makes a case that fails smaller while it fails in the same way."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from tests.generated.campaign import Outcome, run_one
from tests.generated.draw import settle
from tests.generated.operations import Spec

IDENTITY: Spec = {"kind": "chain", "children": []}


def shrink(case: Spec, outcome: Outcome, most: int = 400) -> tuple[Spec, Outcome]:
    """A smaller case that ends in the same kind of failure, at the same place."""
    tried = 0
    smaller = True
    while smaller and tried < most:
        smaller = False
        for candidate in candidates(case):
            tried += 1
            found = run_one(candidate, timeout=5.0)
            if (found.kind, found.where) == (outcome.kind, outcome.where):
                case, outcome, smaller = candidate, found, True
                break
            if tried >= most:
                break
    return case, outcome


def candidates(case: Spec) -> Iterator[Spec]:
    """Cases with one thing less, the largest things first."""
    for model in smaller_modules(case["model"], root=True):
        yield {**case, "model": model}
    steps = case["steps"]
    for i in range(len(steps)):
        if len(steps) > 1:
            yield {**case, "steps": steps[:i] + steps[i + 1 :]}
        for key in steps[i]:
            fewer = {k: v for k, v in steps[i].items() if k != key}
            yield {**case, "steps": [*steps[:i], fewer, *steps[i + 1 :]]}
    needed = ("pp", "chunks", "schedule", "microbatches", "over", "units", "strategy")
    for key in case["options"]:
        if key not in needed or (case["technique"] == "fsdp" and key == "strategy"):
            rest = {k: v for k, v in case["options"].items() if k != key}
            yield settle(copy.deepcopy({**case, "options": rest}))
    is_hybrid = case["options"].get("strategy", "").startswith("HYBRID")
    if case["technique"] != "pipeline" and case["ranks"] > 2 and not is_hybrid:
        yield {**case, "ranks": 2}
    for name in case["thresholds"]:
        fewer = {k: v for k, v in case["thresholds"].items() if k != name}
        yield {**case, "thresholds": fewer}
    for key, default in (("gives", "tensor"), ("optimizer", "sgd"), ("rows", 1), ("values", 0)):
        if case.get(key, default) != default:
            yield {**case, key: default}


def smaller_modules(spec: Spec, root: bool = False) -> Iterator[Spec]:
    """Modules with one thing less."""
    children = spec.get("children", [])
    if spec["kind"] == "again" or (not root and spec != IDENTITY):
        yield IDENTITY
    if not root and spec["kind"] != "chain":
        yield {"kind": "chain", "children": children}
    if spec["kind"] == "chain" and len(children) == 1 and not root:
        yield children[0]
    for i, child in enumerate(children):
        if child == IDENTITY and len(children) > 1:
            yield {**spec, "children": children[:i] + children[i + 1 :]}
            continue
        for smaller in smaller_modules(child):
            yield {**spec, "children": [*children[:i], smaller, *children[i + 1 :]]}
    ops = spec.get("ops", [])
    for i, op in enumerate(ops):
        yield {**spec, "ops": ops[:i] + ops[i + 1 :]}
        for key in ("use", "frozen", "frozen_b", "tie", "size", "moves"):
            if key in op:
                fewer = {k: v for k, v in op.items() if k != key}
                yield {**spec, "ops": [*ops[:i], fewer, *ops[i + 1 :]]}
    for key in ("takes", "gives", "recomputes", "id"):
        if key in spec:
            yield {k: v for k, v in spec.items() if k != key}


def outline(spec: Spec, indent: str = "  ") -> str:
    """The modules of a case, a line each."""
    facts = {k: v for k, v in spec.items() if k not in ("kind", "children", "ops")}
    said = " ".join(f"{key}={value}" for key, value in facts.items())
    lines = [f"{indent}{spec['kind']} {said}".rstrip()]
    for op in spec.get("ops", []):
        words = " ".join(f"{k}={v}" for k, v in op.items() if k != "op")
        lines.append(f"{indent}  . {op['op']} {words}".rstrip())
    lines += [outline(child, indent + "  ") for child in spec.get("children", [])]
    return "\n".join(lines)


def program_of(case: Spec, outcome: Outcome) -> str:
    """A program that shows the failure, with the model in words."""
    facts: dict[str, Any] = {k: v for k, v in case.items() if k != "model"}
    comment = "\n".join(f"# {line}".rstrip() for line in outline(case["model"]).splitlines())
    return (
        f"# {outcome.kind}: {outcome.text}".replace("\n", "\n# ")
        + f"\n# {facts}\n{comment}\n"
        + f"# python -m tests.generated --case '{json.dumps(case)}'\n"
        + "from tests.generated.campaign import run_one\n"
        + f"print(run_one({case!r}))\n"
    )


def report(case: Spec, outcome: Outcome, *, smaller: bool = True) -> str:
    """What a failed test says: how to run it again, and the smallest case that fails alike."""
    again = f"--technique {case['technique']} --world {case['world']} --seeds {case['seed']}"
    if smaller:
        case, outcome = shrink(case, outcome, most=200)
    return f"python -m tests.generated {again}\n{outcome.trace}\n{program_of(case, outcome)}"
