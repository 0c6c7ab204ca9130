"""One place starts the threads of the library, and one says which rank a thread is."""

import ast

import pytest

from tests.architecture.sources import Modules, imported_names, read_modules

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


# Where the library has thread-locals and variables of contexts, and what each of them holds.
_OF_A_THREAD = {
    "comm.profiler_spans": "whether a caller has a span, so that its calls need none",
    "launch.rank_lines": "what the thread has written to a stream since its last newline",
    "process.this_rank": "which rank the thread is",
}
_LOCALS = {"local", "ContextVar"}
_MODULES = {"threading", "contextvars", "_thread"}


def thread_locals(modules: Modules) -> list[str]:
    """The modules that make a thread-local or a variable of a context, once for each."""
    return sorted(
        module
        for module, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in _LOCALS
        and ast.unparse(node.value) in _MODULES
    )


def test_one_thread_local_names_the_rank() -> None:
    modules = read_modules()
    assert thread_locals(modules) == sorted(_OF_A_THREAD)
    imported = {name for tree in modules.values() for name in imported_names(tree)}
    assert not imported & {f"{module}.{name}" for module in _MODULES for name in _LOCALS}
