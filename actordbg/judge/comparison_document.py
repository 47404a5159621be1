"""Build the document of a comparison: the conclusion, then the figures behind it, worst first, and the charts.

The charts show the worst dump's tokens, A against B, and gradients by parameter and layer. Figures come from the comparison's
record, tokens from the tensors that both replays kept, if they still exist. Only the worst dumps are read: a page holds a few
thousand marks, and no reader looks at more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import ActordbgError
from actordbg.base.units import grouped, plural, some
from actordbg.config.as_ran import complete, difference
from actordbg.config.replay_config import TINY, TOY_MODEL
from actordbg.document.blocks import (
    FAILED,
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
    number,
    section,
)
from actordbg.document.specifications import MOST_MARKS, hints, layer, layered, names, quantity, rows_high
from actordbg.judge.replay_findings import FLAT, RUNS, explained_outputs
from actordbg.records.comparison_record import (
    GOOD,
    MATCH,
    MISMATCH,
    NAMES_OF_B,
    NOT_COMPARED,
    OF_B,
    TRUTH,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    Figures,
)
from actordbg.records.finding import Finding, NotChecked
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.judge.token_charts import Texts, TokenPair

_WORDS = {MATCH: RIGHT, WITHIN_NOISE: RIGHT, MISMATCH: WRONG, NOT_COMPARED: UNCHECKED}
NARROW = ("bf16", "fp16")
MOST, _EXAMPLES = 10, 3
Ranked = list[tuple[float | None, dict[str, str]]]
"""Rows of a table, each with the distance that ranks it."""


def document(record: ComparisonRecord, limit: int, charts: Sequence[Chart] = (), whose: str = "") -> list[Block]:
    """Build the document with the `limit` worst dumps; 0: all dumps. whose: who else wrote what it rests on."""
    verdict = replace(comparison_verdict(record), whose=whose)
    return [Heading("actordbg compare", 1), verdict, *details(record, limit, charts)]


def details(record: ComparisonRecord, limit: int, charts: Sequence[Chart] = (), *, excludes: bool = True) -> list[Block]:
    """Build what follows the verdict: the sides, the charts and the tables. excludes: say which faults would have been red."""
    shown, known = record.compared[: limit or None], excluded(record.excludes, record.a.dtype) if excludes else ""
    return [
        Items(list(_facts(record))),
        *([Paragraph(known)] if known else []),
        *charts,
        *_dumps(record, shown),
        *_worst("Worst tokens", _tokens(shown), "dump"),
        *_worst("Worst parameters", _parameters(shown), "gradient of", "dump"),
        *_not_compared(record),
    ]


def word_of(verdict: str, against_kind: str) -> str:
    """Return the word for a comparison's verdict. Only agreement with the truth is RIGHT: another B may be wrong as well."""
    word = _WORDS[verdict]
    return UNCHECKED if word == RIGHT and against_kind != "truth" else word


def comparison_verdict(record: ComparisonRecord) -> Verdict:
    """Return the verdict on A."""
    word = FAILED if _nothing_differs(record) else word_of(record.verdict, record.b.kind)
    unknown = record.good and word == UNCHECKED
    figures = [("dumps compared", f"{len(record.compared):,} of {len(record.dumps):,}")]
    if record.furthest:
        most = number(record.furthest[0], 3)
        figures.insert(0, ("max diff", f"{most} nats"))
    left = [*record.unjudged] if record.good else []
    left += [FLAT] if flat_where_it_matters(record) else []
    left += [NotChecked(TRUTH, "either side against the truth")] if unknown else []
    ours = record.a.replay_id
    toy = record.a.settings.get("model") == TINY or record.a.label.startswith(TOY_MODEL)
    next_command = "actordbg check --model YOUR_MODEL" if toy else ""
    if not record.compared:
        next_command = f"actordbg report {ours}"
    elif record.b.kind != "truth":
        next_command = f"actordbg compare {ours} truth"
    elif word == WRONG:
        next_command = f"actordbg explain {ours}"
    found = findings_of(record)
    said, further = conclusion(record)
    return Verdict(word, said, figures, left, next=next_command, toy=toy, findings=found, further=further)


def findings_of(record: ComparisonRecord) -> list[Finding]:
    """Return what is wrong with A: known causes first, then each dump that differs."""
    if record.verdict != MISMATCH:
        failed = [dump for dump in record.dumps if _only_failed(dump)] if _nothing_differs(record) else []
        return [Finding(RUNS, "; ".join(dump.not_compared.values()), {"dump": dump.dump_id}) for dump in failed]
    return [*explained_outputs(record), *record.differing] or [Finding(OF_B[record.b.kind], "; ".join(record.reasons))]


def conclusion(record: ComparisonRecord) -> tuple[str, list[str]]:
    """Say of how many dumps what was found, and what it means of A; in further clauses the sides, the largest difference."""
    counts = Counter("failed" if _only_failed(dump) else dump.verdict for dump in record.dumps)
    failed, left = counts.pop("failed", 0), counts.pop(NOT_COMPARED, 0)
    further = [f"A is {record.a.replay_id}, B {NAMES_OF_B.get(record.b.kind, record.b.replay_id)}"]
    lost = f"A failed on {plural(failed, 'dump')} that B has results for" if failed else ""
    if not counts:
        reasons = record.reasons or sorted({why for dump in record.dumps for why in dump.not_compared.values()})
        none = f"none of {plural(len(record.dumps), 'dump')} could be compared"
        return lost or none, [*further, *([none] if lost else []), *reasons]
    words = {MATCH: "within the thresholds", WITHIN_NOISE: "within the noise floor", MISMATCH: "beyond the thresholds"}
    judged = [(counts[name], text) for name, text in words.items() if counts[name]]
    (most, how), *others = judged
    parts = [f"{most:,} of {plural(len(record.dumps), 'dump')} {how}", *(f"{count:,} {text}" for count, text in others)]
    what = ": ".join(filter(None, (", ".join(parts), meaning(record))))
    further += [*([what] if lost else []), *([f"{left:,} not compared"] if left else [])]
    if record.furthest:
        largest, dump_id = record.furthest
        where = f", in {dump_id}" if largest else ""
        further.append(f"the largest difference of a log-prob is {number(largest, 3)} nats{where}")
    if beyond := [dump.beyond_noise[0] for dump in record.dumps if dump.beyond_noise and dump.verdict in GOOD]:
        differ = "differs" if len(beyond) == 1 else "differ"
        many = f"{plural(len(beyond), 'dump')} within the thresholds {differ}"
        further.append(f"{many} by more than the noise, for example {beyond[0]}: a real difference that the thresholds allow")
    return lost or what, further


def _only_failed(dump: DumpComparison) -> bool:
    """Return whether the dump is a mismatch without figures: A failed on it, B did not."""
    return dump.verdict == MISMATCH and dump.log_probs is None


def _nothing_differs(record: ComparisonRecord) -> bool:
    """Return whether every mismatch is a failure of A."""
    return bool(record.mismatches) and all(map(_only_failed, record.mismatches))


def meaning(record: ComparisonRecord) -> str:
    """Explain in a clause what the verdict says about A: its distance from the truth, or how it differs from B."""
    if _nothing_differs(record):
        return ""  # no distance is known; the failures are listed elsewhere
    real, dtype = record.verdict == MISMATCH, record.a.dtype or "its dtype"
    if record.b.kind == "truth":
        set_by_user = " from " in record.thresholds_from and record.verdict != WITHIN_NOISE  # not by the dtype
        limit = "the thresholds" if set_by_user else f"{dtype} rounding"
        if real:
            noise = " or its own noise floor" if record.noise_id else ""
            return f"A is further from the truth than {limit}{noise} explains"
        if flat_where_it_matters(record):
            return f"A is within the general limits for {dtype}"
        return "A is within the thresholds" if set_by_user else f"A matches the truth to {limit}"
    if record.b.kind == "golden":
        reproduces = "does not reproduce" if real else "reproduces"
        return f"A {reproduces} the run's outputs"
    return difference(complete(record.a.settings), complete(record.b.settings))


def flat_where_it_matters(record: ComparisonRecord) -> bool:
    """Return whether a good verdict against the truth rests on flat limits, which are too wide to call a configuration right."""
    return record.good and record.b.kind == "truth" and record.rounding_id is None


EXCLUDED = {
    "token": ("any one log-prob", "wrong by {} nats"),
    "tokens": ("all log-probs", "shifted by {} nats"),
    "gradients": ("all gradients", "wrong by {}"),
    "parameter": ("the gradient of any one parameter", "wrong by {}"),
    "matrix": ("one weight matrix", "x (1 + {})"),
    "attention": ("attention scores", "times 1 + {}"),
    "position": ("second half of each row", "shifted by {} positions"),
}
"""What each kind of fault is of, and how, with a place for its size (`compare.measured_limits`)."""


def excluded(sizes: Mapping[str, float | None], dtype: str | None) -> str:
    """Describe the faults that a green verdict excludes; "" if unknown."""
    known = []
    for name, (subject, wrong) in EXCLUDED.items():
        if (size := sizes.get(name)) is not None:
            amount = f"{100 * size:.3g}%" if name in ("gradients", "parameter") else f"{size:.2g}"
            known.append(f"{subject} {wrong.format(amount)}")
    if not known:
        return ""
    unseen = [subject for name, (subject, _) in EXCLUDED.items() if sizes.get(name, 0) is None]
    narrow = f" Smaller errors are lost in {dtype} rounding: run in fp32 first." if dtype in NARROW else ""
    never = f" Would have missed errors, of every size tried, in {', '.join(unseen)}." if unseen else ""
    return f"Would have failed on {', '.join(known)}.{never}{narrow}"


def _facts(record: ComparisonRecord) -> Iterator[str]:
    for letter, info in (("A", record.a), ("B", record.b)):
        dtype = f", computed in {info.dtype}" if info.dtype and info.dtype not in info.label.split() else ""
        replay = f"replay {info.replay_id}, " if info.replay_id else ""
        yield f"{letter}: {replay}{info.label}{dtype}"
    limits = ", ".join(f"{name} {_limit(record, name)}" for name in record.thresholds) or "none"
    yield f"thresholds: {limits} ({record.thresholds_from})"
    if record.noise_id:
        yield f"noise floor: {record.noise_id}"
    yield from (f"note: {reason}" for reason in record.reasons)


def _limit(record: ComparisonRecord, name: str) -> str:
    """Return the threshold of a measure, or "least to largest" if dumps have different ones."""
    flat = record.thresholds[name]
    each = [dump.limits.get(name, flat) for dump in record.dumps if dump.log_probs is not None] or [flat]
    return " to ".join(dict.fromkeys(number(value, 3) for value in (min(each), max(each))))


def table(rows: Sequence[dict[str, str]], *text: str) -> Grid:
    """Build a table from rows by column. text: columns that are not figures."""
    return Grid(list(rows[0]), [list(row.values()) for row in rows], text)


def _dumps(record: ComparisonRecord, shown: Sequence[DumpComparison]) -> list[Block]:
    if not shown:
        return []
    count = len(record.compared)
    title = "Dumps, the worst first" if len(shown) == count else f"The worst {len(shown):,} of {plural(count, 'dump')}"
    grads = any(dump.grad_norm_rel is not None or dump.gradients is not None for dump in shown)
    nonfinite = any(dump.log_probs and dump.log_probs.nonfinite for dump in shown)
    legend = "max, p99, mean: absolute differences of log-probs, nats. clip: tokens whose ratio is outside 0.8 to 1.2. "
    legend += "odd: log-probs that are not finite on one side only. " if nonfinite else ""
    if grads:
        legend += "|g| rel: relative difference of the gradient norms. grad: |a - b| / |b| of the kept gradients."
    else:
        legend += "KL k3: the k3 estimate of KL(B, A), nats."
    rows = table([_dump(dump, grads) for dump in shown], "dump", "outputs")
    reasons = [f"{dump.dump_id}: {'; '.join(dump.reasons)}" for dump in shown if dump.reasons]
    return [Heading(title, 3), rows, Paragraph(legend), *section("", reasons)]


def _dump(dump: DumpComparison, grads: bool) -> dict[str, str]:
    tokens = dump.log_probs or Figures(0)
    distance = dump.gradients.distance if dump.gradients else None
    return {
        "dump": dump.dump_id,
        "S": str(dump.seq_len or "-"),
        "outputs": dump.verdict,  # a dump whose outputs match may still break a law
        "max": f"{tokens.nonfinite} odd" if tokens.nonfinite else number(tokens.max_abs, 3),
        "p99": number(tokens.p99_abs, 2),
        "mean": number(tokens.mean_abs, 2),
        "clip": "-" if tokens.clip_share is None else f"{tokens.clip_share:.1%}",
    } | ({"|g| rel": number(dump.grad_norm_rel, 2), "grad": number(distance, 2)} if grads else {"KL k3": number(tokens.kl_k3, 2)})


def _worst(title: str, rows: Ranked, *text: str) -> list[Block]:
    """Tabulate the `MOST` rows with the largest distances. rows: (distance, row); None is larger than any."""
    rows.sort(key=lambda pair: -(math.inf if pair[0] is None else abs(pair[0])))
    return [Heading(title, 3), table([row for _, row in rows[:MOST]], *text)] if rows else []


def _tokens(shown: Sequence[DumpComparison]) -> Ranked:
    return [
        (token.difference, {"dump": dump.dump_id, "row": str(token.row), "position": str(token.position),
                            "token": "-" if token.token_id is None else str(token.token_id), "A": number(token.a, 6),
                            "B": number(token.b, 6), "A - B": number(token.difference, 3)})
        for dump in shown for token in dump.worst_tokens
    ]  # fmt: skip


def _parameters(shown: Sequence[DumpComparison]) -> Ranked:
    return [
        (figures.distance, {"dump": dump.dump_id, "gradient of": f"{item.name} (sampled)" if item.sampled else item.name,
                            "|a-b|/|b|": number(figures.distance, 3),
                            "cosine": "-" if figures.cosine is None else f"{figures.cosine:.6f}",
                            "max": number(figures.max_abs, 2)})
        for dump in shown for item in dump.parameters for figures in (item.figures,)
    ]  # fmt: skip


def _not_compared(record: ComparisonRecord) -> list[Block]:
    """List the dumps that were not compared, by reason, with examples."""
    by_reason = grouped(
        (why if what == "dump" else f"{what}: {why}", dump.dump_id)
        for dump in record.dumps
        for what, why in dump.not_compared.items()
    )
    lines = [f"{plural(len(ids), 'dump')}: {why}; {some(ids, _EXAMPLES)}" for why, ids in by_reason.items()]
    return section("Not compared", lines)


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_OUTSIDE = "-"


def comparison_charts(store: Store, record: ComparisonRecord, texts: Texts | None = None) -> list[Chart]:
    """Draw the charts of a comparison, without empty ones."""
    from actordbg.judge.token_charts import tokens_chart  # imports numpy, which the text does not need

    pair = _pair(store, record)
    charts = tokens_chart(pair, texts) if pair else None, gradients_chart(record.dumps)
    return [chart for chart in charts if chart is not None]


def _pair(store: Store, record: ComparisonRecord) -> TokenPair | None:
    """Return the worst dump whose tensors both sides kept."""
    from actordbg.compare.sides import both_sides, recorded_arrays
    from actordbg.judge.token_charts import TokenPair

    if record.a.replay_id is None or record.b.replay_id is None:
        return None
    try:
        ours, theirs = both_sides(store, record.a.replay_id, record.b.replay_id)
    except ActordbgError:  # a side is gone: its figures are not
        return None
    for dump in [dump for dump in record.compared if dump.log_probs]:
        a, b = ours.read(dump.dump_id), theirs.read(dump.dump_id)
        if isinstance(a, str) or isinstance(b, str) or a.log_probs.shape != b.log_probs.shape:
            continue
        limit = dump.limits.get("max_abs", record.thresholds.get("max_abs"))
        tokens = recorded_arrays(store, ours.inputs[dump.dump_id].path)
        ids, real = tokens.get("sequences"), tokens.get("attention_mask")
        return TokenPair(dump.dump_id, a.log_probs, b.log_probs, a.mask, ids=ids, real=real, limit=limit)
    return None


def gradients_chart(dumps: Sequence[DumpComparison]) -> Chart | None:
    """Draw the largest |a - b| / |b| of each gradient over the worst dumps, by parameter and layer; experts are merged."""
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for dump in dumps:
        known = {item.name: item.figures.distance for item in dump.parameters if item.figures.distance is not None}
        for name, distance in (dump.distances or known).items():
            layer_of = _LAYER.search(name)
            if layer_of is None:
                field = name.removeprefix("model."), _OUTSIDE
            else:
                field = _EXPERT.sub("experts.*.", name[layer_of.end() :]), layer_of[1]
            worst[field] = max(worst.get(field, (-1.0, "")), (distance, dump.dump_id))
    if not worst:
        return None
    fields = sorted(worst, key=lambda field: (field[1] == _OUTSIDE, field[1].zfill(6), field[0]))[:MOST_MARKS]
    rows: list[dict[str, Any]] = [
        {"p": name, "l": at, "v": float(f"{worst[name, at][0]:.4g}"), "d": worst[name, at][1]} for name, at in fields
    ]
    shown = hints(("p", "gradient of"), ("l", "layer"), ("v", "|a-b| / |b|"), ("d", "dump"))
    height = rows_high(len({name for name, _ in fields}))
    rectangles = layer("rect", tooltip=shown, color=quantity("v", "|a-b| / |b|"))
    spec = layered(rows, rectangles, height=height, x=names("l", "layer"), y=names("p", None))
    name, at = max(worst, key=lambda field: worst[field])
    value, dump_id = worst[name, at]
    count = sum(bool(dump.distances or dump.parameters) for dump in dumps)
    where = name if at == _OUTSIDE else f"{name} of layer {at}"
    says = f"Largest: {where}, {number(value, 3)} in {dump_id}. Each cell is the maximum over {plural(count, 'dump')}."
    lines = [{"gradient of": row["p"], "layer": row["l"], "|a-b|/|b|": number(row["v"], 3)} for row in rows]
    title = f"Gradients by parameter and layer: {plural(len(worst), 'item')}"
    return Chart(title, says, spec, table(lines, "gradient of"))
