"""An editor at `--debugpy PORT`: as much of the Debug Adapter Protocol as it takes to stop, look and continue."""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

from roots import run_program

LISTENS_S = 60
ANSWERS_S = 30
_AS_NOBODY = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
body = b'{"seq": 1, "type": "request", "command": "initialize", "arguments": {"adapterID": "another"}}'
with socket.socket() as connection:
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(sys.argv[1])))
    try:
        connection.sendall(b"Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body))
        print(connection.recv(100).decode(), end="")
    except OSError:  # closed, or silent for as long as this waits: told nothing
        pass
"""


def told_to_another_user(port):
    """What a process of user 65534 is told at each port of the adapter that listens at this one. This user has to be root.

    Nothing of this user may connect and leave before the editor comes: an adapter that cannot greet a connection which it took
    takes no other ever after (debugpy 1.8).
    """
    deadline = time.monotonic() + LISTENS_S
    while len(ports := _ports_beside(port)) < 2:
        assert time.monotonic() < deadline, f"no adapter listens at {port}, and at a port for its server: {ports}"
        time.sleep(0.3)
    answers = {}
    for number in ports:
        asked = run_program([sys.executable, "-c", _AS_NOBODY, str(number)], check=True)
        answers[number] = asked.stdout
    return answers


def _ports_beside(port):
    """The ports of the process that listens at this port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    inodes = {f"socket:[{row[9]}]": int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"}
    if port not in inodes.values():
        return []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ports = [inodes[name] for name in map(os.readlink, (process / "fd").iterdir()) if name in inodes]
            if port in ports:
                return ports
    return []


class Editor:
    """Connected to a port, of this machine or of `host`, once somebody listens there. Requests wait for their answers; events
    are kept.
    """

    def __init__(self, port, host="127.0.0.1"):
        self._socket = _connected(host, port)
        self._file = self._socket.makefile("rb")
        self._sequence = 0
        self._events = []
        self.ask("initialize", adapterID="test", clientID="test")
        attaching = self._send("attach", justMyCode=False)
        self.event("initialized")
        self.ask("configurationDone")
        self._answer(attaching)

    def ask(self, command, **arguments):
        """Send a request; the body of its answer."""
        return self._answer(self._send(command, **arguments))

    def event(self, name):
        """Wait for an event; its body."""
        while True:
            for place, one in enumerate(self._events):
                if one["event"] == name:
                    return dict(self._events.pop(place).get("body") or {})
            self._events.append(self._receive())

    def evaluate(self, expression, thread, name):
        """What an expression comes to in the frame of this name, the innermost of that thread."""
        frames = self.ask("stackTrace", threadId=thread)["stackFrames"]
        (frame, *_) = [one["id"] for one in frames if one["name"] == name]
        return str(self.ask("evaluate", expression=expression, frameId=frame, context="repl")["result"])

    def variables(self, thread):
        """The names and values of the innermost frame of that thread."""
        frame = self.ask("stackTrace", threadId=thread)["stackFrames"][0]
        scope = self.ask("scopes", frameId=frame["id"])["scopes"][0]["variablesReference"]
        return {one["name"]: one["value"] for one in self.ask("variables", variablesReference=scope)["variables"]}

    def close(self):
        """Leave, as an editor that is closed."""
        self._socket.close()

    def _send(self, command, **arguments):
        self._sequence += 1
        body = json.dumps({"seq": self._sequence, "type": "request", "command": command, "arguments": arguments}).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._sequence

    def _answer(self, sequence):
        while True:
            message = self._receive()
            if message["type"] == "response" and message["request_seq"] == sequence:
                assert message["success"], message
                return dict(message.get("body") or {})
            if message["type"] == "event":
                self._events.append(message)

    def _receive(self):
        length = 0
        try:
            while line := self._file.readline().strip():
                length = int(line.partition(b":")[2]) if line.lower().startswith(b"content-length") else length
        except TimeoutError:
            raise AssertionError(f"the adapter at {self._socket.getpeername()} said nothing for {ANSWERS_S} s") from None
        assert length, "the other end is gone"
        found = json.loads(self._file.read(length))
        return found


def _connected(host, port):
    deadline = time.monotonic() + LISTENS_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=ANSWERS_S)
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens at {host}:{port}"
            time.sleep(0.1)
