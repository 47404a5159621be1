"""An editor at `--debugpy PORT`: as much of the Debug Adapter Protocol as it takes to stop, look and go on."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

PATIENCE_S = 240


class Editor:
    """Connected to a port, of this machine or of `host`, once somebody listens there. Requests wait for their answers; events
    are kept.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._socket = _connected(host, port)
        self._file = self._socket.makefile("rb")
        self._sequence = 0
        self._events: list[dict[str, Any]] = []
        self.ask("initialize", adapterID="test", clientID="test")
        attaching = self._send("attach", justMyCode=False)
        self.event("initialized")
        self.ask("configurationDone")
        self._answer(attaching)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; the body of its answer."""
        return self._answer(self._send(command, **arguments))

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event; its body."""
        while True:
            for place, one in enumerate(self._events):
                if one["event"] == name:
                    return dict(self._events.pop(place).get("body") or {})
            self._events.append(self._receive())

    def evaluate(self, expression: str, thread: int, name: str) -> str:
        """What an expression comes to in the frame of this name, the innermost of that thread."""
        frames = self.ask("stackTrace", threadId=thread)["stackFrames"]
        (frame, *_) = [one["id"] for one in frames if one["name"] == name]
        return str(self.ask("evaluate", expression=expression, frameId=frame, context="repl")["result"])

    def variables(self, thread: int) -> dict[str, str]:
        """The names and values of the innermost frame of that thread."""
        frame = self.ask("stackTrace", threadId=thread)["stackFrames"][0]
        scope = self.ask("scopes", frameId=frame["id"])["scopes"][0]["variablesReference"]
        return {one["name"]: one["value"] for one in self.ask("variables", variablesReference=scope)["variables"]}

    def close(self) -> None:
        """Leave, as an editor that is closed."""
        self._socket.close()

    def _send(self, command: str, **arguments: Any) -> int:
        self._sequence += 1
        body = json.dumps({"seq": self._sequence, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._sequence

    def _answer(self, sequence: int) -> dict[str, Any]:
        while True:
            message = self._receive()
            if message["type"] == "response" and message["request_seq"] == sequence:
                assert message["success"], message
                return dict(message.get("body") or {})
            if message["type"] == "event":
                self._events.append(message)

    def _receive(self) -> dict[str, Any]:
        length = 0
        while line := self._file.readline().strip():
            length = int(line.partition(b":")[2]) if line.lower().startswith(b"content-length") else length
        assert length, "the other end is gone"
        found: dict[str, Any] = json.loads(self._file.read(length))
        return found


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=PATIENCE_S)
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens at {host}:{port}"
            time.sleep(0.1)
