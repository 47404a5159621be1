"""A noise floor as a document: whether the same call repeats, what moves it, and by how much. Pure."""

from __future__ import annotations

from actordbg.base.units import plural
from actordbg.document.blocks import GOOD_TONE, NO_TONE, PART_TONE, Banner, Block, Chart, Grid, Heading, Items, Paragraph, number
from actordbg.document.specifications import ACCENT, hints, layer, layered, names, quantity
from actordbg.judge.noise_floor import REPEAT, ROUNDING, ROUNDING_MARGIN
from actordbg.judge.thresholds import MEASURES
from actordbg.records.comparison_record import Figures, NoiseRecord, NoiseVariant

_HOW = {
    "repeat": "the same call again",
    "repad": "more padding",
    "rebatch": "every row twice",
    "reorder": "rows reversed",
    "rounding": "the dtype by itself",
}
_FIGURES = {"max_abs": "largest", "p99_abs": "99th percentile", "mean_abs": "mean"}
_WORDS = {True: ("DETERMINISTIC", GOOD_TONE), False: ("NOT DETERMINISTIC", PART_TONE), None: ("UNKNOWN", NO_TONE)}


def tokens_of(record: NoiseRecord) -> int:
    """Returns how many log-probs were compared."""
    return max((variant.log_probs.count for variant in record.variants if variant.log_probs is not None), default=0)


def deterministic(record: NoiseRecord) -> bool | None:
    """Returns whether the same call, run again, gave the same log-probs and gradient norms; None if that is not known."""
    repeat = _variant(record, REPEAT)
    if repeat is None or repeat.log_probs is None:
        return None
    return not repeat.log_probs.max_abs and not repeat.grad_norm_rel


def moves_most(record: NoiseRecord) -> NoiseVariant | None:
    """Returns the variation that moves a log-prob most, None where none moves any. Rounding is no variation."""
    moved = [variant for variant in record.variants if _largest(variant) and variant.name != ROUNDING]
    return max(moved, key=_largest, default=None)


def conclusion(record: NoiseRecord) -> list[str]:
    """Says what the floor means, a sentence or two for each finding, and last the command that uses it."""
    lines, most, same = [], moves_most(record), deterministic(record)
    if same is True:
        lines.append("Run again, it gives the same bits: this configuration is deterministic here.")
    elif same is False:
        lines.append(
            "Run again, the same call gives other numbers: it is not deterministic here (atomic additions, kernels chosen by "
            "timing), and no two runs of it can agree better than that."
        )
    unknown = [variant.name for variant in record.variants if variant.name != ROUNDING and variant.log_probs is None]
    if unknown:
        lines.append(f"Not measured: {', '.join(unknown)}; no input passed unchanged and so.")
    if most is not None:
        how = _HOW.get(most.name, most.name)
        lines.append(f"Moved most by {how} ({most.name}): a log-prob by up to {_largest(most):.3g} nats.")
    elif not unknown:
        lines.append("Padding, batch and order of rows move no log-prob at all.")
    rounding = _variant(record, ROUNDING)
    if rounding is not None and rounding.log_probs is not None:
        lines.append(
            f"{record.dtype} itself, each row alone, is up to {_largest(rounding):.3g} nats from the same in a wider dtype: no "
            f"configuration can be expected to be nearer to the truth. That counts {ROUNDING_MARGIN:g} times in the floor."
        )
    if record.config.get("oracle") is None:
        lines.append(f"next: actordbg compare {record.replay_id} truth --noise {record.noise_id}")
    return lines


def noise_page(record: NoiseRecord) -> list[Block]:
    """The whole answer of `actordbg noise`: the floor by variation, then by measure, and what it means."""
    word, tone = _WORDS[deterministic(record)]
    said = conclusion(record)
    sentence = " ".join(line for line in said if not line.startswith("next: "))
    floor = (("the floor of a log-prob", f"{number(record.floor.get('max_abs'), 3)} nats"), ("inputs", str(len(record.dumps))))
    rows = tuple(
        (variant.name, _HOW.get(variant.name, ""), *(number(getattr(variant.log_probs or Figures(0), name)) for name in _FIGURES),
         number(variant.grad_norm_rel))
        for variant in record.variants
    )  # fmt: skip
    floors = tuple(
        (MEASURES.get(name, name).removesuffix(" (no default)"), number(value)) for name, value in record.floor.items()
    )
    compared = f"{plural(len(record.dumps), 'input')} with {tokens_of(record):,} log-probs"
    left = [f"left out: {reason}" for reason in record.reasons[:5]]
    more = len(record.reasons) - len(left)
    return [
        Heading(f"noise {record.noise_id}", 1),
        Banner(word, sentence, tone, floor),
        Items((f"ran as: {record.label}", f"compared: {compared}; unchanged in {record.replay_id}")),
        *([chart] if (chart := _moved(record)) else []),
        Grid(("variation", "what", "max", "p99", "mean", "|g| rel"), rows, {"variation", "what"}),
        Paragraph("max, p99, mean: how far it moves log-probs, nats. |g| rel: the gradient norm, relative."),
        Grid(("the floor", "largest"), floors, {"the floor"}),
        Items((*said, *left, *([f"left out: {more} more, in --json"] if more else []))),
    ]  # fmt: skip


def _moved(record: NoiseRecord) -> Chart | None:
    rows = [
        {"v": variant.name, "m": words, "x": float(f"{value:.4g}")}
        for variant in record.variants if variant.log_probs is not None
        for name, words in _FIGURES.items() if (value := getattr(variant.log_probs, name)) is not None
    ]  # fmt: skip
    if not rows:
        return None
    shown = hints(("v", "variation"), ("m", "figure"), ("x", "nats"))
    largest = [row for row in rows if row["m"] == _FIGURES["max_abs"]]
    bars = layer("bar", largest, {"color": ACCENT}, tooltip=shown)
    spec = layered([], bars, height=32 * len(largest), x=quantity("x", "a log-prob moves by up to, nats"), y=names("v", None))
    lines = tuple((str(row["v"]), str(row["m"]), number(float(str(row["x"])), 3)) for row in rows)
    table = Grid(("variation", "figure", "nats"), lines, {"variation", "figure"})
    says = "Each variation changes what must not matter; rounding is the dtype by itself, each row alone."
    return Chart("What moves it", says, spec, table)


def _variant(record: NoiseRecord, name: str) -> NoiseVariant | None:
    return next((variant for variant in record.variants if variant.name == name), None)


def _largest(variant: NoiseVariant) -> float:
    return (variant.log_probs.max_abs or 0.0) if variant.log_probs else 0.0
