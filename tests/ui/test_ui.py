"""`actordbg ui`: who gets in, what is shown, and that nothing is changed by looking."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from comparecases import given, write_replay
from hostilestore import HOSTILE, forbidden, hostile_store
from pagecases import Read
from victims import wait_for

from actordbg.base.errors import WhereError
from actordbg.dumps.create import create_dumps
from actordbg.store.layout import Store
from actordbg.ui.ui_pages import condition_of, dump_page, dumps_page, replays_page, store_page
from actordbg.ui.ui_server import HOST, UiServer


@dataclass
class Visitor:
    """Somebody who asks a running server, with headers of his own."""

    server: UiServer

    def get(self, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection(HOST, self.server.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}

    def admitted(self, path: str) -> tuple[int, str]:
        return self.get(f"/{self.server.token}{path}")[:2]


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    server = UiServer(hostile_store(tmp_path_factory.mktemp("ui") / "store"))
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield Visitor(server)
    server.close()
    thread.join()


def test_only_who_has_the_token_gets_in_and_no_answer_tells_it_on(visitor: Visitor):
    token, port = visitor.server.token, visitor.server.port
    assert visitor.server.address == f"http://127.0.0.1:{port}/{token}/store/"
    for path in ("/", "/store/", f"/{token[:-1]}/store/", f"/store/?token={token}", "/%ff/store/", ""):
        assert visitor.get(path, Cookie=f"actordbg-{port}={token}")[0] == 403, path
    for path in ("/store/", "/dumps/?run=%ff", "/dumps/?shortest=" + "9" * 5000, "/dumps/?where=%00", "/runs/%00", "/nothing"):
        status, _, headers = visitor.get(f"/{token}{path}")
        assert status == {"/store/": 200, "/nothing": 404}.get(path, 400), path
        assert headers["referrer-policy"] == "no-referrer" and not {"set-cookie", "location"} & headers.keys()


def test_every_link_of_every_page_leads_to_a_page(visitor: Visitor):
    known = {"/store/"}
    wanted = [*known]
    while wanted:
        here = wanted.pop()
        status, page = visitor.admitted(here)
        assert status == 200, here
        links = {urljoin(here, one) for one in Read(page).having("href") if one.startswith("../") and ".log" not in one}
        links |= {urljoin(here, one) for one in Read(page).having("action")}
        assert links, "each has the bar"
        wanted += links - known
        known |= links
    assert len({one.split("/")[1] for one in known}) == 6 and len(known) > 10


@pytest.mark.skipif(os.geteuid() != 0, reason="asks as another user")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_another_user_finds_the_token_nowhere(store: Store, tmp_path: Path, end: signal.Signals):
    """The browser is started with a file of this user's that leads to the page, and that goes with the command."""
    browser, asked = tmp_path / "browser", tmp_path / "asked"
    browser.write_text(
        f'#!/bin/sh\necho "$1" > {asked}.part; mv {asked}.part {asked}; while [ -e "${{1#file://}}" ]; do sleep 0.1; done\n'
    )
    browser.chmod(0o700)
    line = [sys.executable, "-m", "actordbg", "--store", str(store.root), "ui"]
    ui = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": f"{browser} %s &"})
    assert ui.stdout is not None
    address = ui.stdout.readline().strip()
    wait_for(asked.exists)
    file = Path(asked.read_text().strip().removeprefix("file://"))
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert f"url={address}" in file.read_text() and urlopen(address, timeout=60).status == 200
    look = ["sh", "-c", f"cat /proc/[0-9]*/cmdline; cat {file}"]
    seen = subprocess.run(look, capture_output=True, check=False, user=65534, group=65534, extra_groups=[])
    assert file.as_uri().encode() in seen.stdout and address.split("/")[3].encode() not in seen.stdout
    ui.send_signal(end)
    assert ui.wait(60) == 0 and not file.parent.exists()


PAGES = (
    "/store/ /dumps/ /dumps/?rank=0&shortest=1 /dumps/20250619 /runs/ppo-1 /replays/ /replays/evil-01 /matrices/ "
    "/matrices/matrix-1"
    " /comparisons/"
)


@pytest.mark.parametrize("path", PAGES.split())
def test_every_page_shows_a_hostile_store_as_text(visitor: Visitor, path: str):
    status, page = visitor.admitted(path)
    found = Read(page)
    assert status in (200, 400), page[:400]
    found.assert_inert()
    assert forbidden(page) == []
    addresses = [one for one in found.having("href") if not one.startswith(("#", "data:image"))]
    assert all(one.startswith("..") or "%" in one for one in addresses), "logs beside the store"


def test_lists_begin_with_the_newest_say_when_and_align_numbers_alone_to_the_right(store: Store):
    create_dumps(store, 1, 1, 8, run="first")
    create_dumps(store, 1, 1, 8, run="second")
    page = dumps_page(store, {})
    assert page.index("../runs/second") < page.index("../runs/first") and "s ago</td>" in page
    for part in ('<th scope="col">rank</th>', "<td>8</td>", '<th scope="col" class="left">role</th>', "actordbg replay --all<"):
        assert part in page
    assert "actordbg replay --where &#x27;rank = 0&#x27;<" in dumps_page(store, {"rank": "0"})
    assert ">yes</span>" in dump_page(store, "last") and ">True<" not in dump_page(store, "last")


def test_ones_own_replays_come_first_with_their_handles_and_truths_behind_them(store: Store):
    inputs = [given(0)]
    write_replay(store, "20250619T050000-000001", inputs, command="actordbg replay")
    truth = "20250619T060000-000002"
    write_replay(store, truth, inputs, truth="fp32", command="the truth of replay 20250619T050000-000001")
    assert truth not in store_page(store) and "../replays/20250619T050000-000001" in store_page(store)
    page = replays_page(store)
    own, _, others = page.partition("<h2>Truths, variations, matrix cells and other users&#x27; replays</h2>")
    assert 'replays/20250619T050000-000001">@1</a>' in own and "NOT CHECKED</span>" in own and truth not in own
    assert f"{truth}</a>" in others and "@" not in others.partition("</table>")[0]


def test_what_is_not_there_is_said_and_what_leads_out_is_not_followed(visitor: Visitor):
    for path in ("/replays/nothing", "/comparisons/..%2f..%2fsecret", "/matrices/..%2fcontrol"):
        assert visitor.admitted(path)[0] in (400, 404), path
    status, page = visitor.admitted("/dumps/?where=nonsense%3E1")
    assert status == 400 and "nonsense" in page


def test_facets_become_a_condition_that_can_be_typed(store: Store):
    assert (
        condition_of({"rank": "3", "role": "policy", "shortest": "128", "where": "tokens>5"})
        == "rank = 3 and role = 'policy' and seq_len >= 128 and (tokens>5)"
    )
    assert condition_of({"run": "it's", "verdict": "-", "longest": "x"}) == "run = 'it''s' and verdict is null"
    assert condition_of({"run": " ", "where": ""}) is None
    assert condition_of({"run": "2026"}) == "run = '2026'"
    with pytest.raises(WhereError, match="unmatched"):
        condition_of({"rank": "3", "where": "rank=0) or (1=1"})
    assert HOSTILE.replace("'", "''") in str(condition_of({"role": HOSTILE.strip()}))
