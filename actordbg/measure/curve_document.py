"""An answer of `actordbg curve` as headings, paragraphs and tables, for text of 80 columns and for Markdown."""

from __future__ import annotations

import csv
import io

from actordbg.base.foreign_text import in_csv
from actordbg.base.units import plural
from actordbg.config.as_ran import complete, label, toy
from actordbg.document.blocks import Block, Grid, Heading, Items, Paragraph, seconds
from actordbg.document.specifications import thinned
from actordbg.measure.curves import EXTRAPOLATED, FURTHEST, MEASURED, MEMORY, CurveAnswer, CurvesAnswer, Longest
from actordbg.measure.fit import LEAST, Curve
from actordbg.measure.measurements import BY, PADDED, SEQ_LEN, Measurements

MOST_ROWS = 24
NOTHING = (
    "Nothing was measured: no input passed in these replays. `actordbg replay` makes measurements; inputs of chosen "
    "lengths come from `actordbg dump create --seq-len N`."
)


def document(answer: CurvesAnswer, rows: int = MOST_ROWS) -> list[Block]:
    """The answer. `rows`: at most so many points of each curve, spread evenly; 0 for all."""
    what = "peak memory" if answer.quantity == MEMORY else f"{answer.passes} time".removeprefix("both ")
    measured = sum(point.inputs for one in answer.curves for point in one.measurements.points)
    said = f"{what} by {BY[answer.by]}; {plural(answer.replays, 'replay')}, {plural(measured, 'input')}"
    blocks: list[Block] = [Heading(f"actordbg curve {answer.quantity}", 1), Paragraph(said)]
    if not any(one.values for one in answer.curves):
        blocks.append(Paragraph(NOTHING))
    if answer.budget is not None and any(one.longest for one in answer.curves):
        blocks += _longest(answer, answer.budget)
    if any(one.at for one in answer.curves):
        blocks += _at(answer)
    for one in answer.curves:
        blocks += _curve(one, answer, rows)
    return [*blocks, *map(Paragraph, answer.notes)]


def explanations(quantity: str) -> list[Block]:
    """Explain the figures: of memory or of time."""
    of_memory = (
        "peak: the largest of the inputs of a length, in one worker: on a CPU, the process's resident memory, which holds "
        "Python, the libraries and the model too; on a GPU, the memory that torch's allocator had given out, the model included. "
        "Compiling inputs are left out.",
        "sizes are in powers of 1024, as everywhere here; --budget 80GB is 80 * 1000^3 bytes, 80GiB 80 * 1024^3",
    )
    of_time = ("forward, backward, both: median seconds of the inputs of a length, in one worker, warm-up left out",)
    of_both = (
        "curve: least squares on relative errors, outliers weighted down; of a, a + b n, a + c n^2 and a + b n + c n^2 the one "
        "that predicts left-out points best, a simpler one if it is as good; error: how far off it was there",
        "packed inputs are computed without their padding, so real tokens decide: --by tokens",
        "measured: a longer one is known not to fit; extrapolated: by the curve, beyond what ran",
    )
    return [Heading("How to read the figures", 3), Items((*(of_memory if quantity == MEMORY else of_time), *of_both))]


CSV_HEAD = "curve,configuration,by,batch_size,n,inputs,peak_memory_bytes,forward_s,backward_s,both_s,fitted\n"


def as_csv(answer: CurvesAnswer) -> str:
    """A row for each measured length of each curve. fitted: bytes or seconds by the curve; what is not known is empty."""
    out = io.StringIO()
    out.write(CSV_HEAD)
    writer = csv.writer(out, lineterminator="\n")
    for one in answer.curves:
        of = one.measurements
        for p in of.points:
            fitted = one.curve.at(p.n) if one.curve else None
            measured = (p.memory, p.forward, p.backward, p.both, fitted)
            writer.writerow((one.label, in_csv(configuration(of)), answer.by, of.batch_size, p.n, p.inputs, *measured))
    return out.getvalue()


def title(one: CurveAnswer) -> str:
    """A curve's heading: "A  TOY MODEL fp32 sdpa, batch size 2"."""
    of, batch = one.measurements.settings, one.measurements.batch_size
    model = toy(of["model"]) or str(of["model"] or "-").rstrip("/").rpartition("/")[2]
    rows = "" if batch is None else f", batch size {batch}"
    return f"{one.label}  {model:.40} {of['dtype'] or '-'} {of['attn'] or '-'}{rows}"


def configuration(one: Measurements) -> str:
    """A configuration in words: "tiny fp32 sdpa, 2 layers, packed, plain, forward and backward, on cpu"."""
    passes = "forward and backward" if one.backward else "forward"
    return f"{label(complete(one.settings))}, {passes}, on {one.settings['device_name'] or 'an unknown device'}"


def formula(curve: Curve, quantity: str) -> str:
    """The curve with its figures: "437.0 MiB + 312.5 KiB n"."""
    shown = _bytes if quantity == MEMORY else _duration
    return " + ".join(f"{shown(value)}{power}" for value, power in ((curve.a, ""), (curve.b, " n"), (curve.c, " n^2")) if value)


def shown_value(value: float | None, quantity: str) -> str:
    """Bytes or seconds with their unit."""
    if value is None:
        return "-"
    return _bytes(value) if quantity == MEMORY else f"{seconds(value)} s"


def shown_budget(budget: float, quantity: str) -> str:
    """A budget as it was asked for: "80 GB (74.51 GiB)", "2.00 s"."""
    return f"{budget / 1e9:.4g} GB ({_bytes(budget)})" if quantity == MEMORY else shown_value(budget, quantity)


def _bytes(value: float) -> str:
    """Bytes with four significant digits: "493.0 MiB", "1.133 GiB", "12.00 B"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1000:
            return f"{value:#.4g} {unit}"
        value /= 1024
    return f"{value:#.4g} GiB" if abs(value) < 1000 else f"{value:,.0f} GiB"


def _duration(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _longest(answer: CurvesAnswer, budget: float) -> list[Block]:
    rows, texts = [], []
    for one in answer.curves:
        if (found := one.longest) is not None:
            how = "" if found.how == EXTRAPOLATED and found.by_curve is None else found.how
            rows.append((one.label, _length(found.measured), _length(found.too_long), _by_curve(found), how))
            texts += _remarks(one, found, answer)
    grid = Grid(("", "ran and fits", "too long", "by the curve", ""), tuple(rows), frozenset({""}))
    heading = Heading(f"Longest {_unit(answer.by)} in {shown_budget(budget, answer.quantity)}", 2)
    return [heading, grid, *([Items(tuple(texts))] if texts else [])]


def _by_curve(found: Longest) -> str:
    shown = _length(found.by_curve)
    if found.by_curve is None or found.low is None or found.low == found.high:
        return shown
    return f"{shown} ({found.low:,} " + ("or more)" if found.high is None else f"to {found.high:,})")


def _too_far(one: CurveAnswer, answer: CurvesAnswer, n: int) -> str:
    """That nothing is said of a length, and how to come nearer."""
    longest, of = one.values[-1][0], one.measurements
    lengths = f"{2 * longest},{4 * longest}" if answer.by == SEQ_LEN else "LEN,LEN"
    own = " --model PATH" * bool(toy(of.settings["model"]))
    told = f"{n / longest:,.0f} times the longest measured length, {longest:,}, and at most {FURTHEST:g} times is extrapolated"
    command = f"actordbg curve {answer.quantity} {of.replays[-1]} --measure {lengths}{own}"
    return f"{one.label}: refused, {told}: measure longer ones, `{command}`"


def _remarks(one: CurveAnswer, found: Longest, answer: CurvesAnswer) -> list[str]:
    texts = []
    if found.refused:
        texts.append(_too_far(one, answer, found.refused))
    elif found.far and found.by_curve:
        times = f"{found.by_curve / one.values[-1][0]:.1f} times the longest measured length, {one.values[-1][0]:,}"
        texts.append(f"{one.label}: caution, that is {times}: measure a longer one before relying on it")
    if found.exceptions:
        listed = ", ".join(f"{n:,}" for n in found.exceptions[:5])
        texts.append(f"{one.label}: over the budget though longer ones were not: {listed}")
    if found.too_long is None and one.curve is not None and found.by_curve is None and not found.refused:
        texts.append(f"{one.label}: the curve never reaches the budget: measure longer inputs")
    if found.measured is None and found.by_curve is None:
        texts.append(f"{one.label}: nothing that was measured fits")
    return texts


def _at(answer: CurvesAnswer) -> list[Block]:
    rows, refused = [], []
    for one, at in [(curve, at) for curve in answer.curves for at in curve.at]:
        low, value, high = (shown_value(figure, answer.quantity) for figure in (at.low, at.value, at.high))
        between = "-" if at.low is None or at.how == MEASURED else f"{low} to {high}"
        rows.append((one.label, f"{at.n:,}", value, between, at.how + ", far" * at.far, at.fits or "-"))
        refused += [_too_far(one, answer, at.n)] if at.far and at.value is None else []
    width = 5 + (answer.budget is not None)
    columns = ("", _unit(answer.by), "needs", "with the curve's error", "how", "fits")[:width]
    grid = Grid(columns, tuple(row[:width] for row in rows), frozenset({"", "how", "fits"}))
    return [Heading("At the lengths asked for", 2), grid, *([Items(tuple(refused))] if refused else [])]


def _curve(one: CurveAnswer, answer: CurvesAnswer, rows: int) -> list[Block]:
    of = one.measurements
    lines = [f"ran as: {configuration(of)}", _law(one, answer)]
    if of.out_of_memory:
        lines.append(f"out of memory at {', '.join(f'{n:,}' for n in of.out_of_memory[:8])}: never said to fit, nor is more")
    if of.left_out and answer.quantity != MEMORY:
        lines.append(f"{plural(of.left_out, 'input')} left out: warming up or compiling")
    names = ", ".join(of.replays[:3]) + (f" and {len(of.replays) - 3} more" if len(of.replays) > 3 else "")
    blocks: list[Block] = [Heading(title(one), 2), Items((*lines, f"replays: {names}"))]
    if one.values:
        blocks.append(_points(one, answer, rows))
    if one.curve is None:
        blocks.append(Paragraph(_how_to_measure(one, answer.by, answer.quantity)))
    return blocks


def _law(one: CurveAnswer, answer: CurvesAnswer) -> str:
    if one.curve is None:
        return f"no curve: {plural(len(one.values), 'length')} measured, {LEAST} are the fewest"
    form, error, ahead = one.curve.form, one.curve.error, one.curve.ahead
    beyond = "unknown beyond" if ahead is None else f"{max(error, ahead):.1%} for twice the longest"
    return f"curve: {formula(one.curve, answer.quantity)}   (form {form}; error {error:.1%} between lengths, {beyond})"


def _points(one: CurveAnswer, answer: CurvesAnswer, most: int) -> Grid:
    by_length = {point.n: point for point in one.measurements.points}
    times = answer.quantity != MEMORY
    rows = []
    for n, value in thinned(one.values, most) if most > 1 else one.values[:most] or one.values:
        point, fitted = by_length[n], one.curve.at(n) if one.curve else None
        measured = (point.forward, point.backward, point.both) if times else (point.memory,)
        shown = [seconds(figure) if times else shown_value(figure, MEMORY) for figure in (*measured, fitted)]
        off = "-" if fitted is None or not value else f"{(fitted - value) / value:+.1%}"
        rows.append((f"{n:,}", f"{point.inputs:,}", *shown, off))
    columns = (_unit(answer.by), "inputs", *(("forward", "backward", "both") if times else ("peak",)), "curve", "off")
    return Grid(columns, tuple(rows))


def _how_to_measure(one: CurveAnswer, by: str, quantity: str) -> str:
    of = one.measurements
    longest = max([point.n for point in of.points] + [512]) if by == SEQ_LEN else 512
    lengths = {max(64, longest // 4), max(128, longest // 2), longest, 2 * longest}
    bound = of.out_of_memory[0] if of.out_of_memory and by == SEQ_LEN else 2**60
    listed = ",".join(str(n) for n in sorted(lengths) if n < bound)
    return f"More lengths: actordbg curve {quantity} {of.replays[-1]} --measure {listed}"


def _unit(by: str) -> str:
    return {SEQ_LEN: "seq_len", PADDED: "B x S"}.get(by, "tokens")


def _length(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
