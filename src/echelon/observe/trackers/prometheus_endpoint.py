"""The newest values of a run over HTTP, for a Prometheus server that asks for them."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import final

from echelon.errors import ArgumentError
from echelon.observe.trackers.prometheus import PrometheusValues
from echelon.observe.trackers.tracker import TrackedRun

_LOOPBACK = "127.0.0.1"
_PORT = 9464
REQUEST_S = 5.0  # a client that sends nothing is dropped
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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
        endpoint = self
        guarded = ipaddress.IPv4Address(host).is_loopback

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                if guarded and not _names_loopback(self.headers.get("Host", "")):
                    # A page of the web whose name leads here must not read what runs here.
                    self.send_error(HTTPStatus.FORBIDDEN, "ask for localhost")
                elif self.path != "/metrics":
                    self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is here")
                else:
                    text = endpoint._text
                    self.send_response(HTTPStatus.OK)
                    self.send_header("Content-Type", _CONTENT_TYPE)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                pass  # a request every few seconds is no news

            def version_string(self) -> str:
                return "echelon"

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="prometheus endpoint", daemon=True
        )
        self._thread.start()
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


def _names_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] or host
    try:
        return name == "localhost" or ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False
