"""How ranks call the function of a user: with their world, or without it where it takes none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, final

from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.process.forks import ends_forks
from echelon.process.process_end import exit_code_of


@final
class WithoutWorld:
    """A function that knows only ``torch.distributed``, called as one that takes a world."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __repr__(self) -> str:
        return repr(self.fn)

    def __call__(self, world: object, *args: Any) -> Any:
        return self.fn(*args)


def taking_world(fn: Callable[..., Any], num_args: int) -> Callable[..., Any]:
    """``fn`` itself, if it takes a world and that many arguments; else without the world.

    Example:
        >>> taking_world(lambda: 3, 0)("a world")
        3
        >>> taking_world(lambda world: world, 0)("a world")
        'a world'

    Raises:
        ArgumentError: it is a coroutine function.
    """
    if inspect.iscoroutinefunction(fn):
        raise ArgumentError(f"fn is {fn!r:.80}; nobody awaits it: call asyncio.run in a function")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # as of some functions in C
        return fn
    if _takes(signature, num_args + 1) or not _takes(signature, num_args):
        return fn  # in the last case, Python says what is missing
    return WithoutWorld(fn)


def _takes(signature: inspect.Signature, num_args: int) -> bool:
    try:
        signature.bind(*[None] * num_args)
    except TypeError:
        return False
    return True


def call(fn: Callable[..., Any], world: World, args: tuple[Any, ...]) -> Any:
    """What ``fn(world, *args)`` returns; ``sys.exit`` in it with exit code 0 is a return of None.

    Raised in the caller of ``run``, it would end the whole script as if all had gone well.
    """
    try:
        with ends_forks():
            return fn(world, *args)
    except SystemExit as end:
        if exit_code_of(end) != 0:
            world.group.prepare_close()  # this rank has not failed: it leaves
            raise
        return None
    except BaseException as error:
        world.explain(error)
        raise
