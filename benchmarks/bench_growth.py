"""How time and space grow with a store: an index to 1e5 files, a look with nothing new, what `status` says; `--where` and the
catalog to 1e6 rows.

Each is measured at several sizes, and a power law fitted to them (least squares of the logarithms): 1.0 is proportional to the
size, 0 does not depend on it. Time is CPU time of the process, the best of several runs; files are in the page cache.
What `bench_index` made in this process is measured again, and not made again: it has the smallest and the largest size.

    python -m benchmarks.bench_growth [PICTURE]     where PICTURE ends with .svg or .png, the points and the fits as a picture
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time

from actordbg.catalog.indexer import IndexSummary, refresh
from actordbg.catalog.query import Catalog, select_dumps
from actordbg.catalog.selections import holdings
from actordbg.document import page
from actordbg.document.blocks import Chart, Grid
from actordbg.document.specifications import layer, layered, names, quantity
from benchmarks.bench_index import CONDITIONS, _forget_catalog, catalog_of, store_of
from benchmarks.rows import Row

Points = dict[int, float]
GOALS = {
    "index, ms": 1.05,
    "refresh with nothing new, ms": 0.2,
    "what the store holds, ms": 1.1,
    "--where, 20 out, slowest of ten, ms": 0.3,
    "catalog, MB": 1.02,
}
"""What is measured, and the largest exponent that is good."""


def run(
    files: Sequence[int] = (1025, 10_000, 100_000),
    rows: Sequence[int] = (10_000, 100_000, 1_000_000),
    picture: Path | None = None,
) -> list[Row]:
    """A row for each of GOALS. `files`: dumps of stores that are indexed; `rows`: of catalogs that are asked."""
    found: dict[str, Points] = {name: {} for name in GOALS}
    for size in files:
        _of_files(size, found)
    for size in rows:
        _of_rows(size, found)
    if picture is not None:
        _draw(found, picture)
    return [_row(name, points) for name, points in found.items()]


def exponent(points: Points) -> float:
    """The exponent of the power law that fits these points best."""
    logs = [(math.log(size), math.log(max(value, 1e-6))) for size, value in points.items()]
    x, y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    spread = sum((one - x) ** 2 for one, _ in logs)
    return sum((one - x) * (other - y) for one, other in logs) / spread


def _of_files(size: int, found: dict[str, Points]) -> None:
    store = store_of(size)

    def index() -> None:
        _forget_catalog(store)
        refresh(store)

    found["index, ms"][size] = _best(index, 3)
    found["refresh with nothing new, ms"][size] = _best(lambda: refresh(store), 9)
    found["what the store holds, ms"][size] = _best(lambda: holdings(Catalog(store, IndexSummary())), 3)


def _of_rows(size: int, found: dict[str, Points]) -> None:
    store = catalog_of(size)
    catalog = Catalog(store, IndexSummary())
    took = [_best(lambda text=text: select_dumps(catalog, text, limit=20), 5) for text in CONDITIONS]  # type: ignore[misc]
    found["--where, 20 out, slowest of ten, ms"][size] = max(took)
    found["catalog, MB"][size] = store.catalog_path.stat().st_size / 1e6


def _best(call: Callable[[], object], repeat: int) -> float:
    """Milliseconds of CPU time, the least of several runs after one to warm up."""
    took = []
    for _ in range(repeat + 1):
        began = process_time()
        call()
        took.append(process_time() - began)
    return 1e3 * min(took)


def _row(name: str, points: Points) -> Row:
    grows, most = exponent(points), GOALS[name]
    what, _, unit = name.rpartition(", ")
    said = ", ".join(f"{size:,}: {value:.4g}" for size, value in points.items())
    note = f"exponent; {said}"
    if unit != "MB":
        note += "; CPU time, best of several"
    return Row(
        f"growth of: {what}", points[max(points)], None, unit, ratio=grows, budget=f"<= {most}", note=note, within=grows <= most
    )


def _draw(found: dict[str, Points], path: Path) -> None:
    page.check_place(path)
    rows, lines = [], []
    for name, points in found.items():
        grows = exponent(points)
        label, sizes = f"{name}: exponent {grows:.2f}", sorted(points)
        middle = math.exp(sum(math.log(max(value, 1e-6)) for value in points.values()) / len(points))
        centre = math.exp(sum(map(math.log, sizes)) / len(sizes))
        rows += [{"c": label, "n": size, "v": points[size]} for size in sizes]
        lines += [{"c": label, "n": size, "v": middle * (size / centre) ** grows} for size in sizes]
    log = {"type": "log"}
    x = quantity("n", "dumps", scale=log)
    y = quantity("v", "milliseconds of CPU, megabytes", scale=log)
    drawn = [layer(mark, values, x=x, y=y, color=names("c", None)) for mark, values in (("point", rows), ("line", lines))]
    spec = layered([], *drawn, height=400) | {"resolve": {"scale": {"color": "shared"}}}
    page.save([Chart("Growth", "", spec, Grid((), ()))], path)


if __name__ == "__main__":
    for row in run(picture=Path(sys.argv[1]) if len(sys.argv) > 1 else None):
        print(f"{row.name}: {row.ratio:.3g} (goal {row.budget}); {row.note} {row.unit}")
