"""Makes the pictures of the docs with the product itself: `make pictures`, which needs a Chromium on PATH.

It brings real dumps into a store (`PICTURES_OF`: their folder), or makes some; replays and compares them, runs a small matrix,
writes the pages, and photographs them in a headless browser. A store that has a matrix already is taken as it is; behind it
stands which replay is shown. The picture of the terminal is rich's, of what `check` prints at 80 columns.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pexpect
from PIL import Image
from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

OUT = Path(__file__).parent / "pictures"
QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update")
SHOTS = (
    ("report", "report", 1280, "light", 1180), ("report", "report-dark", 1280, "dark", 1180),
    ("report", "report-phone", 390, "light", 1180),
    ("matrix", "matrix", 1280, "light", 640), ("matrix", "matrix-phone", 390, "dark", 900), ("run", "run", 1280, "light", 640),
)  # fmt: skip
"""The page, the picture's name, the window's width, the ground, and the picture's height."""
REPLAY = "replay --diverse 12 --where seq_len<900 --dtype bf16 --backward --keep-tensors --keep-gradients --laws 4 --quiet"
MATRIX = "matrix --where seq_len<600 --max-inputs 3 --attn sdpa,eager --packing both --dtype bf16,fp32 --compile off --quiet"
DRAW = """async () => { for (const f of document.querySelectorAll('figure.chart')) { f.scrollIntoView();
  for (let i = 0; i < 1500 && !['drawn', 'failed'].includes(f.dataset.state); i++) await new Promise(r => setTimeout(r, 20)); }
  scrollTo(0, 0); }"""


def actordbg(store: Path, line: str, *more: str) -> None:
    """Run a command on the store; exit code 1 is an answer."""
    done = subprocess.run(
        [sys.executable, "-m", "actordbg", "--store", str(store), *line.split(), *more], stdout=subprocess.DEVNULL
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"actordbg {line} ended with {done.returncode}")


def filled(source: Path | None, work: Path) -> Path:
    """A store with a replay that was compared, and a matrix."""
    if source is not None and (source / "matrices").is_dir():
        return source
    store = work / "store"
    if source is not None:
        actordbg(store, "dump import --quiet", str(source))
    else:
        actordbg(store, "dump create --count 24 --batch-size 2 --seq-len 256 --quiet")
    for line in (MATRIX, REPLAY, "compare last truth --quiet"):
        actordbg(store, line)
    return store


def photograph(pages: dict[str, Path]) -> None:
    """Each picture as a PNG of few colors: text and flat fields lose nothing."""
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        raise SystemExit("no Chromium on PATH: apt-get install chromium")
    OUT.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=list(QUIET))
        for page, name, width, scheme, height in SHOTS:
            shown: Any = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
            shown.goto(pages[page].as_uri())
            shown.evaluate(DRAW)
            image = Image.open(io.BytesIO(shown.screenshot())).convert("RGB").quantize(96)
            image.save(OUT / f"{name}.png", optimize=True)
            print(f"wrote {OUT / name}.png")
        browser.close()


def terminal(store: Path) -> None:
    """Draw what `check` prints in a terminal of 80 columns as an SVG that loads no font."""
    words = ["-m", "actordbg", "--store", str(store), "check", "--where", "seq_len<900", "--quiet"]
    printed = pexpect.run(f"{sys.executable} {' '.join(map(repr, words))}", timeout=900, dimensions=(40, 80), encoding="utf-8")
    console = Console(record=True, width=80, file=io.StringIO())
    text = printed.replace(f"{store}/", "store/").replace("\r", "")
    console.print(Text.from_ansi(f"$ actordbg check --where 'seq_len<900'\n{text}"))
    fonts = re.compile(r"@font-face {{.*?}}\s*", re.DOTALL)
    picture = console.export_svg(title="actordbg", code_format=fonts.sub("", CONSOLE_SVG_FORMAT))
    (OUT / "terminal.svg").write_text(picture)
    print(f"wrote {OUT / 'terminal.svg'}")


def main(source: str | None, replay: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        store = filled(Path(source) if source else None, work)
        actordbg(store, f"report {replay}", "--output", str(work / "report.html"))
        actordbg(store, "matrix --show last", "-o", str(work / "matrix.html"))
        from actordbg.catalog import query
        from actordbg.catalog.selections import frequent_values
        from actordbg.store.layout import Store
        from actordbg.ui.ui_pages import run_page

        catalog = query.open_fresh(Store(store))
        run = frequent_values(catalog, "run")[0][0]
        (work / "run.html").write_text(run_page(Store(store), str(run)))
        for page in work.glob("*.html"):  # where the store lay says nothing to a reader
            page.write_text(page.read_text().replace(f" --store {store}", ""))
        photograph({name: work / f"{name}.html" for name in ("report", "matrix", "run")})
        terminal(store)  # last: its replay would be the one that is shown


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2] if len(sys.argv) > 2 else "last")
