"""The newest values of a run over HTTP, for a Prometheus server that asks for them."""

from __future__ import annotations

import ipaddress
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, final

from echelon.errors import ArgumentError
from echelon.observe.trackers.prometheus import PrometheusValues
from echelon.observe.trackers.tracker import TrackedRun
from echelon.process.background_threads import run_in_background

_LOOPBACK = "127.0.0.1"
_PORT = 9464
REQUEST_S = 5.0  # how long a connection may last
MOST_CONNECTIONS = 8  # at the same time
_PAUSE_S = 0.05
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Handler(BaseHTTPRequestHandler):
    """Answers one request of one connection."""

    server: _Server

    def setup(self) -> None:
        self.request.settimeout(REQUEST_S)
        super().setup()

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is here")
            return
        text = self.server.text()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass  # a request every few seconds is no news

    def version_string(self) -> str:
        return "echelon"


@final
class _Server(HTTPServer):
    """A server that takes little of its process, whoever asks and however often.

    [Note: connections of strangers]
    Every connection is a descriptor and a thread of the rank, which needs both for itself. So there
    are at most ``MOST_CONNECTIONS``. One more takes the place of the oldest, which is closed, as is
    one that lasts longer than ``REQUEST_S``; and then no other is accepted for a moment, because
    accepting takes processor time from the training. A scraper asks at once, so it is answered.
    """

    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, text: Callable[[], bytes]) -> None:
        self.text = text
        self._since: dict[socket.socket, float] = {}  # when each was accepted, oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; if there are too many, end the oldest."""
        if len(self._since) >= MOST_CONNECTIONS:
            self._end_older(math.inf, most=1)
            time.sleep(_PAUSE_S)
        try:
            connection, address = super().get_request()
        except OSError:  # the process has no descriptor left: not our doing, and it may pass
            time.sleep(_PAUSE_S)
            raise
        with self._lock:
            self._since[connection] = time.monotonic()
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own."""
        run_in_background("prometheus request", self._answer, request, client_address)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except (OSError, ValueError):  # of a connection that its client or we have closed
            pass
        finally:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that last too long; the server calls it twice in a second."""
        self._end_older(time.monotonic() - REQUEST_S)

    def _end_older(self, than_s: float, most: int = MOST_CONNECTIONS) -> None:
        with self._lock:
            old = [each for each, since in self._since.items() if since < than_s][:most]
            for connection in old:
                del self._since[connection]
                with suppress(OSError):  # the thread that reads from it closes it
                    connection.shutdown(socket.SHUT_RDWR)


@final
class PrometheusEndpoint:
    """Answers ``GET /metrics``, and nothing else, on the loopback device.

    Args:
        place: ``PORT`` or ``HOST:PORT``; None: port 9464. Rank r has the port r higher if each
            is tracked; port 0 is any free one. Another host than loopback lets everybody who
            reaches it read the numbers, without a password.

    Attributes:
        address: the host and port.
    """

    def __init__(self, run: TrackedRun, place: str | None) -> None:
        host, port = address(place)
        if run.rank is not None and port:
            port += run.rank
        self._values = PrometheusValues(run)
        self._text = b""
        self._server = _Server(host, port, lambda: self._text)
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = run_in_background("prometheus endpoint", self._server.serve_forever)
        print(f"the newest values for Prometheus: http://{self.address}/metrics", flush=True)

    def config(self, values: Mapping[str, object]) -> None:
        """Take nothing: options are no numbers that change."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Answer with these values from now on."""
        self._values.update(values, step, time.time())
        self._text = self._values.text().encode()

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def address(place: str | None) -> tuple[str, int]:
    """The host and port that ``place`` names.

    Raises:
        ArgumentError: it names none.

    Example:
        >>> address("9000")
        ('127.0.0.1', 9000)
    """
    host, _, port = (place or str(_PORT)).rpartition(":")
    host = {"": _LOOPBACK, "localhost": _LOOPBACK}.get(host, host)
    try:
        ipaddress.IPv4Address(host)
        number = int(port)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 16:
        raise ArgumentError(
            f"prometheus-http={place} is no address: give PORT, or HOST:PORT with an IPv4 host, "
            f"such as {_LOOPBACK}:{_PORT}"
        )
    return host, number
