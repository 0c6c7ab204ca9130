"""Which options of which callables have a test, and these tests."""

from collections.abc import Callable

from echelon.comm.world import World

Check = Callable[[World], None]


class Options:
    """Rank functions that fail when an option is ignored."""

    def __init__(self) -> None:
        self.tested: dict[str, set[str]] = {}  # by callable
        self._checks: dict[int, dict[str, Check]] = {}

    def option(self, *names: str, ranks: int = 2) -> Callable[[Check], Check]:
        """Put one into the list: ``"callable.option"``."""

        def put(fn: Check) -> Check:
            for name in names:
                of, _, parameter = name.rpartition(".")
                self.tested.setdefault(of, set()).add(parameter)
            self._checks.setdefault(ranks, {})[fn.__name__] = fn
            return fn

        return put

    def check(self, world: World) -> None:
        """Call all those for a world of this size."""
        for name, fn in self._checks[world.size].items():
            try:
                fn(world)
            except Exception as error:
                error.add_note(f"in check {name}")
                raise
