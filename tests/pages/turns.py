"""The page of what a turn exchanges, made from what simulated ranks have registered.

``python -m tests.pages.turns`` writes docs/reference/turns.md again.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import echelon as ec
from echelon.comm.threads import process_state
from echelon.comm.threads.replaced_names import Names, Place
from tests.pages.code_blocks import ROOT

PAGE = ROOT / "docs" / "reference" / "turns.md"

# What is in states whose attributes have no table.
_WORDS = {
    "torch": "The random stream of torch on the CPU.",
    "accelerator": "The random streams of torch on devices such as CUDA's, once those have begun.",
    "random": "The random stream of Python's `random`.",
    "numpy": "NumPy's global generator.",
    "default dtype": "What `torch.set_default_dtype` sets.",
    "determinism": "Deterministic algorithms, flags of cuDNN, precision of matmuls, anomaly mode.",
    "warnings": "The filters of `warnings`, and the functions that show them.",
    "environment": "`os.environ`.",
    "working directory": "What `os.chdir` sets.",
    "torch.nn.init": "Functions of `torch.nn.init`, also where layers have them by name.",
    "hooks on all modules and optimizers": "Hooks of the user. Hooks of echelon run on every rank.",
    "output": "`sys.stdout`, `sys.stderr`, `sys.stdin`, `print`, `input`, hooks for exceptions.",
    "logging": "Levels, handlers and filters of each logger.",
    "simulated rank": "The group of all ranks, for `torch.distributed`.",
    "debug level": "What `torch.distributed.set_debug_level` sets.",
}

_HEAD = """\
# What a turn exchanges

Simulated ranks take turns in one process. When a turn ends, the values of its rank are kept, and
those of the next rank are put into the process, in this order. A value that both ranks share stays.

`echelon run` adds *program*: `__main__`, the modules of the program with the locks of their
imports, `sys.argv` and `sys.path`. `echelon.comm.threads.process_state.register_state` adds a state
of yours at the end.
"""


def _holder(place: Place) -> str:
    holder: Any = place.holder
    if isinstance(holder, str):
        return holder
    name = getattr(holder, "__name__", type(holder).__name__)
    module = getattr(holder, "__module__", None)
    return f"{module}.{name}" if isinstance(holder, type) else name


def _rows(places: list[Place]) -> Iterator[str]:
    """Lines of a table: the holder, the attributes, and why each rank has its own."""
    yield from ("| where | attributes | reason |", "|---|---|---|")
    for place in places:
        names = ", ".join(f"`{name}`" for name in place.names)
        yield f"| `{_holder(place)}` | {names} | {place.reason} |"


def _section(number: int, name: str, save: Any) -> str:
    names = getattr(save, "__self__", None)
    places = names._places if isinstance(names, Names) else []
    if isinstance(save, partial):  # a single attribute
        places = [Place(save.args[0], save.args[1:])]
    if name in _WORDS:
        lines = [_WORDS[name]]
    elif any(place.reason for place in places):
        lines = list(_rows(places))
    else:
        attributes = (f"`{_holder(place)}.{each}`" for place in places for each in place.names)
        lines = [", ".join(attributes)]
    return "\n".join([f"## {number}. {name}\n", *lines]) + "\n"


def written_page() -> str:
    """The text of the page, in a process in which nobody has registered anything else."""
    ec.run(lambda world: None, 2)
    states = enumerate(process_state._states.items(), 1)
    sections = (_section(number, name, each.save) for number, (name, each) in states)
    return "\n".join([_HEAD, *sections])


if __name__ == "__main__":
    PAGE.write_text(written_page())
