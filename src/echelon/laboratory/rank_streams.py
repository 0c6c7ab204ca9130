"""What each simulated rank of a test prints and logs, apart from what the others do.

While the ranks run, ``sys.stdout`` and ``sys.stderr`` give what a rank writes to the buffers of
that rank, and a filter on pytest's handlers of the log does the same with records. What other
threads write goes where it went before.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, TextIO, final

import pytest
from _pytest.logging import LogCaptureHandler

from echelon.launch.rank_output import rank_prefix
from echelon.launch.written_rows import MarkedRows
from echelon.process.replacement import Replacement
from echelon.process.this_rank import here


@final
class _Buffer(io.TextIOWrapper):
    """Keeps what a rank writes, as text or as bytes."""

    def __init__(self) -> None:
        super().__init__(
            io.BytesIO(),
            encoding="utf-8",
            errors="backslashreplace",
            newline="",
            write_through=True,
        )

    def take(self) -> bytes:
        """What was written since the last time."""
        memory = self.buffer
        assert isinstance(memory, io.BytesIO)
        taken = memory.getvalue()
        memory.seek(0)
        memory.truncate()
        return taken


class Captured(NamedTuple):
    """What ``readouterr`` of pytest's fixtures returns: text, or bytes of the binary ones."""

    out: Any
    err: Any


@final
class CapsysOfRank:
    """Stands for ``capsys`` and its kin on one rank: it has what this rank has written."""

    def __init__(
        self,
        buffers: Sequence[_Buffer],
        binary: bool,
        disabled: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._buffers, self._binary = buffers, binary
        self.disabled = disabled

    def readouterr(self) -> Captured:
        """What this rank has written since the last call."""
        out, err = (buffer.take() for buffer in self._buffers)
        if self._binary:
            return Captured(out, err)
        return Captured(out.decode(errors="replace"), err.decode(errors="replace"))


@final
class CaplogOfRank(pytest.LogCaptureFixture):  # type: ignore[misc]  # it is marked as final
    """Stands for ``caplog`` on one rank: it has what this rank has logged."""

    def __init__(self, handler: LogCaptureHandler) -> None:
        super().__init__(None, _ispytest=True)  # type: ignore[arg-type]  # the handler is ours
        self._handler = handler

    @property
    def handler(self) -> LogCaptureHandler:
        """The handler of this rank's records."""
        return self._handler

    def get_records(self, when: str) -> list[logging.LogRecord]:
        """The records of a phase of the test, of which a rank has only the call."""
        return self._handler.records if when == "call" else []

    def restore_levels(self) -> None:
        """Undo what ``set_level`` has done."""
        self._finalize()


@final
class StreamsOfRank:
    """The standard streams and the records of one rank.

    Attributes:
        out: its standard output.
        err: its standard error.
        log: the records for the report.
        caplog: the records for the fixture ``caplog``.
    """

    def __init__(self, rank: int, shown: bool) -> None:
        self.out, self.err = (
            MarkedRows(stream, rank_prefix(rank)) if shown else _Buffer()
            for stream in (sys.stdout, sys.stderr)
        )
        self.log, self.caplog = LogCaptureHandler(), LogCaptureHandler()

    def sections(self) -> Iterator[tuple[str, str]]:
        """Each kind of output, with what is left of it."""
        for name, stream in (("stdout", self.out), ("stderr", self.err)):
            if isinstance(stream, _Buffer):
                yield name, stream.take().decode(errors="replace")
            else:
                stream.end()
        yield "log", self.log.stream.getvalue()


@final
class _RoutedStream(io.TextIOBase):
    """A standard stream that gives what a rank writes to the stream of that rank."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def _target(self) -> Any:
        streams: StreamsOfRank | None = here.streams
        return self._stream if streams is None else getattr(streams, self._name)

    def write(self, text: str) -> int:
        """Write to the stream of the rank that runs on this thread."""
        self._target().write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream of the rank that runs on this thread."""
        self._target().flush()

    def fileno(self) -> int:
        """The file underneath, which all ranks share."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether a person watches."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Whether it can be written, which is so."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream underneath."""
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        """For bytes."""
        return getattr(self._target(), "buffer", self._stream.buffer)


def unrouted() -> TextIO:
    """The standard output for what no rank writes."""
    return sys.stdout._stream if isinstance(sys.stdout, _RoutedStream) else sys.stdout


@final
class _ToRanks(logging.Filter):
    """Takes the records of ranks from a handler of pytest, and gives them to the rank's own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the handler keeps a record, because no rank has made it."""
        streams: StreamsOfRank | None = here.streams
        if streams is None:
            return True
        getattr(streams, self._name).handle(record)
        return False


@final
class RankStreams:
    """The streams of all ranks of one test.

    Args:
        item: the test.
        ranks: how many there are.
    """

    def __init__(self, item: pytest.Item, ranks: int) -> None:
        self._item = item
        self._is_shown = item.config.getoption("capture", "no") == "no"
        self._routes: list[Replacement] = []
        self._streams = [StreamsOfRank(rank, self._is_shown) for rank in range(ranks)]
        self._caplogs: list[CaplogOfRank] = []
        self._lock = threading.Lock()
        self._num_disabled = 0  # ranks in ``disabled``, of which the first and the last act
        self._disabled = ExitStack()

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Separate what ranks write while the body runs; then add it to the report of the test."""
        self._routes = [
            Replacement(sys, name, _RoutedStream(getattr(sys, name), name[3:]))
            for name in ("stdout", "stderr")
        ]
        with ExitStack() as filters:
            self._filter_logs(filters)
            self.resume()
            try:
                yield
            finally:
                for route in self._routes:
                    route.take_out()
                for caplog in reversed(self._caplogs):
                    caplog.restore_levels()
                for rank, streams in enumerate(self._streams):
                    for name, text in streams.sections():
                        self._item.add_report_section("call", f"{name} rank {rank}", text)

    def resume(self) -> None:
        """Route the standard streams again, after pytest has put back its own."""
        for route in self._routes:
            route.put_in()

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Give what this thread writes to a rank."""
        here.streams = self._streams[rank]
        try:
            yield
        finally:
            here.streams = None

    def replacing(self, rank: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """For fixtures of pytest that have what was printed or logged: those of one rank."""
        streams = self._streams[rank]
        replaced: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, pytest.LogCaptureFixture):
                caplog = replaced[name] = CaplogOfRank(streams.caplog)
                self._caplogs.append(caplog)
            elif isinstance(value, pytest.CaptureFixture) and not self._is_shown:
                replaced[name] = self._capsys(streams, value)
        return replaced

    def _capsys(self, streams: StreamsOfRank, fixture: pytest.CaptureFixture[Any]) -> CapsysOfRank:
        @contextmanager
        def disabled() -> Iterator[None]:
            with self._lock:
                if not self._num_disabled:
                    self._disabled.enter_context(fixture.disabled())
                self._num_disabled += 1
            try:
                yield
            finally:
                with self._lock:
                    self._num_disabled -= 1
                    if not self._num_disabled:
                        self._disabled.close()
                        self.resume()

        buffers = [stream for stream in (streams.out, streams.err) if isinstance(stream, _Buffer)]
        binary = isinstance(fixture.captureclass.EMPTY_BUFFER, bytes)
        return CapsysOfRank(buffers, binary, disabled)

    def _filter_logs(self, filters: ExitStack) -> None:
        plugin: Any = self._item.config.pluginmanager.get_plugin("logging-plugin")
        if plugin is None:  # switched off
            return
        for streams in self._streams:
            streams.log.setFormatter(plugin.formatter)
            streams.caplog.setFormatter(plugin.formatter)
        for handler, name in ((plugin.report_handler, "log"), (plugin.caplog_handler, "caplog")):
            to_ranks = _ToRanks(name)
            handler.addFilter(to_ranks)
            filters.callback(handler.removeFilter, to_ranks)
