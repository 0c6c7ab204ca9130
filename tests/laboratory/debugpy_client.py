"""A client of debugpy: what an editor says to a program that it debugs."""

import json
import socket
from typing import Any, Self


class DebugpyClient:
    """Speaks the debug adapter protocol with ``debugpy.listen``, in a ``with`` block."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=90)
        self._stream = self._socket.makefile("rwb")
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request; its number."""
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command}
        body = json.dumps({**message, "arguments": arguments}).encode()
        self._stream.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._stream.flush()
        return self._number

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a request, and return the body of the response."""
        number = self.send(command, **arguments)
        while True:
            message = self._read()
            if message["type"] == "event":
                self._events.append(message)
            elif message["request_seq"] == number:
                assert message["success"], message
                return message.get("body")

    def event(self, name: str) -> Any:
        """Wait for an event; its body."""
        while True:
            for message in self._events:
                if message["event"] == name:
                    self._events.remove(message)
                    return message.get("body")
            message = self._read()
            if message["type"] == "event":
                self._events.append(message)

    def attach(self, path: str, lines: list[int], *, just_my_code: bool) -> None:
        """Attach, with breakpoints in these lines of a file."""
        self.ask("initialize", adapterID="test", clientID="test")
        self.send("attach", justMyCode=just_my_code)
        self.event("initialized")
        breakpoints = [{"line": line} for line in lines]
        self.ask("setBreakpoints", source={"path": path}, breakpoints=breakpoints)
        self.ask("configurationDone")

    def _read(self) -> dict[str, Any]:
        length = 0
        while (line := self._stream.readline().strip()) or not length:
            assert line or length, "debugpy has closed the connection"
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        message: dict[str, Any] = json.loads(self._stream.read(length))
        return message
