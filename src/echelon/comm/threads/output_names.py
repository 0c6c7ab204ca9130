"""Where each simulated rank prints and logs: it may silence or redirect itself, and no other rank.

Programs have all ranks but the first print nothing: they replace ``print`` or ``sys.stdout``, or
give logging another level. A rank finds at first what its caller has, and changes that for itself.

[Note: loggers]
Modules share loggers by their names, and keep them. So a logger stays one object, and what is set
of it (its level, its handlers) is each rank's own: descriptors of the class read it from what the
rank has set whose turn it is, or else from the logger itself.
"""

from __future__ import annotations

import builtins
import logging
import sys
import threading
from typing import Any, TypeAlias, final

from echelon.comm.threads.kept_by_threads import keep, kept
from echelon.comm.threads.process_state import register_state, register_variable
from echelon.comm.threads.replaced_names import Names, Place, Values
from echelon.process.replacement import Installation, Replacement

_names = Names(
    [
        Place(sys, ("stdout", "stderr", "stdin", "displayhook", "unraisablehook")),
        Place(builtins, ("print", "input")),
        Place(threading, ("excepthook",)),
        Place(logging, ("lastResort", "raiseExceptions", "_loggerClass", "_logRecordFactory")),
        Place(logging, ("_warnings_showwarning",)),
        Place(logging.root.manager, ("_disable",)),
    ]
)


@final
class _Output:
    """What a rank has put in these places itself; elsewhere it has what its caller has then.

    A caller may exchange its streams while ranks wait, as each cell of a notebook does.

    Args:
        caller: of the rank; None: this is the output outside of ranks.
    """

    def __init__(self, caller: _Output | None) -> None:
        self.caller = caller
        self._own: dict[int, Any] = {}  # by the number of the place
        self._seen: Values = ()  # what was there last, in its turn

    def note(self, values: Values) -> None:
        """Take note of what is there at the end of a turn."""
        if self.caller is not None and values is not self._seen:
            before = self.caller.values()
            places = enumerate(zip(values, before, self._seen, strict=True))
            for place, (value, of_caller, seen) in places:
                if value is of_caller:
                    self._own.pop(place, None)
                elif value is not seen:
                    self._own[place] = value
        self._seen = values

    def values(self) -> Values:
        """What the rank finds in its next turn."""
        if self.caller is None:
            return self._seen
        values = self.caller.values()
        if self._own:
            values = tuple(self._own.get(place, value) for place, value in enumerate(values))
        self._seen = values
        return values


_output = _Output(None)


def _save_output() -> _Output:
    _output.note(_names.read())
    return _output


def _restore_output(output: _Output) -> None:
    global _output
    _output = output
    _names.write(output.values())


register_state("output", _save_output, _restore_output, _Output)

# What a rank has set of each logger; None outside of ranks.
_Settings: TypeAlias = dict[logging.Logger, dict[str, Any]]
_settings: _Settings | None = None


def _of_new_rank(settings: _Settings | None) -> _Settings:
    """A rank begins with what its caller has set, which is a rank itself sometimes."""
    return {
        logger: {name: _own(value) for name, value in values.items()}
        for logger, values in (settings or {}).items()
    }


register_variable("logging", sys.modules[__name__], "_settings", _of_new_rank)
keep("logging", lambda: _settings)


def _own(value: Any) -> Any:
    """A list of handlers or filters, or a dictionary of answers, that others do not change."""
    return value.copy() if isinstance(value, list | dict) else value


@final
class _Setting:
    """An attribute of loggers that each rank has for itself; see [Note: loggers]."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, logger: logging.Logger | None, kind: type[logging.Logger]) -> Any:
        if logger is None:
            return self
        common = vars(logger)
        settings = kept("logging") or _settings
        if settings is None:
            try:
                return common[self._name]
            except KeyError:
                raise AttributeError(self._name) from None
        values = settings.get(logger)
        if values is not None and self._name in values:
            return values[self._name]
        if self._name not in common:
            raise AttributeError(self._name)
        value = common[self._name]
        if isinstance(value, list | dict):
            value = settings.setdefault(logger, {})[self._name] = value.copy()
        return value

    def __set__(self, logger: logging.Logger, value: Any) -> None:
        settings = kept("logging") or _settings
        if settings is None:
            vars(logger)[self._name] = value
            return
        vars(logger).setdefault(self._name, _own(value))  # of a logger that is new
        settings.setdefault(logger, {})[self._name] = value


_NAMES = ("level", "handlers", "filters", "propagate", "disabled", "_cache")


# Each rank needs it.
own_loggers = Installation.of(
    *(Replacement(logging.Logger, name, _Setting(name)) for name in _NAMES)
)
