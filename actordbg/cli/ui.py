"""`actordbg ui`: the store in the browser of this machine, read-only."""

from __future__ import annotations

import typer

from actordbg.cli import output
from actordbg.cli.options import option, store_of


def ui(
    ctx: typer.Context,
    port: int = option(0, "The port to listen on (default: a free one).", min=0, max=65535),
    opened: bool = option(True, "Show it in the browser.", "--open/--no-open"),
) -> None:
    """Look at the store in a browser on this machine.

    Shows runs, dumps with facets and the command that selects them, replays, matrices and comparisons. Listens on 127.0.0.1 alone
    and answers only who has the printed address, which holds a token. It changes nothing. From another machine:
    ssh -L 8700:127.0.0.1:8700 HOST, and --port 8700 there. Ctrl-C ends it.

    Example: actordbg ui --port 8700 --no-open
    """
    import webbrowser

    from actordbg.replay.supervise import interruptible
    from actordbg.ui.ui_server import UiServer

    server = UiServer(store_of(ctx).require(), port)
    output.say(server.address)
    try:
        with interruptible(), server.redirect_file() as page:  # any user can read a browser's command line
            if opened and not webbrowser.open_new_tab(page.as_uri()):
                output.note("no browser here: open that address")
            server.serve()
    except KeyboardInterrupt:
        output.note("ended")
