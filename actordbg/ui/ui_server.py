"""`actordbg ui`: the store's pages for this user's browser on this machine.

It listens on loopback alone, and answers only who knows the token: the first part of each page's path, since links are relative.
There is no cookie, which every port of 127.0.0.1 would receive. Nor is the token in the browser's command line, which any user
can read: the browser is started with a file that leads here and that only this user can read. A page of somebody else in the
same browser reaches nothing: it is told no address, and a host name that is not this machine's is refused (a foreign name may
resolve to 127.0.0.1). Only GET is answered, and nothing in the store is changed but its catalog, which is a cache.

bottle is one file of pure Python without dependencies, and its server is Python's own: no build step, nothing else to install.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from bottle import Bottle, HTTPResponse, request, response

from actordbg.base.errors import ActordbgError, EnvironmentProblem, UsageError
from actordbg.store.layout import Store
from actordbg.ui import ui_pages

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin", "Content-Type": "text/html; charset=utf-8",
}  # fmt: skip


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request: a browser keeps connections open that it does not use yet."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """No line on standard error for each request; addresses may hold the token."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class UiServer:
    """The server of one store. `address`: what to open, with the token."""

    def __init__(self, store: Store, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._store = store
        try:
            self._server = make_server(HOST, port, self._app(), server_class=_Server, handler_class=_Quiet)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot listen on port {port}: {error.strerror}", hint="name another --port, or none"
            ) from None
        self.port = self._server.server_port

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/store/"

    @contextlib.contextmanager
    def redirect_file(self) -> Iterator[Path]:
        """A page that leads to `address`, for this user alone; it is gone after the block."""
        with tempfile.TemporaryDirectory(prefix="actordbg-ui-") as folder:
            file = Path(folder, "open.html")
            text = f'<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0; url={self.address}">'
            file.touch(0o600)
            file.write_text(f"<!doctype html><title>actordbg</title>{text}\n")
            yield file

    def serve(self) -> None:
        """Answer until `close`, or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _app(self) -> Bottle:
        app = Bottle()
        app.add_hook("before_request", self._admit)
        shown: dict[str, Callable[..., str]] = {
            "/store/": ui_pages.store_page, "/replays/": ui_pages.replays_page, "/matrices/": ui_pages.matrices_page,
            "/comparisons/": ui_pages.comparisons_page, "/runs/<name>": ui_pages.run_page, "/dumps/<name>": ui_pages.dump_page,
            "/replays/<name>": ui_pages.replay_report, "/matrices/<name>": ui_pages.matrix_page,
            "/comparisons/<name>": ui_pages.comparison_report, "/dumps/": lambda store: ui_pages.dumps_page(store, _asked()),
        }  # fmt: skip
        for path, made in shown.items():
            app.route(path, "GET", self._answer(made))
        app.default_error_handler = lambda error: _headed("not here")
        return app

    def _answer(self, made: Callable[..., str]) -> Callable[..., str]:
        def answer(**names: str) -> str:
            try:
                return _headed(made(self._store, *names.values()))
            except ActordbgError as error:
                response.status = 400 if isinstance(error, UsageError) else 500
                return _headed(ui_pages.error_page(error))

        return answer

    def _admit(self) -> None:
        """Nobody without the token gets further, and only this machine's own names are answered to."""
        if request.get_header("Host") not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            raise HTTPResponse("not this host\n", 421, _HEADERS)
        if request.method not in ("GET", "HEAD"):
            raise HTTPResponse("it only shows\n", 405, _HEADERS)
        token, _, rest = request.path[1:].partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            raise HTTPResponse("open the address that `actordbg ui` printed, with its token\n", 403, _HEADERS)
        request.environ["PATH_INFO"] = f"/{rest}"


def _headed(page: str) -> str:
    response.headers.update(_HEADERS)
    return page


def _asked() -> dict[str, str]:
    """What the address asks for. Raises UsageError."""
    try:
        return dict(request.query.decode())
    except UnicodeError:
        raise UsageError("the address has bytes that are not UTF-8", hint="choose again from the lists") from None
