"""One place starts the threads of the library."""

import ast

import pytest

from tests.architecture.sources import Modules, read_modules

HOME = "process.background_threads"
_NAMES = {"Thread", "Timer", "ThreadPoolExecutor", "ThreadPool", "start_new_thread"}


def starts(modules: Modules) -> list[str]:
    """Calls that start a thread beside the place that does."""
    return [
        f"{module}:{node.lineno} starts a thread: call run_in_background"
        for module, tree in modules.items()
        if module != HOME
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id) in _NAMES
    ]


def test_one_place_starts_the_threads_of_the_library() -> None:
    assert starts(read_modules()) == []


@pytest.mark.parametrize(
    "source",
    [
        "threading.Thread(target=f)",
        "Thread(target=f).start()",
        "threading.Timer(1, f)",
        "concurrent.futures.ThreadPoolExecutor()",
        "_thread.start_new_thread(f, ())",
    ],
)
def test_every_start_of_a_thread_is_seen(source: str) -> None:
    assert starts({"a.b": ast.parse(source)}) == ["a.b:1 starts a thread: call run_in_background"]
    assert starts({HOME: ast.parse(source)}) == []
