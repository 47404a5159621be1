"""`actordbg ui`: the store's pages for this user's browser on this machine.

It listens on loopback alone, and answers only who knows the token, first in the address and then in a cookie of this port. A
page of somebody else in the same browser reaches nothing: it has no token, the cookie is not sent across sites, and a host name
that is not this machine's is refused (a foreign name may resolve to 127.0.0.1). Only GET is answered, and nothing in the store
is changed but its catalog, which is a cache.

bottle is one file of pure Python without dependencies, and its server is Python's own: no build step, nothing else to install.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from bottle import Bottle, HTTPResponse, redirect, request, response

from actordbg.base.errors import ActordbgError, EnvironmentProblem, UsageError
from actordbg.pages import ui_pages
from actordbg.store.layout import Store

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
        return f"http://{HOST}:{self.port}/?token={self.token}"

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
            "/": ui_pages.store_page, "/replays": ui_pages.replays_page, "/matrices": ui_pages.matrices_page,
            "/comparisons": ui_pages.comparisons_page, "/runs/<name>": ui_pages.run_page, "/dumps/<name>": ui_pages.dump_page,
            "/replays/<name>": ui_pages.replay_report, "/matrices/<name>": ui_pages.matrix_page,
            "/comparisons/<name>": ui_pages.comparison_report,
        }  # fmt: skip
        for path, made in shown.items():
            app.route(path, "GET", self._answer(made))
        app.route("/dumps", "GET", self._answer(lambda store: ui_pages.dumps_page(store, dict(request.query.decode()))))
        app.default_error_handler = lambda error: "not here"
        return app

    def _answer(self, made: Callable[..., str]) -> Callable[..., str]:
        def answer(**names: str) -> str:
            try:
                page = made(self._store, *names.values())
            except ActordbgError as error:
                response.status = 400 if isinstance(error, UsageError) else 500
                page = ui_pages.error_page(error)
            for name, value in _HEADERS.items():
                response.set_header(name, value)
            return page

        return answer

    def _admit(self) -> None:
        """Nobody without the token gets further, and only this machine's own names are answered to."""
        if request.get_header("Host") not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            raise HTTPResponse("not this host\n", 421)
        if request.method not in ("GET", "HEAD"):
            raise HTTPResponse("it only shows\n", 405)
        cookie = f"actordbg-{self.port}"
        if _same(request.query.get("token"), self.token):
            response.set_cookie(cookie, self.token, path="/", httponly=True, samesite="strict")
            redirect(request.path, 303)
        if not _same(request.get_cookie(cookie), self.token):
            raise HTTPResponse("open the address that `actordbg ui` printed, with its token\n", 403)


def _same(given: str | None, token: str) -> bool:
    return given is not None and secrets.compare_digest(given.encode(), token.encode())
