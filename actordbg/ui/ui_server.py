"""`actordbg ui`: the store's pages for this user's browser on this machine.

It listens on loopback only, and answers only requests with the token: the first part of each page's path, kept by relative
links. It uses no cookie, because a cookie would be sent to every port of 127.0.0.1. Nor does it put the token on the browser's
command line, which any user can read: the browser opens a redirect file that only this user can read.

Other pages in the same browser cannot reach the store: they do not learn the address, and requests for other host names are
refused (a foreign name may resolve to 127.0.0.1). Only GET and HEAD are answered. Nothing in the store changes except its
catalog, which is a cache.

bottle is a single pure-Python file without dependencies, and its server is the standard library's: nothing else to install.
"""

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from bottle import Bottle, HTTPResponse, request, response

from actordbg.base.errors import ActordbgError, EnvironmentProblem, NothingToDo, UsageError
from actordbg.store.layout import Store
from actordbg.ui import ui_pages

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin", "Content-Type": "text/html; charset=utf-8",
}  # fmt: skip


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread per request, because a browser keeps idle connections open."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """A handler that does not log requests, because addresses hold the token."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


class UiServer:
    """The server of a store. `address`: the URL to open, with the token."""

    def __init__(self, store: Store, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._store = store
        try:
            self._server = make_server(HOST, port, self._app(), server_class=_Server, handler_class=_Quiet)
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot listen on port {port}: {error.strerror}", hint="pass another --port, or drop --port"
            ) from None
        self.port = self._server.server_port

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/store/"

    @contextlib.contextmanager
    def redirect_file(self) -> Iterator[Path]:
        """Write a page that redirects to `address` and that only this user can read; remove it after the block."""
        with tempfile.TemporaryDirectory(prefix="actordbg-ui-") as folder:
            file = Path(folder, "open.html")
            text = f'<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0; url={self.address}">'
            file.touch(0o600)
            file.write_text(f"<!doctype html><title>actordbg</title>{text}\n")
            yield file

    def serve(self) -> None:
        """Answer requests until `close` or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _app(self) -> Bottle:
        app = Bottle()
        app.add_hook("before_request", self._admit)
        shown: dict[str, Callable[..., str]] = {
            "/store/": ui_pages.store_page, "/runs/<name>": ui_pages.run_page, "/dumps/<name>": ui_pages.dump_page,
            "/replays/<name>": ui_pages.replay_report, "/checks/<name>": ui_pages.check_page,
            "/matrices/<name>": ui_pages.matrix_page, "/comparisons/<name>": ui_pages.comparison_report,
        }  # fmt: skip
        lists = (ui_pages.dumps_page, ui_pages.replays_page, ui_pages.matrices_page, ui_pages.comparisons_page)
        for page in lists:
            shown[f"/{page.__name__.removesuffix('_page')}/"] = lambda store, page=page: page(store, _asked())
        for path, made in shown.items():
            app.route(path, "GET", self._answer(made))
        app.default_error_handler = lambda error: _headed("not found")
        return app

    def _answer(self, made: Callable[..., str]) -> Callable[..., str]:
        def answer(**names: str) -> str:
            try:
                return _headed(made(self._store, *names.values()))
            except ActordbgError as error:
                codes = {NothingToDo: 404, UsageError: 400, ActordbgError: 500}
                response.status = next(code for kind, code in codes.items() if isinstance(error, kind))
                return _headed(ui_pages.error_page(error))

        return answer

    def _admit(self) -> None:
        """Refuse requests without the token, for other host names, or with other methods than GET and HEAD."""
        if request.get_header("Host") not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            raise HTTPResponse("wrong host name\n", 421, _HEADERS)
        if request.method not in ("GET", "HEAD"):
            raise HTTPResponse("only GET and HEAD are answered\n", 405, _HEADERS)
        token, _, rest = request.path[1:].partition("/")
        if not secrets.compare_digest(token.encode(), self.token.encode()):
            raise HTTPResponse("open the address that `actordbg ui` printed, with its token\n", 403, _HEADERS)
        request.environ["PATH_INFO"] = f"/{rest}"


def _headed(page: str) -> str:
    response.headers.update(_HEADERS)
    return page


def _asked() -> dict[str, str]:
    """Return the query parameters. Raises UsageError if they are not UTF-8."""
    try:
        return dict(request.query.decode())
    except UnicodeError:
        raise UsageError("the address has bytes that are not UTF-8", hint="start again from the lists") from None
