"""Turn a result of `actordbg curve` into headings, paragraphs, tables and a chart. Pure.

The chart shows the measured points, the curve through them, the extrapolation as dashes, and the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actordbg.base.units import plural
from actordbg.config.as_ran import complete, label, toy
from actordbg.document.blocks import (
    RIGHT,
    UNCHECKED,
    WRONG,
    Block,
    Chart,
    Grid,
    Heading,
    Items,
    Paragraph,
    Verdict,
    seconds,
)
from actordbg.document.specifications import BAD, MOST_MARKS, hints, layer, layered, names, quantity, thinned
from actordbg.measure.curves import EXTRAPOLATED, FURTHEST, LEAST, MEASURED, MEMORY, NO, TIME, YES, CurveAnswer, CurvesAnswer
from actordbg.measure.measurements import BY, SEQ_LEN

NOTHING = (
    "Nothing was measured: no input passed in these replays. Run `actordbg replay` to measure; `actordbg dump create "
    "--seq-len N` creates inputs of a given length."
)


MOST_ROWS = 24
"""Most lengths in the table of a curve; --json has all."""


def document(answer: CurvesAnswer, charts: Sequence[Chart]) -> list[Block]:
    """Build the document, top to bottom."""
    what = "peak memory" if answer.quantity == MEMORY else f"{answer.passes} time".removeprefix("both ")
    measured = sum(point.inputs for config in answer.curves for point in config.measurements.points)
    summary = f"{what} by {BY[answer.by]}; {plural(answer.replays, 'replay')}, {plural(measured, 'input')}"
    blocks: list[Block] = [Heading(f"actordbg curve {answer.quantity}", 1), Paragraph(summary), _verdict(answer), *charts]
    if not any(config.values for config in answer.curves):
        blocks.append(Paragraph(NOTHING))
    if answer.budget is not None and any(config.longest for config in answer.curves):
        blocks += _longest(answer, answer.budget)
    if any(config.at for config in answer.curves):
        blocks += _at(answer)
    for config in answer.curves:
        blocks += _curve(config, answer)
    legend = f"{_LEGEND[answer.quantity]} docs/how-to/memory-and-time.md explains the curve, its error and the other words."
    return [*blocks, *map(Paragraph, (*answer.notes, legend))]


_LEGEND = {
    MEMORY: "peak: the largest over the inputs of a length, in one worker: on a CPU the process's resident memory, on a GPU what "
    "torch allocated.",
    TIME: "forward, backward, both: median seconds over the inputs of a length, in one worker, without warm-up.",
}


def title(config: CurveAnswer) -> str:
    """Return the heading of a curve: "A  TOY MODEL fp32 sdpa, batch size 2"."""
    of, batch = config.measurements.settings, config.measurements.batch_size
    model = toy(of["model"]) or str(of["model"] or "-").rstrip("/").rpartition("/")[2]
    rows = "" if batch is None else f", batch size {batch}"
    return f"{config.label}  {model:.40} {of['dtype'] or '-'} {of['attn'] or '-'}{rows}"


def shown_value(value: float | None, quantity: str) -> str:
    """Format bytes or seconds with their unit."""
    if value is None:
        return "-"
    return _bytes(value) if quantity == MEMORY else f"{seconds(value)} s"


def _bytes(value: float) -> str:
    """Format bytes with four significant digits: "493.0 MiB", "1.133 GiB", "12.00 B"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1000:
            return f"{value:#.4g} {unit}"
        value /= 1024
    return f"{value:#.4g} GiB" if abs(value) < 1000 else f"{value:,.0f} GiB"


def _longest(answer: CurvesAnswer, budget: float) -> list[Block]:
    rows, texts = [], []
    for config in answer.curves:
        if (longest := config.longest) is None:
            continue
        by_curve = _length(longest.by_curve)
        if longest.by_curve is not None and longest.low is not None and longest.low != longest.high:
            by_curve += f" ({longest.low:,} " + ("or more)" if longest.high is None else f"to {longest.high:,})")
        how = "" if longest.how == EXTRAPOLATED and longest.by_curve is None else longest.how
        rows.append((config.label, _length(longest.measured), _length(longest.too_long), by_curve, how))
        furthest = config.values[-1][0]
        if longest.refused:
            texts.append(_too_far(config, answer, longest.refused))
        elif longest.far and longest.by_curve:
            times = f"{longest.by_curve / furthest:.1f} times the longest measured length, {furthest:,}"
            texts.append(f"{config.label}: caution: {times}; measure a longer input before relying on it")
        if longest.too_long is None and config.curve is not None and longest.by_curve is None and not longest.refused:
            texts.append(f"{config.label}: the curve never reaches the budget: measure longer inputs")
        if longest.measured is None and longest.by_curve is None:
            texts.append(f"{config.label}: no measured length fits")
    grid = Grid(("", "ran and fits", "too long", "by the curve", ""), rows, {""})
    shown = f"{budget / 1e9:.4g} GB ({_bytes(budget)})" if answer.quantity == MEMORY else shown_value(budget, TIME)
    return [Heading(f"Longest {answer.by} in {shown}", 2), grid, *([Items(texts)] if texts else [])]


def _too_far(config: CurveAnswer, answer: CurvesAnswer, n: int) -> str:
    """Explain that a length is too far to extrapolate to, with the command that measures longer inputs."""
    longest, measured = config.values[-1][0], config.measurements
    lengths = f"{2 * longest},{4 * longest}" if answer.by == SEQ_LEN else "LEN,LEN"
    own = " --model PATH" * bool(toy(measured.settings["model"]))
    reason = f"{n / longest:,.0f} times the longest measured length, {longest:,}, beyond the limit of {FURTHEST:g} times"
    command = f"actordbg curve {answer.quantity} {measured.replays[-1]} --measure {lengths}{own}"
    return f"{config.label}: refused: {reason}; measure longer inputs with `{command}`"


def _at(answer: CurvesAnswer) -> list[Block]:
    rows, refused = [], []
    for config, at in [(curve, at) for curve in answer.curves for at in curve.at]:
        low, value, high = (shown_value(figure, answer.quantity) for figure in (at.low, at.value, at.high))
        between = "-" if at.low is None or at.how == MEASURED else f"{low} to {high}"
        rows.append((config.label, f"{at.n:,}", value, between, at.how + ", far" * at.far, at.fits or "-"))
        refused += [_too_far(config, answer, at.n)] * (at.far and at.value is None)
    columns = ("", answer.by, "needs", "with the curve's error", "how", "fits")[: 5 + (answer.budget is not None)]
    grid = Grid(columns, [row[: len(columns)] for row in rows], {"", "how", "fits"})
    return [Heading("At the requested lengths", 2), grid, *([Items(refused)] if refused else [])]


def _curve(config: CurveAnswer, answer: CurvesAnswer) -> list[Block]:
    """Build the section of a configuration: how it ran, its curve, and at most `MOST_ROWS` of its points, evenly sampled."""
    measured, curve, times = config.measurements, config.curve, answer.quantity != MEMORY
    law = f"no curve: {plural(len(config.values), 'length')} measured, at least {LEAST} are needed"
    if curve is not None:
        beyond = "unknown beyond" if curve.ahead is None else f"{max(curve.error, curve.ahead):.1%} at twice the longest"
        terms = [(curve.a, ""), (curve.b, " n"), (curve.c, " n^2")]
        formula = " + ".join(f"{shown_value(value, answer.quantity)}{power}" for value, power in terms if value)
        law = f"curve: {formula}   (form {curve.form}; error {curve.error:.1%} between lengths, {beyond})"
    passes = "forward and backward" if measured.backward else "forward"
    device = measured.settings["device_name"] or "an unknown device"
    lines = [f"ran as: {label(complete(measured.settings))}, {passes}, on {device}", law]
    if measured.out_of_memory:
        lengths = ", ".join(map(_length, measured.out_of_memory[:8]))
        lines.append(f"out of memory at {lengths}: these and longer inputs never fit")
    if measured.left_out and times:
        lines.append(f"{plural(measured.left_out, 'input')} excluded: warm-up or compiling")
    more = f" and {len(measured.replays) - 3} more" if len(measured.replays) > 3 else ""
    lines.append(f"replays: {', '.join(measured.replays[:3])}{more}")
    blocks: list[Block] = [Heading(title(config), 2), Items(lines)]
    if config.values:
        columns = ("forward", "backward", "both") if times else (MEMORY,)
        by_length = {point.n: point for point in measured.points}
        rows = []
        for n, value in thinned(config.values, MOST_ROWS):
            point, fitted = by_length[n], curve.at(n) if curve else None
            figures = [*(getattr(point, name) for name in columns), fitted]
            shown = [seconds(figure) if times else shown_value(figure, MEMORY) for figure in figures]
            off = "-" if fitted is None or not value else f"{(fitted - value) / value:+.1%}"
            rows.append((f"{n:,}", f"{point.inputs:,}", *shown, off))
        blocks.append(Grid((answer.by, "inputs", *(columns if times else ("peak",)), "curve", "off"), rows))
    if curve is None:
        longest, bound = 512, 2**60
        if answer.by == SEQ_LEN:
            longest, bound = max([512, *(point.n for point in measured.points)]), min(measured.out_of_memory, default=bound)
        suggested = sorted({max(64, longest // 4), max(128, longest // 2), longest, 2 * longest})
        listed = ",".join(str(n) for n in suggested if n < bound)
        blocks.append(Paragraph(f"More lengths: actordbg curve {answer.quantity} {measured.replays[-1]} --measure {listed}"))
    return blocks


def _length(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


_STEPS = 60


def _verdict(answer: CurvesAnswer) -> Verdict:
    """Return the verdict: whether the requested lengths fit; without any, the longest length that does."""
    measured = sum(bool(config.values) for config in answer.curves)
    if not measured:
        return Verdict(UNCHECKED, "nothing was measured")
    if requested := [(config, at) for config in answer.curves for at in config.at if at.fits is not None]:
        lengths = f"{plural(len(requested), 'requested length')}"
        if bad := [f"{at.n:,} under {config.label}" for config, at in requested if at.fits != YES]:
            word = WRONG if any(at.fits == NO for _, at in requested) else UNCHECKED
            return Verdict(word, f"{lengths}; not sure to fit: {', '.join(bad[:4])}")
        return Verdict(RIGHT, f"{lengths}; all fit")
    figures = []
    for config in answer.curves[:4]:
        if longest := config.longest:
            how = longest.how if longest.by_curve else "measured only"
            figures.append((f"longest that fits, {config.label} ({how})", f"{longest.by_curve or longest.measured or 0:,}"))
    return Verdict("", f"{plural(measured, 'configuration')}, {plural(answer.replays, 'replay')}", figures)


def curve_charts(answer: CurvesAnswer) -> list[Chart]:
    """Chart every configuration that has points: measured, extrapolated, and the budget as a line. [] if there are no points."""
    drawn = [config for config in answer.curves if config.values]
    if not drawn:
        return []
    memory = answer.quantity == MEMORY
    scale, unit = (2.0**30, "GiB") if memory else (1.0, "s")
    most = max(n for config in drawn for n, _ in config.values)
    lengths = [at.n for config in answer.curves for at in config.at]
    lengths += [config.longest.by_curve for config in answer.curves if config.longest and config.longest.by_curve]
    bounds = [n for config in answer.curves for n in config.measurements.out_of_memory[:1]]
    end = float(max(most, *bounds, min(FURTHEST * most, max(lengths, default=0)), 1))  # past every requested length
    every: list[dict[str, Any]] = []
    inside: list[dict[str, Any]] = []
    beyond: list[dict[str, Any]] = []
    failed = []
    for config in drawn:

        def mark(n: float, value: float, name: str = title(config)) -> dict[str, Any]:
            return {"c": name, "n": n, "v": float(f"{value / scale:.5g}")}

        inputs = {point.n: point.inputs for point in config.measurements.points}
        every += [mark(n, value) | {"s": shown_value(value, answer.quantity), "i": inputs[n]} for n, value in config.values]
        bound = config.measurements.out_of_memory[:1]
        failed += [{"n": n, "c": title(config)} for n in bound]
        if config.curve:  # between the measured lengths, and beyond them up to where memory ran out
            least, longest = config.values[0][0], config.values[-1][0]
            furthest = max(longest, min([end, *bound]))
            for marks, first, last in ((inside, least, longest), (beyond, longest, furthest)):
                steps = [first + (last - first) * step / _STEPS for step in range(_STEPS + 1)]
                marks += [mark(round(n, 1), config.curve.at(n)) for n in steps]
    points = thinned(every, MOST_MARKS)
    x = quantity("n", BY[answer.by].partition(",")[0])
    y = quantity("v", f"peak memory, {unit}" if memory else f"{answer.passes}, {unit}")
    coloured = {"x": x, "y": y, "color": names("c", None)}
    shown = hints(("c", "configuration"), ("n", "length"), ("s", "measured"), ("i", "inputs"))
    layers = [
        layer("line", inside, {"strokeWidth": 1.8}, **coloured),
        layer("line", beyond, {"strokeDash": [5, 4]}, **coloured),
        layer("point", points, {"size": 45, "filled": True}, **coloured, tooltip=shown),
    ]
    if answer.budget is not None:
        budget = [{"v": answer.budget / scale, "n": 0, "t": f"budget {shown_value(answer.budget, answer.quantity)}"}]
        layers.append(layer("rule", budget, {"color": BAD, "strokeDash": [2, 3]}, y=y))
        layers.append(layer("text", budget, {"align": "left", "dx": 6, "dy": -6}, x=x, y=y, text={"field": "t"}))
    if failed:
        tooltip = hints(("c", "out of memory"), ("n", "length"))
        layers.append(layer("rule", failed, {"color": BAD, "strokeDash": [6, 3]}, x=x, tooltip=tooltip))
    spec = layered([], *layers, height=300) | {"resolve": {"scale": {"color": "shared"}}}
    says = "Points are measured, lines fitted, dashes extrapolated."
    rows = [(point["c"], f"{point['n']:,}", point["s"]) for point in points[:200]]
    table = Grid(("configuration", "length", "measured"), rows, {"configuration"})
    return [Chart(f"{answer.quantity.capitalize()} by length", says, spec, table)]
