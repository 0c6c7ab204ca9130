"""A function of Python or torch that is replaced for a while.

Several replace one function without knowing of each other, such as a hook of ours and that of a
notebook, and a user may do so, too. They come and go in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

from echelon.process.operating_system import at_fork

_lock = threading.RLock()
at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_put_in: list[Replacement] = []


@final
class Replacement:
    """What stands for an attribute of a module or a class between ``put_in`` and ``take_out``.

    Law: once all are taken out, the attribute is what it was. What somebody else has put there
    meanwhile stays.

    Args:
        holder: the module or the class.
        name: of the attribute.
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
        self.original: Any = vars(holder)[name]

    def put_in(self) -> None:
        """Replace what is there, unless that has been done already."""
        with _lock:
            current = vars(self._holder)[self._name]
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
            elif vars(self._holder)[self._name] is self._new:
                setattr(self._holder, self._name, self.original)
            else:
                return  # it may still be called
            _put_in.remove(self)


def _leads_to(current: Any, new: Any) -> bool:
    """Whether what stands there now is ``new``, or a replacement that calls it."""
    if current is new:
        return True
    return any(each._new is current and _leads_to(each.original, new) for each in _put_in)
