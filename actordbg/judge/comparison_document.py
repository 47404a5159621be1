"""A comparison as a document: the conclusion in words first, then the figures behind it, the worst first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from actordbg.base.units import plural
from actordbg.config.as_ran import complete, difference
from actordbg.document.blocks import (
    BAD_TONE,
    GOOD_TONE,
    NO_TONE,
    PART_TONE,
    Banner,
    Block,
    Chart,
    Grid,
    Heading,
    Items,
    Paragraph,
    number,
)
from actordbg.records.comparison_record import (
    GOOD,
    MATCH,
    MISMATCH,
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    Figures,
    SideInfo,
)

WORDS = {
    MATCH: "A agrees with B within the thresholds",
    WITHIN_NOISE: "A differs from B no more than the configuration moves by itself",
    MISMATCH: "A differs from B",
    NOT_COMPARED: "nothing was compared",
}
"""What each verdict means."""

FLAT_IS_WIDE = ("bf16", "fp16")
"""Whose flat limits are too wide to say that a configuration is right."""
_TOKENS, _PARAMETERS = 10, 10
_EXAMPLES = 3


def document(record: ComparisonRecord, limit: int, charts: Sequence[Chart] = ()) -> list[Block]:
    """The whole comparison with its `limit` worst dumps; 0: all of them."""
    shown = [one for one in record.dumps if one.verdict != NOT_COMPARED]
    shown = shown[: limit or None]
    left = f"; not judged: {'; '.join(record.unjudged)}" if record.good and record.unjudged else ""
    flat = "; flat limits: what rounding does was not measured" if flat_where_it_matters(record) else ""
    known = excluded(record.excludes, record.a.dtype)
    said = "failed: A failed where B did not" if _nothing_differs(record) else f"{record.verdict}: {WORDS[record.verdict]}"
    return [
        Heading(f"{said}{flat}{left}", 1),
        Paragraph(conclusion(record)),
        comparison_banner(record),
        *([Paragraph(known)] if known else []),
        Items(tuple(_facts(record))),
        *charts,
        *_dumps(record, shown),
        *_tokens(shown),
        *_parameters(shown),
        *_not_compared(record),
    ]


_TONES = {MATCH: (GOOD_TONE, "RIGHT", "AGREES"), WITHIN_NOISE: (GOOD_TONE, "RIGHT", "AGREES"),
          MISMATCH: (BAD_TONE, "WRONG", "DIFFERS"), NOT_COMPARED: (NO_TONE, "NOT JUDGED", "NOT COMPARED")}  # fmt: skip


def comparison_banner(record: ComparisonRecord) -> Banner:
    """The verdict in a sentence: RIGHT or WRONG against the truth, AGREES or DIFFERS against anything else."""
    tone, against_truth, otherwise = _TONES[record.verdict]
    known = [one.log_probs.max_abs for one in record.dumps if one.log_probs and one.log_probs.max_abs is not None]
    compared = sum(one.verdict != NOT_COMPARED for one in record.dumps)
    figures = (
        ("dumps compared", f"{compared:,} / {len(record.dumps):,}"),
        ("largest difference", f"{number(max(known, default=None), 3)} nats"),
    )
    said = conclusion(record)
    if record.verdict == MATCH and flat_where_it_matters(record):
        tone = PART_TONE
    word = "FAILED" if _nothing_differs(record) else against_truth if record.b.kind == "truth" else otherwise
    return Banner(word, said, tone, figures, record.unjudged)


def conclusion(record: ComparisonRecord) -> str:
    """In a sentence or two: how many dumps, which verdict, how large the largest difference is."""
    counts = Counter(one.verdict for one in record.dumps)
    failed = sum(_only_failed(one) for one in record.dumps)
    compared = len(record.dumps) - counts[NOT_COMPARED] - failed
    counts[MISMATCH] -= failed
    lost = f"A failed on {plural(failed, 'dump')} that B has the results of. " if failed else ""
    if not compared:
        whys = sorted({why for one in record.dumps for why in one.not_compared.values()})
        reasons = "; ".join(record.reasons or whys)
        return f"{lost}None of {plural(len(record.dumps), 'dump')} could be compared{reasons and ': '}{reasons}."
    words = {MATCH: "within the thresholds", WITHIN_NOISE: "within the noise", MISMATCH: "outside"}
    parts = [f"{counts[name]:,} {text}" for name, text in words.items() if counts[name]]
    text = f"{lost}{plural(compared, 'dump')} compared: {', '.join(parts)}"
    text += f"; {counts[NOT_COMPARED]:,} not compared." if counts[NOT_COMPARED] else "."
    known = [(one.log_probs.max_abs, one.dump_id) for one in record.dumps if one.log_probs and one.log_probs.max_abs is not None]
    if known:
        largest, dump_id = max(known)
        where = f" (in {dump_id})" if largest else ""
        text += f" The largest difference of a log-prob is {number(largest, 3)} nats{where}."
    return " ".join(part for part in (text, meaning(record), _beyond(record)) if part)


def _only_failed(one: DumpComparison) -> bool:
    """Whether it is a mismatch without figures: A failed on it, B did not."""
    return one.verdict == MISMATCH and one.log_probs is None


def _nothing_differs(record: ComparisonRecord) -> bool:
    """Whether it is a mismatch by failures of A alone."""
    bad = [one for one in record.dumps if one.verdict == MISMATCH]
    return bool(bad) and all(map(_only_failed, bad))


def _beyond(record: ComparisonRecord) -> str:
    """A difference within the thresholds that noise does not explain, in words; "" if there is none."""
    real = [one for one in record.dumps if one.beyond_noise and one.verdict in GOOD]
    if not real:
        return ""
    what = f"{plural(len(real), 'dump')} within the thresholds "
    what += "differs" if len(real) == 1 else "differ"
    return f"{what} by more than the noise, for example {real[0].beyond_noise[0]}: a real difference that the thresholds allow."


def meaning(record: ComparisonRecord) -> str:
    """What the verdict says about A in a sentence or two: how near it is to the truth, or what it has that B has not."""
    if _nothing_differs(record):
        return ""  # nothing is known to be further away: what failed is said elsewhere
    real = record.verdict == MISMATCH
    dtype = record.a.dtype or "its dtype"
    floor = " and than its own noise floor" if record.noise_id else ""
    if record.b.kind == "truth":
        if " from " in record.thresholds_from and record.verdict != WITHIN_NOISE:  # not the dtype's, but somebody's own
            further = f"further from the truth than the thresholds allow{floor}"
            return f"A is {further if real else 'as near the truth as the thresholds ask'}."
        if real:
            return f"A is further from the truth than {dtype} explains{floor}: more than rounding moves it."
        if flat_where_it_matters(record):
            return f"A is within what {dtype} does to any model; whether it is within what {dtype} does to this one is not known."
        return f"A is as near the truth as {dtype} allows."
    if record.b.kind == "golden":
        return "A does not give what the run got." if real else "A gives what the run got."
    settings = _configured(record)
    if real:
        return f"{settings}. Which of them is right, the truth tells: `actordbg compare {record.a.replay_id} truth`."
    return f"{settings}; no log-prob moves beyond the thresholds."


def flat_where_it_matters(record: ComparisonRecord) -> bool:
    """Whether a good verdict against the truth rests on flat limits in a dtype for which they are wide."""
    return record.good and record.b.kind == "truth" and record.a.dtype in FLAT_IS_WIDE and record.rounding_id is None


EXCLUDED = {
    "token": "any one log-prob off by {} nats",
    "tokens": "all log-probs shifted by {} nats",
    "gradients": "all gradients off by {}",
    "parameter": "the gradient of any one parameter off by {}",
    "matrix": "one weight matrix times 1 + {}",
    "attention": "attention scores times 1 + {}",
    "position": "the second half of each row {} positions further on",
}
"""A fault of a size, in words (`compare.power`)."""


def excluded(sizes: Mapping[str, float | None], dtype: str | None) -> str:
    """What a green verdict excludes, in words; "" where that is not known."""
    shares = ("gradients", "parameter")
    known = [(words, sizes[name], name in shares) for name, words in EXCLUDED.items() if sizes.get(name) is not None]
    if not known:
        return ""
    parts = [words.format(f"{value:.2%}" if share else f"{value:.2g}") for words, value, share in known]
    narrow = f" What is smaller, {dtype} cannot tell from rounding: run in fp32 first." if dtype in FLAT_IS_WIDE else ""
    unseen = [
        words.split(" {}")[0].removesuffix(" off by").removesuffix(" times 1 +")
        for name, words in EXCLUDED.items()
        if sizes.get(name, 0) is None
    ]
    never = f" No size that was tried would have been red for {', '.join(unseen)}." if unseen else ""
    return f"It would have been red for {', '.join(parts)}.{never}{narrow}"


def _configured(record: ComparisonRecord) -> str:
    """In which settings the two sides differ. Files of earlier versions have labels only."""
    a, b = record.a, record.b
    if a.settings and b.settings:
        return difference(complete(a.settings), complete(b.settings))
    return "Both are configured alike" if a.label == b.label else f"A is {a.label}; B is {b.label}"


def side(info: SideInfo) -> str:
    """One side in words."""
    name = info.replay_id or info.kind
    dtype = f", computed in {info.dtype}" if info.dtype and info.dtype not in info.label.split() else ""
    return f"{name}: {info.label}{dtype}"


def _facts(record: ComparisonRecord) -> Iterator[str]:
    yield f"A  {side(record.a)}"
    yield f"B  {side(record.b)}"
    limits = ", ".join(f"{name} {_limit(record, name)}" for name in record.thresholds)
    yield f"thresholds: {limits or 'none'} ({record.thresholds_from})"
    if record.noise_id:
        yield f"noise floor: {record.noise_id}"
    yield from (f"note: {reason}" for reason in record.reasons)


def _limit(record: ComparisonRecord, name: str) -> str:
    """The threshold of a measure, or the least and the largest where each dump has its own."""
    flat = record.thresholds[name]
    each = [one.limits.get(name, flat) for one in record.dumps if one.log_probs is not None] or [flat]
    least, largest = number(min(each), 3), number(max(each), 3)
    return least if least == largest else f"{least} to {largest}"


def _dumps(record: ComparisonRecord, shown: Sequence[DumpComparison]) -> list[Block]:
    if not shown:
        return []
    compared = sum(one.verdict != NOT_COMPARED for one in record.dumps)  # what A failed on is in the table too
    title = "Dumps, the worst first" if len(shown) == compared else f"The worst {len(shown):,} of {plural(compared, 'dump')}"
    columns = ("dump", "S", "verdict", "max", "p99", "mean", "clip", "KL k3", "ulp")
    grads = any(one.grad_norm_rel is not None or one.gradients is not None for one in shown)
    if grads:
        columns = (*columns[:-2], "|g| rel", "grad")
    blocks: list[Block] = [
        Heading(title, 3),
        Grid(columns, tuple(_dump(one, grads) for one in shown), {"dump", "verdict"}),
        Paragraph(_legend(grads, any(one.log_probs and one.log_probs.nonfinite for one in shown))),
    ]
    reasons = tuple(f"{one.dump_id}: {'; '.join(one.reasons)}" for one in shown if one.reasons)
    return [*blocks, Items(reasons)] if reasons else blocks


def _dump(one: DumpComparison, grads: bool) -> tuple[str, ...]:
    tokens = one.log_probs or Figures(0)
    last: tuple[str, ...] = (number(tokens.kl_k3, 2), "-" if tokens.max_ulp is None else _count(tokens.max_ulp))
    if grads:
        last = (number(one.grad_norm_rel, 2), number(one.gradients.distance if one.gradients else None, 2))
    odd = f"{tokens.nonfinite} odd" if tokens.nonfinite else None
    return (
        one.dump_id,
        "-" if one.seq_len is None else str(one.seq_len),
        one.verdict,
        odd or number(tokens.max_abs, 3),
        number(tokens.p99_abs, 2),
        number(tokens.mean_abs, 2),
        "-" if tokens.clip_share is None else f"{tokens.clip_share:.1%}",
        *last,
    )


def _count(value: int) -> str:
    return str(value) if value < 10**6 else f"{value:.1e}"


def _legend(grads: bool, odd: bool) -> str:
    text = "max, p99, mean: absolute differences of log-probs, nats. clip: tokens whose ratio is outside 0.8 to 1.2. "
    text += "odd: log-probs that are not finite on one side only. " if odd else ""
    if grads:
        return text + "|g| rel: relative difference of the gradient norms. grad: |a - b| / |b| of the kept gradients."
    return text + "ulp: units of last place of the dtype that computed both."


def _tokens(shown: Sequence[DumpComparison]) -> list[Block]:
    found = [(one.dump_id, token) for one in shown for token in one.worst_tokens]
    found.sort(key=lambda pair: -(abs(pair[1].difference) if pair[1].difference is not None else float("inf")))
    if not found:
        return []
    rows = tuple(
        (dump_id, str(t.row), str(t.position), "-" if t.token_id is None else str(t.token_id), number(t.a, 6), number(t.b, 6),
         number(t.difference, 3))
        for dump_id, t in found[:_TOKENS]
    )  # fmt: skip
    columns = ("dump", "row", "position", "token", "A", "B", "A - B")
    return [Heading("Worst tokens", 3), Grid(columns, rows, {"dump"})]


def _parameters(shown: Sequence[DumpComparison]) -> list[Block]:
    found = [(one.dump_id, item) for one in shown for item in one.parameters]
    found.sort(key=lambda pair: -(math.inf if (distance := pair[1].figures.distance) is None else distance))
    if not found:
        return []
    rows = tuple(
        (dump_id, item.name + (" (sampled)" if item.sampled else ""), number(item.figures.distance, 3),
         "-" if item.figures.cosine is None else f"{item.figures.cosine:.6f}", number(item.figures.max_abs, 2))
        for dump_id, item in found[:_PARAMETERS]
    )  # fmt: skip
    columns = ("dump", "gradient of", "|a-b|/|b|", "cosine", "max")  # the first one is cut first
    return [Heading("Worst parameters", 3), Grid(columns, rows, {"gradient of", "dump"})]


def _not_compared(record: ComparisonRecord) -> list[Block]:
    """Dumps that were not compared, by reason, with examples."""
    by_reason: dict[str, list[str]] = {}
    for one in record.dumps:
        for what, why in one.not_compared.items():
            text = why if what == "dump" else f"{what}: {why}"
            by_reason.setdefault(text, []).append(one.dump_id)
    if not by_reason:
        return []
    lines = []
    for reason, ids in by_reason.items():
        examples = ", ".join(ids[:_EXAMPLES]) + (", ..." if len(ids) > _EXAMPLES else "")
        lines.append(f"{plural(len(ids), 'dump')}: {reason}; {examples}")
    return [Heading("Not compared", 3), Items(tuple(lines))]
