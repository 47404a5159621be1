"""A stand-in for the Hugging Face hub on loopback: dataset repositories that are made, filled by commits and read again."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """repositories: whether each is private. files: by "OWNER/NAME/PATH"."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repositories: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        words = self.path.split("?")[0].split("/")[2:]
        if words == ["repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'team'}/{asked['name']}"
            there = name in self.server.repositories
            self.server.repositories.setdefault(name, bool(asked.get("private")) or asked.get("visibility") == "private")
            return self._say({"url": f"{self.server.url}/datasets/{name}"}, 409 if there else 200)
        name = "/".join(words[1:3])
        if words[3] == "preupload":
            files = json.loads(body)["files"]
            return self._say(
                {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]}
            )
        for line in body.splitlines():
            if (entry := json.loads(line))["key"] == "file":
                self.server.files[f"{name}/{entry['value']['path']}"] = base64.b64decode(entry["value"]["content"])
        oid = "0" * 40
        self._say({"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/datasets/{name}/commit/{oid}"})

    def do_GET(self) -> None:
        words = self.path.split("?")[0].split("/")[1:]
        if words[:2] == ["api", "datasets"]:
            name = "/".join(words[2:4])
            known = {"id": name, "private": self.server.repositories.get(name), "sha": "0" * 40, "siblings": []}
            return self._say(known, 200 if name in self.server.repositories else 404)
        data = self.server.files.get("/".join([*words[1:3], *words[5:]]))
        if data is None:
            return self._say({"error": "Entry not found"}, 404)
        self.send_response(200)
        for name, value in {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": "0" * 40,
            "Content-Length": str(len(data)),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def _say(self, answer: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """Serve an empty hub for the block."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
