"""The user's program in a process of ``echelon run``, whose groups of torch echelon serves.

The program is ``__main__``, as if Python had been started with it. torch is imported only if the
program does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, TracebackType
from typing import Any

from echelon.launch.program import Program
from echelon.process.offered_debugger import no_debugger

_MODULE, _OPTIMIZER = "torch.distributed.distributed_c10d", "torch.optim.optimizer"


class _ServingLoader(Loader):
    """Loads torch's module, and has its first group served by echelon."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        original = module._new_process_group_helper

        def first_group(*args: Any, **kwargs: Any) -> object:
            from echelon.c10d.served_backends import new_process_group

            module._new_process_group_helper = new_process_group  # type: ignore[attr-defined]
            return new_process_group(*args, **kwargs)

        first_group.__wrapped__ = original  # type: ignore[attr-defined]
        module._new_process_group_helper = first_group  # type: ignore[attr-defined]


class _WatchingLoader(Loader):
    """Loads torch's module of optimizers, and watches for a first step without a world."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)

        steps: list[object] = []

        def first_step(optimizer: object, args: object, kwargs: object) -> None:
            if steps:  # torch goes through its hooks, so none may be removed here
                return
            steps.append(None)
            if not has_world():
                print(ALONE.format(size=os.environ["WORLD_SIZE"]), file=sys.stderr, flush=True)

        vars(first_step)["_torchdynamo_disable"] = True  # a compiled step must not trace it
        module.register_optimizer_step_post_hook(first_step)


_LOADERS = {_MODULE: _ServingLoader, _OPTIMIZER: _WatchingLoader}
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
    torchs = sys.modules.get(_MODULE)
    return torchs is not None and bool(torchs.is_initialized())


class _TorchFinder(MetaPathFinder):
    """Finds modules of torch when they are imported, and nothing else."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_told = os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE") != "1"
        if name not in _LOADERS or (name == _OPTIMIZER and not is_told):
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = _LOADERS[name](spec.loader)
        return spec


def run_program(words: Sequence[str]) -> None:
    """Become the program of a command line: ``[-m] NAME ARGUMENTS``."""
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    program = Program(name, is_module)
    if not sys.flags.safe_path:  # or, as PYTHONSAFEPATH asks, no folder of a program is searched
        sys.path[0] = program.folder()
    code, names = program.read()
    sys.argv = [names["__file__"], *arguments]
    sys.meta_path.insert(0, _TorchFinder())
    _hide_frames()
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update({"__name__": "__main__", "__builtins__": __builtins__, "__spec__": None, **names})
    exec(code, main)


def _hide_frames() -> None:
    """Let tracebacks begin with the program, not with what has started it."""
    show, ours = sys.excepthook, {__file__, vars(sys.modules["__main__"]).get("__file__")}

    def show_program(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        if os.environ.get("WORLD_SIZE") != "1" and (note := no_debugger(error)):
            error.add_note(note)
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_program
