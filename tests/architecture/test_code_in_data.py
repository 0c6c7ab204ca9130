"""Nothing that is read is run: what turns bytes into code is mentioned where this list says why.

A pickle runs what its author has put there, and so do marshal, eval and the object collectives of
``torch.distributed``. Modules are read, not imported, as in ``tests.architecture``.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import Modules, package_of, read_modules

# What turns bytes into code: by module, the mentions that are allowed, and why each is harmless.
MAY_RUN_DATA = {
    "comm.objects": {"pickle": "only where the user's own call says pickle=True"},
    "launch.function_pickle": {
        "pickle": "a pipe between a process and a child of its own, which only they hold",
        "cloudpickle": "the same, for what a child cannot import",
    },
    "launch.processes": {
        "multiprocessing": "starts these children, and makes their pipes",
    },
    "comm.threads.process_messages": {
        "pickle": "what multiprocessing reads anyway, between the program and processes of its own",
        "multiprocessing": "the same",
        "Unpickler": "the same",
    },
    "checkpoint.convert.torch_files": {
        "torch.load": "with weights_only=True: torch reads tensors and plain values, and no class",
    },
    "c10d.dcp": {
        "torch.load": "with weights_only=True",
        "dcp_to_torch_save": "only where the user has said --trust-pickle",
    },
    "testing.device.cuda_names": {
        "torch.load": "what a script calls, with all that it gives but the name of the device",
    },
    "launch.simulated_job": {"exec": "the script that the user starts"},
    "launch.served_program": {
        "exec": "the script that the user starts",
        "multiprocessing": "starts processes without a variable; nothing is sent",
    },
    "c10d.rank_limits": {"multiprocessing": "each rank has its start method; nothing is sent"},
    "launch.program": {"compile": "the script that the user starts"},
    "process.fork_server": {"multiprocessing": "the options of its helpers; it reads nothing"},
    "laboratory.replayed_program": {"exec": "the program that the user names for a replay"},
}

_RUNNERS = {"eval", "exec", "compile", "__import__"}
_PICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_PICKLERS |= {"multiprocessing"}  # its connections and queues
_READERS = {"FileSystemReader", "dcp_to_torch_save", "Unpickler", "jit.load", "torch.load"}
_OBJECTS = ("_object", "_object_list", "_object_tensor")


def runs_data(modules: Modules) -> list[str]:
    """Ways to make code of bytes, and collectives of torch.distributed that unpickle."""
    sentences = []
    for name in sorted(modules):
        allowed = MAY_RUN_DATA.get(name, {})
        lines: dict[str, int] = {}
        torchs = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(modules[name])
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if "torch" in ast.unparse(node)
        }
        for node in ast.walk(modules[name]):
            for mention in mentions_of_code(node, torchs):
                lines.setdefault(mention, node.lineno)  # type: ignore[attr-defined]
        sentences += [
            f"{name or 'echelon'}, line {line}, mentions {mention}, which can run what it reads"
            for mention, line in sorted(lines.items())
            if mention not in allowed
        ]
        sentences += [
            f"{name} is allowed {mention} and does not mention it"
            for mention in sorted(allowed.keys() - lines.keys())
        ]
    return sentences


def mentions_of_code(node: ast.AST, torchs: set[str]) -> Iterator[str]:
    """What ``node`` mentions of all that makes code of bytes.

    Args:
        torchs: names in the module that are of torch.
    """
    if isinstance(node, ast.Import):
        yield from _PICKLERS & {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        yield from _PICKLERS & {(node.module or "").split(".")[0]}
        names = {alias.name for alias in node.names}
        yield from (_READERS | _RUNNERS) & names
        if "torch" in (node.module or ""):
            yield from (each for each in names if each.endswith(_OBJECTS) or each == "load")
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from (_RUNNERS | _READERS) & {node.func.id}
    elif isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        yield from (each for each in _READERS if f".{dotted}".endswith(f".{each}"))
        if node.attr.endswith(_OBJECTS) and dotted.split(".")[0] in torchs:
            yield f"torch's {node.attr}"
    elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        yield "allow_pickle"


# --- the project obeys it -----------------------------------------------------------------------


def test_nothing_that_is_read_is_run_but_where_a_reason_is_given() -> None:
    assert runs_data(read_modules()) == []


# --- the rule sees what it should ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "mention"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import marshal as m", "marshal"),
        ("x = eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("import torch\ntorch.load(path, weights_only=True)", "torch.load"),
        ("from torch import load", "load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle"),
        (
            "import torch.distributed as dist\ndist.all_gather_object(all, mine)",
            "torch's all_gather_object",
        ),
    ],
)
def test_every_way_to_run_what_is_read_is_seen(source: str, mention: str) -> None:
    (sentence,) = runs_data(package_of(ddp__api=source))
    assert f"mentions {mention}, which can run what it reads" in sentence


def test_object_calls_of_a_group_of_ours_are_no_pickles() -> None:
    source = "from echelon.comm.group import Group\ngroup.all_gather_object(mine)"
    assert runs_data(package_of(ddp__api=source)) == []


def test_a_reason_that_nobody_needs_any_more_is_named() -> None:
    assert "comm.objects is allowed pickle and does not mention it" in runs_data(
        package_of(comm__objects="")
    )
