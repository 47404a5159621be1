"""Pages in a real browser: what they draw, that they ask for nothing, and that hand, keyboard and phone get everywhere.

They need Playwright (the extra `dev`) and a Chromium on PATH (`apt-get install chromium`); without them they are skipped, and say so.
What a page is made of is tested without a browser in `test_page.py`.
"""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hostilestore import HOSTILE
from pagecases import MATRIX_OF_40, page_of, tokens_page

from actordbg.campaign.matrix_document import MatrixContext, matrix_document
from actordbg.document.blocks import Grid, Heading
from actordbg.document.page import as_html

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
pytestmark = pytest.mark.slow
DRAWN = """async () => {
  for (const figure of document.querySelectorAll('figure.chart')) {
    figure.scrollIntoView();
    for (let i = 0; i < 1500 && !['drawn', 'failed'].includes(figure.dataset.state); i++) await new Promise(r => setTimeout(r, 20));
  }
  scrollTo(0, 0);
  return [...document.querySelectorAll('figure.chart')].map(f => f.dataset.state);
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install 'actordbg[dev]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: pages were not looked at in a browser (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    made = {"report": page_of(5000), "tokens": tokens_page(), "matrix": as_html(matrix_document(MATRIX_OF_40, MatrixContext()))}
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in made}


@dataclass
class Shown:
    """A page in a window of its own; `said`: its console, `asked`: what it requested beside itself."""

    page: Any
    said: list[str]
    asked: list[str]

    def is_visible(self, selector):
        return bool(self.page.locator(selector).first.is_visible())


@contextmanager
def shown_in(browser, path, *, width=1280, scheme="light", scripts=True):
    size = {"width": width, "height": 800}
    with browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=scripts) as context:
        shown = Shown(context.new_page(), [], [])
        shown.page.on("console", lambda message: shown.said.append(message.text))
        shown.page.on("pageerror", lambda error: shown.said.append(str(error)))
        shown.page.on("request", lambda request: shown.asked.append(request.url))
        shown.page.goto(path.as_uri())
        shown.asked[:] = [url for url in shown.asked if url != path.as_uri() and not url.startswith("data:")]
        yield shown


@pytest.mark.parametrize("name", ["report", "tokens", "matrix"])
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_everything_is_drawn_nothing_is_asked_for_and_nothing_sticks_out(browser, pages, name, width, scheme):
    with shown_in(browser, pages[name], width=width, scheme=scheme) as shown:
        states = shown.page.evaluate(DRAWN)
        assert set(states) <= {"drawn"} and len(states) == {"report": 3, "tokens": 2, "matrix": 0}[name]
        assert shown.said == [] and shown.asked == []
        assert shown.page.evaluate("document.documentElement.scrollWidth") == width
        empty = (
            "[...document.querySelectorAll('figure.drawn')].filter(f => f.querySelectorAll('.live svg path').length < 5).length"
        )
        assert shown.page.evaluate(empty) == 0


def test_a_table_wider_than_a_phone_scrolls_by_itself_and_shows_that_it_goes_on(browser, tmp_path):
    row = tuple(f"-0.{name:06d}" for name in range(12))
    (tmp_path / "wide.html").write_text(as_html([Heading("wide", 1), Grid(tuple(map(str, range(12))), [row])]))
    with shown_in(browser, tmp_path / "wide.html", width=420) as shown:
        assert shown.page.evaluate("document.documentElement.scrollWidth") == 420
        assert shown.page.evaluate("(t => t.scrollWidth > t.clientWidth)(document.querySelector('.wide'))")
        shown.page.evaluate("document.querySelector('.wide table').style.visibility = 'hidden'")
        edge = {"x": 400, "y": 0, "width": 5, "height": 200}
        goes_on = shown.page.screenshot(clip=edge)
        shown.page.evaluate("document.querySelector('.wide').scrollLeft = 9999")
        assert shown.page.screenshot(clip=edge) != goes_on, "a shade"


def test_pointing_at_a_mark_says_which_dump_it_is_and_foreign_text_stays_text(browser, pages):
    with shown_in(browser, pages["tokens"]) as shown:
        shown.page.evaluate(DRAWN)
        shown.page.locator("#chart-2 .live .role-mark.mark-rect path").last.hover(force=True)
        tip = shown.page.locator("#vg-tooltip-element.visible")
        tip.wait_for()
        assert "row" in tip.inner_text() and "nats" in tip.inner_text()
        assert shown.page.locator("#vg-tooltip-element script, #vg-tooltip-element img").count() == 0
        assert "<script>alert(1)</script>" in shown.page.locator("body").inner_text() and HOSTILE.count("<script>") == 1


def test_the_keyboard_reaches_every_cell_says_why_and_copies_the_command(browser, pages):
    with shown_in(browser, pages["matrix"]) as shown:
        shown.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        cells = shown.page.locator("button.cell").count()
        assert cells == 40
        reached = set()
        for _ in range(cells + 60):
            shown.page.keyboard.press("Tab")
            name = shown.page.evaluate("document.activeElement.matches('button.cell') ? document.activeElement.dataset.why : ''")
            reached |= {name} - {""}
            if len(reached) == cells:
                break
        assert len(reached) == cells
        assert "cell 39" in shown.page.locator(".why").inner_text()
        shown.page.keyboard.press("Enter")
        shown.page.locator("button.cell[data-copied]").wait_for()
        copied = shown.page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith("actordbg replay --where 'seq_len<600'") and copied in shown.page.locator(".why").inner_text()


def test_without_javascript_there_are_tables_and_on_paper_pictures(browser, pages):
    live, table = "figure.chart .live", "figure.chart table"
    with shown_in(browser, pages["report"], width=390, scripts=False) as shown:
        tables = shown.page.locator(table)
        assert tables.count() == 3 and all(tables.nth(at).is_visible() for at in range(3)) and not shown.is_visible(live)
    with shown_in(browser, pages["report"], scheme="dark") as shown:
        shown.page.evaluate(DRAWN)
        shown.page.emulate_media(media="print")
        assert shown.is_visible(live) and not shown.is_visible(table)
        assert shown.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
