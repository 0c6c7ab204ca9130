"""The user's program in a process of ``echelon run``, whose groups of torch echelon serves.

The program is ``__main__``, as if Python had been started with it. torch is imported only if the
program does.

[Note: a port of its own]
The launcher serves the store at the port of ``MASTER_PORT``, and says by a variable that no rank
must. A program that sets another port, or gives one to ``init_method``, has nobody who serves it:
all ranks would wait there. So the variable holds for the launcher's port only, and not for what
multiprocessing starts, whose processes meet among themselves.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType
from typing import Any

from echelon.errors import CommTimeout
from echelon.errors.message_text import say, standard_error
from echelon.launch.program import Program
from echelon.process.environment import timeout_wanted
from echelon.process.lossy_streams import lose_rather_than_raise
from echelon.process.offered_debugger import no_debugger
from echelon.process.replacement import Replacement

_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_launchers_port = os.environ.get("MASTER_PORT")  # before the program may set it
_GROUPS, _OPTIMIZER = "torch.distributed.distributed_c10d", "torch.optim.optimizer"


class _ChangingLoader(Loader):
    """Loads a module of torch, and changes it then."""

    def __init__(self, loader: Loader, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


def _serve_groups(module: Any) -> None:
    """Have the first group of ``torch.distributed``, and all others, served by echelon."""
    original = module._new_process_group_helper

    def first_group(*args: Any, **kwargs: Any) -> object:
        from echelon.c10d.served_backends import new_process_group, serve_this_process

        serve_this_process()
        return new_process_group(*args, **kwargs)

    first_group.__wrapped__ = original  # type: ignore[attr-defined]
    Replacement(module, "_new_process_group_helper", first_group).put_in()


def _meet_at_own_ports(module: Any) -> None:
    """Have rank 0 serve a store that the launcher does not: see [Note: a port of its own]."""
    original = module._create_c10d_store

    def create_store(
        hostname: str, port: int, rank: int, size: int, timeout: timedelta, use_libuv: bool = True
    ) -> object:
        if str(port) == _launchers_port:
            return original(hostname, port, rank, size, timeout, use_libuv)
        if timeout == module.default_pg_timeout and (seconds := timeout_wanted(os.environ)):
            timeout = timedelta(seconds=seconds)
        try:
            with _without_launchers_store():
                return original(hostname, port, rank, size, timeout, use_libuv)
        except RuntimeError as error:
            if rank == 0 or "timed out" not in str(error):
                raise
            from echelon.c10d.process_watch import begin

            begin(rank, size)  # so that the launcher learns of it
            doing = f"init_process_group, whose store rank 0 serves at {hostname}:{port},"
            raise CommTimeout(doing, [0], timeout.total_seconds()) from error

    Replacement(module, "_create_c10d_store", create_store).put_in()


@contextmanager
def _without_launchers_store() -> Iterator[None]:
    """Let the launcher's store be unknown in the body, and to processes that it starts."""
    value = os.environ.pop(_STORE_VARIABLE, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[_STORE_VARIABLE] = value


def _let_children_meet() -> None:
    """Start processes of multiprocessing without the launcher's store."""
    start = multiprocessing.util.spawnv_passfds

    def start_without(path: Any, args: Any, passfds: Any) -> int:
        with _without_launchers_store():
            return start(path, args, passfds)

    Replacement(multiprocessing.util, "spawnv_passfds", start_without).put_in()


def _watch_first_step(module: Any) -> None:
    """Have the first step of an optimizer say so if this rank trains without a world."""
    steps: list[object] = []

    def first_step(optimizer: object, args: object, kwargs: object) -> None:
        if steps:  # torch goes through its hooks, so none may be removed here
            return
        steps.append(None)
        if not has_world():
            say(ALONE.format(size=os.environ["WORLD_SIZE"]))

    vars(first_step)["_torchdynamo_disable"] = True  # a compiled step must not trace it
    module.register_optimizer_step_post_hook(first_step)


_CHANGES: dict[str, Callable[[Any], None]] = {
    _GROUPS: _serve_groups,
    _OPTIMIZER: _watch_first_step,
    "torch.distributed.rendezvous": _meet_at_own_ports,
}


ALONE = (
    "echelon: this script trains without a world: it has called neither ec.init() nor "
    "torch.distributed.init_process_group(), so each of the {size} ranks trains a model of its own "
    "on the same data, and nothing is shared. Begin with `world = ec.init()`, wrap the model, as "
    "in `ec.DDP(model, world.group)`, and give each rank rows of its own"
)


def has_world() -> bool:
    """Whether this rank has met the others, by echelon or by torch."""
    starts = sys.modules.get("echelon.launch.run")
    if starts is not None and starts.entered() is not None:
        return True
    return has_torch_group()


def has_torch_group() -> bool:
    """Whether this rank is in a group of ``torch.distributed``."""
    torchs = sys.modules.get(_GROUPS)
    return torchs is not None and bool(torchs.is_initialized())


class _TorchFinder(MetaPathFinder):
    """Finds the modules of torch to change when they are imported, and nothing else."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_told = os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE") != "1"
        if name not in _CHANGES or (name == _OPTIMIZER and not is_told):
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader, _CHANGES[name])
        return spec


def run_program(words: Sequence[str]) -> None:
    """Become the program of a command line: ``[-m] NAME ARGUMENTS``."""
    lose_rather_than_raise(marks=True)
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    program = Program(name, is_module)
    if not sys.flags.safe_path:  # or, as PYTHONSAFEPATH asks, no folder of a program is searched
        sys.path[0] = program.folder()
    code, names = program.read()
    sys.argv = [names["__file__"], *arguments]
    sys.meta_path.insert(0, _TorchFinder())
    _let_children_meet()
    _hide_frames()
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update({"__name__": "__main__", "__builtins__": __builtins__, "__spec__": None, **names})
    try:
        exec(code, main)
    except BaseException:
        sys.stderr = standard_error()  # Python tells there what has ended the program
        raise


def _hide_frames() -> None:
    """Let tracebacks begin with the program, not with what has started it."""
    ours = {__file__, vars(sys.modules["__main__"]).get("__file__")}

    def show_program(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        if os.environ.get("WORLD_SIZE") != "1" and (note := no_debugger(error)):
            error.add_note(note)
        hook.original(kind, error.with_traceback(trace), trace)

    hook = Replacement(sys, "excepthook", show_program)
    hook.put_in()
