"""`actordbg ui`: who gets in, what is shown, and that nothing is changed by looking."""

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest
from comparecases import given, publish_golden, write_replay
from hostilestore import HOSTILE, forbidden, hostile_store
from pagecases import Read
from victims import wait_for

from actordbg.base.errors import WhereError
from actordbg.catalog import query
from actordbg.compare.comparing import compare, save
from actordbg.dumps.create import create_dumps
from actordbg.formats.store_files import make_folder
from actordbg.ui.ui_pages import comparisons_page, condition_of, dump_page, dumps_page, replays_page, store_page
from actordbg.ui.ui_server import HOST, UiServer


@dataclass
class Visitor:
    """Somebody who asks a running server, with headers of his own."""

    server: UiServer

    def get(self, path, **headers):
        connection = http.client.HTTPConnection(HOST, self.server.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}

    def admitted(self, path):
        return self.get(f"/{self.server.token}{path}")[:2]


@pytest.fixture(scope="module")
def visitor(tmp_path_factory):
    server = UiServer(hostile_store(tmp_path_factory.mktemp("ui") / "store"))
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield Visitor(server)
    server.close()
    thread.join()


def test_only_who_has_the_token_gets_in_and_no_answer_tells_it_on(visitor):
    token, port = visitor.server.token, visitor.server.port
    assert visitor.server.address == f"http://127.0.0.1:{port}/{token}/store/"
    for path in ("/", "/store/", f"/{token[:-1]}/store/", f"/store/?token={token}", "/%ff/store/", ""):
        assert visitor.get(path, Cookie=f"actordbg-{port}={token}")[0] == 403, path
    for path in ("/store/", "/dumps/?run=%ff", "/dumps/?shortest=" + "9" * 5000, "/dumps/?where=%00", "/runs/%00", "/nothing"):
        status, _, headers = visitor.get(f"/{token}{path}")
        assert status == {"/store/": 200, "/nothing": 404}.get(path, 400), path
        assert headers["referrer-policy"] == "no-referrer" and not {"set-cookie", "location"} & headers.keys()


def test_every_link_of_every_page_leads_to_a_page(visitor):
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
def test_another_user_finds_the_token_nowhere(store, tmp_path, end):
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
def test_every_page_shows_a_hostile_store_as_text(visitor, path):
    status, page = visitor.admitted(path)
    found = Read(page)
    assert status in (200, 400), page[:400]
    found.assert_inert()
    assert forbidden(page) == []
    addresses = [one for one in found.having("href") if not one.startswith(("#", "data:image"))]
    assert all(one.startswith("..") or "%" in one for one in addresses), "logs beside the store"


def test_lists_begin_with_the_newest_say_when_and_align_numbers_alone_to_the_right(store):
    create_dumps(store, 1, 1, 8, run="first")
    create_dumps(store, 1, 1, 8, run="second")
    page = dumps_page(store, {})
    assert page.index("../runs/second") < page.index("../runs/first") and "s ago</td>" in page
    for part in (
        '<th scope="col"><a href="../dumps/?sort=rank">rank</a></th>',
        "<td>8</td>",
        '<th scope="col" class="left">',
        "actordbg replay --all<",
    ):
        assert part in page
    assert "actordbg replay --where &#x27;rank = 0&#x27;<" in dumps_page(store, {"rank": "0"})
    assert ">yes</span>" in dump_page(store, "last") and ">True<" not in dump_page(store, "last")


def test_ones_own_replays_come_first_with_their_handles_and_truths_behind_them(store):
    inputs = [given(0)]
    write_replay(store, "20250619T050000-000001", inputs, command="actordbg replay")
    truth = "20250619T060000-000002"
    write_replay(store, truth, inputs, truth="fp32", command="the truth of replay 20250619T050000-000001")
    assert truth not in store_page(store) and "../replays/20250619T050000-000001" in store_page(store)
    own, every = replays_page(store), replays_page(store, {"all": "1"})
    assert 'replays/20250619T050000-000001">@1</a>' in own and "NOT CHECKED</span>" in own and truth not in own
    assert f"{truth}</a>" in every and ">@1</a>" in every and "../replays/?all=1" in own


@pytest.fixture
def browsed(store):
    """A store with 130 dumps of two runs, a wrong replay of one, a right one of the other, and their comparison."""
    create_dumps(store, 125, 1, 8, run="long", seed=1)
    create_dumps(store, 5, 1, 40, run="short", seed=2)
    rows = {run: query.select_dumps(store, f"run = '{run}'", limit=2) for run in ("long", "short")}
    inputs = {run: [replace(given(0), dump_id=row.dump_id, path=row.path) for row in some] for run, some in rows.items()}
    broken = {
        "extra": {"temperature": 1.0, "laws": [{"law": "neighbour", "verdict": "broken", "words": "row 1 depends on row 0"}]}
    }
    write_replay(store, "20250619T050000-000001", inputs["long"], result=lambda _: broken, command="actordbg check --packing")
    write_replay(store, "20250619T060000-000002", inputs["short"], command="actordbg --store s replay --all")
    write_replay(store, "20250619T070000-000003", inputs["long"], truth="fp64")
    save(store, compare(store, "20250619T050000-000001", "20250619T070000-000003"))
    make_folder(store.reports)
    (store.reports / "check-20250619T050000-000001.html").write_text("<p>the page of the check</p>")
    server = UiServer(store)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield Visitor(server)
    server.close()
    thread.join()


def rows_of(page):
    """The texts of the first table of a page, without its heading."""
    body = page.partition("<tbody>")[2].partition("</tbody>")[0]
    return [
        [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<td.*?</td>", line)] for line in body.split("<tr>")[1:]
    ]


def test_a_list_is_paged_sorted_by_any_column_and_filtered_by_links_alone(browsed):
    first = browsed.admitted("/dumps/?sort=-S")[1]
    assert [row[4] for row in rows_of(first)][:6] == ["40"] * 5 + ["8"] and len(rows_of(first)) == 100
    assert "1 to 100 of 130" in first and "page=2" in first and "sort=S" in first, "the same heading turns the order"
    second = browsed.admitted("/dumps/?sort=-S&page=2")[1]
    assert (
        len(rows_of(second)) == 30 and "101 to 130 of 130" in second and ">previous</a>" in second and ">next</a>" not in second
    )
    assert not {row[0] for row in rows_of(first)} & {row[0] for row in rows_of(second)}
    wrong = browsed.admitted("/dumps/?verdict=WRONG&broken=neighbour")[1]
    assert [(row[7][:5], row[8]) for row in rows_of(wrong)] == [("WRONG", "neighbour")] * 2
    assert "verdict = 'WRONG' and broken = 'neighbour'" in unescape(wrong).replace("'\"'\"'", "'"), "the command selects them"
    for odd in ("page=0", "page=x", "page=" + "9" * 400, "sort=nonsense", "sort=--S"):
        assert browsed.admitted(f"/dumps/?{odd}")[0] == 200 and len(rows_of(browsed.admitted(f"/dumps/?{odd}")[1])) == 100
    assert rows_of(browsed.admitted("/dumps/?page=7")[1]) == []


def test_replays_are_filtered_by_verdict_rule_run_and_command_beside_their_checks_and_comparisons(browsed):
    page = browsed.admitted("/replays/")[1]
    assert [row[0] for row in rows_of(page)] == ["NOT CHECKED", "WRONG"] and "Newest comparisons" in page
    for asked, verdicts in {
        "verdict=WRONG": ["WRONG"], "broken=neighbour": ["WRONG"], "run=short": ["NOT CHECKED"], "by=check": ["WRONG"], "by=replay": ["NOT CHECKED"],
        "sort=when": ["WRONG", "NOT CHECKED"], "sort=-when": ["NOT CHECKED", "WRONG"], "run=long&verdict=RIGHT": [],
    }.items():  # fmt: skip
        assert [row[0] for row in rows_of(browsed.admitted(f"/replays/?{asked}")[1])] == verdicts, asked
    assert "../checks/20250619T050000-000001" in page
    assert browsed.admitted("/checks/20250619T050000-000001") == (200, "<p>the page of the check</p>")
    assert browsed.admitted("/checks/20250619T060000-000002")[0] == 400, "no check"
    assert len(rows_of(browsed.admitted("/comparisons/?B=truth")[1])) == 1


def test_a_comparison_with_what_the_run_recorded_is_named_as_it_is_typed(store):
    inputs, made = publish_golden(store, 1)
    write_replay(store, "r-01", inputs, change=lambda at, _: made[at])
    save(store, compare(store, "r-01", "recorded"))
    (row,) = rows_of(comparisons_page(store, {"B": "recorded"}))
    assert (row[0], row[3]) == ("NOT CHECKED", "recorded"), "only agreement with the truth is RIGHT"


def test_what_is_not_there_is_said_and_what_leads_out_is_not_followed(visitor):
    for path in ("/replays/nothing", "/comparisons/..%2f..%2fsecret", "/matrices/..%2fcontrol"):
        assert visitor.admitted(path)[0] in (400, 404), path
    assert visitor.admitted("/runs/r-none")[0] == 404
    status, page = visitor.admitted("/dumps/?where=nonsense%3E1")
    assert status == 400 and "nonsense" in page


def test_facets_become_a_condition_that_can_be_typed(store):
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
