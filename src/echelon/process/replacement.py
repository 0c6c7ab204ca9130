"""An attribute of Python or torch that is replaced for all ranks of this process.

Several replace one function without knowing of each other, such as a hook of ours and that of a
notebook, and a user may do so as well. They come and go in any order.

[Note: ways to replace an attribute]
There are three, and each has its reason. [1] What all ranks of a process shall find, for a while or
until it ends, is a ``Replacement``, because others may replace the same attribute. [2] What each
simulated rank shall find for itself is a ``Place`` (``comm.threads.replaced_names``), or a single
attribute by ``register_variable``, because ranks take turns in one process. [3] An attribute of one
object that nobody else replaces, such as the ``forward`` of a layer that one stage has, is set on
the object, because it shall end with that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, final

from echelon.process.operating_system import at_fork

_lock = threading.RLock()
at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_put_in: list[Replacement] = []
_ABSENT = object()  # stands for an attribute that is not there


@final
class Replacement:
    """What stands for an attribute of a module or a class between ``put_in`` and ``take_out``.

    Law: once all are taken out, the attribute is what it was. What somebody else has put there
    meanwhile stays.

    Args:
        holder: the module or the class.
        name: of the attribute, which the holder may not have.
        new: what stands there; a function calls ``original``.
        over: whether it may replace what is there now; by default, anything.

    Attributes:
        original: what is replaced, which may itself be a replacement.

    Example:
        >>> import time
        >>> sleep = Replacement(time, "sleep", lambda seconds: print("no time for", seconds))
        >>> sleep.put_in()
        >>> time.sleep(60)
        no time for 60
        >>> sleep.take_out()
    """

    def __init__(
        self, holder: Any, name: str, new: Any, over: Callable[[Any], bool] = lambda current: True
    ) -> None:
        self._holder, self._name, self._new, self._over = holder, name, new, over
        self.original: Any = self._current()

    def _current(self) -> Any:
        return vars(self._holder).get(self._name, _ABSENT)

    def put_in(self) -> None:
        """Replace what is there, unless that has been done already."""
        with _lock:
            current = self._current()
            is_called = _leads_to(current, self._new)
            if is_called and self not in _put_in:
                _put_in.append(self)  # somebody has put it back after it was taken out
            # What is there instead may call this one, which would then call itself.
            is_covered = is_called or (self in _put_in and current is not self.original)
            if current is self._new or is_covered or not self._over(current):
                return
            self.original = current
            setattr(self._holder, self._name, self._new)
            if self not in _put_in:
                _put_in.append(self)

    def take_out(self) -> None:
        """Undo ``put_in``, unless somebody else has replaced this one."""
        with _lock:
            if self not in _put_in:
                return
            above = next((each for each in _put_in if each.original is self._new), None)
            if above is not None:
                above.original = self.original
            elif self._current() is not self._new:
                return  # it may still be called
            elif self.original is _ABSENT:
                delattr(self._holder, self._name)
            else:
                setattr(self._holder, self._name, self.original)
            _put_in.remove(self)


def _leads_to(current: Any, new: Any) -> bool:
    """Whether what stands there now is ``new``, or a replacement that calls it."""
    reached = [current]
    for called in reached:  # which grows
        if called is new:
            return True
        below = [each.original for each in _put_in if each._new is called]
        reached += [each for each in below if not any(each is known for known in reached)]
    return False


@final
class Installation:
    """What is installed in the process as long as anybody needs it, such as some rank that runs.

    ``install`` is called for each that needs it, because somebody may have undone it meanwhile, and
    ``remove`` when the last one needs it no more.

    Example:
        >>> import time
        >>> no_naps = Installation.of(Replacement(time, "sleep", lambda seconds: None))
        >>> with no_naps.needed():
        ...     time.sleep(60)
    """

    def __init__(self, install: Callable[[], None], remove: Callable[[], None]) -> None:
        self._install, self._remove = install, remove
        self._lock = threading.Lock()
        self._num_needing = 0

    @classmethod
    def of(cls, *replacements: Replacement) -> Self:
        """What puts these in and takes them out."""

        def install() -> None:
            for each in replacements:
                each.put_in()

        def remove() -> None:
            for each in replacements:
                each.take_out()

        return cls(install, remove)

    def begin(self) -> None:
        """Count one more that needs it, until ``end``."""
        with self._lock:
            self._num_needing += 1
            self._install()

    def end(self) -> None:
        """Count one less."""
        with self._lock:
            self._num_needing -= 1
            if not self._num_needing:
                self._remove()

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Count the body as one that needs it."""
        self.begin()
        try:
            yield
        finally:
            self.end()
