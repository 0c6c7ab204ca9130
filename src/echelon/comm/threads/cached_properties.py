"""``functools.cached_property`` without its lock, while simulated ranks run.

Before Python 3.12 each cached property has one lock for the instances of all threads. A rank that
waits for other ranks in its function, as ``TrainingArguments`` of ``transformers`` does when it
joins the default group, would hold the lock that these ranks need to arrive. So ranks take none,
as in Python 3.12 and newer.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any

from echelon.process.replacement import Installation, Replacement

_get_in_lock = vars(cached_property)["__get__"]


def _get(self: Any, instance: Any, owner: type | None = None) -> Any:
    values = getattr(instance, "__dict__", None)
    if instance is None or self.attrname is None or not isinstance(values, dict):
        return _get_in_lock(self, instance, owner)  # which says what is wrong
    if self.attrname not in values:
        values[self.attrname] = self.func(instance)
    return values[self.attrname]


# Each rank needs it.
without_locks = (
    Installation.of(Replacement(cached_property, "__get__", _get))
    if sys.version_info < (3, 12)
    else Installation.of()
)
