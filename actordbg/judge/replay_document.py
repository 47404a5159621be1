"""Build the document of a report on replays: the verdict in one sentence, then headings, paragraphs, lists and tables. Pure.

Figures of the built-in toy model are marked as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from actordbg.base.units import human_bytes, listed, plural
from actordbg.config.as_ran import as_ran, in_words, label, meant, on_machine, toy
from actordbg.config.consent import typed_again
from actordbg.config.replay_config import SETTINGS
from actordbg.document.blocks import (
    UNCHECKED,
    Block,
    Chart,
    Code,
    Grid,
    Heading,
    Items,
    Paragraph,
    Verdict,
    number,
    rate,
    seconds,
    section,
)
from actordbg.document.renderings import shorten
from actordbg.judge.agreement import against_the_run, laws_in_words, ranks_in_words
from actordbg.judge.report_model import Against, Counts, FailureGroup, ReplaySummary, Summary, Timed
from actordbg.judge.verdicts import together
from actordbg.recorded.lint import LintFindings, with_lint
from actordbg.records.comparison_record import NAMES_OF_B
from actordbg.records.replay_record import PERCENTILE_DEFINITION, Spread
from actordbg.records.run_files import RECORDED_WEIGHTS
from actordbg.replay.blame import in_brief

if TYPE_CHECKING:
    from actordbg.catalog.lab_columns import ComparisonRun

_LOG_LINES = 12
_MOST_WHERE = 160
"""Characters of a condition that a report shows; `--json` has all of it, such as the ids that `--diverse` chose."""
_FACTS = ("parameters", "device_name")
"""Facts reported by workers that are shown with the settings."""


def document(
    summary: Summary,
    pictures: Mapping[str, Sequence[Chart]] = MappingProxyType({}),
    linted: LintFindings | None = None,
) -> list[Block]:
    """Build the whole report, top to bottom. pictures: charts by the replay's label. linted: broken laws of recorded data."""
    verdict = together(summary.replays) if summary.replays or not summary.notes else Verdict(UNCHECKED, summary.notes[0])
    if linted and linted.broken:
        verdict = with_lint(verdict, linted)
    blocks: list[Block] = [
        Heading("actordbg report", 1),
        Paragraph(f"{summary.selection}; {summary.generated_at}"),
        verdict,
    ]
    if summary.comparison:
        blocks += _side_by_side(summary)
    for replay in summary.replays:
        blocks += [Heading(f"{replay.label}  {replay.replay_id}", 2), *replay_details(replay, pictures.get(replay.label, ()))]
    return [*blocks, *map(Paragraph, summary.notes), *section("Legend", _LEGEND if summary.replays else ())]


def replay_details(replay: ReplaySummary, charts: Sequence[Chart]) -> list[Block]:
    """Build what a report says of one replay, with its charts."""
    figures = [*charts, *_timing(replay), *_slowest(replay)]
    return [*replay_results(replay), *figures, *replay_numbers(replay), *_comparisons(replay)]


def replay_results(replay: ReplaySummary) -> list[Block]:
    """Build what `actordbg replay` says of its replay: what ran, and what failed."""
    return [Items(list(_facts(replay))), *_stopped(replay), *_failures(replay)]


_LEGEND = (
    "Steady times leave out the first measured input of each worker start and inputs that compiled a graph.",
    f"p95: {PERCENTILE_DEFINITION}; with fewer than 20 inputs it is close to the largest.",
    "tok/s: non-padding tokens per second of forward in one worker, median over inputs; tok/s all: total tokens / total seconds.",
    "seq_len counts padding. peak mem: the largest of any input, in one worker.",
    "Compared: the newest `actordbg compare` with each other side; max, mean: absolute differences of log-probs in nats,"
    " clip: tokens whose ratio leaves 0.8 to 1.2, |g| rel: relative difference of the gradient norms.",
)


def _side_by_side(summary: Summary) -> list[Block]:
    comparison = summary.comparison
    assert comparison is not None
    pairs = list(zip(summary.replays, comparison.rows, strict=True))
    columns = ("", "passed", "fwd", "p95", "tok/s", "peak mem", "fwd vs A", "timed", "bit-equal / not")
    shared = comparison.shared
    quiet = {name for name, value in shared.items() if name in SETTINGS and SETTINGS[name].is_quiet(value)}
    quiet |= {"zero_stage"} if shared.get("backend") == "plain" else set()
    settings = {name: value for name, value in shared.items() if name not in quiet and (name in SETTINGS or name in _FACTS)}
    return [
        Heading(f"{plural(len(pairs), 'replay')} side by side", 2),
        Grid(columns, [_compared(replay, against) for replay, against in pairs], {""}),
        Items([_configured(replay, against) for replay, against in pairs]),
        Paragraph(f"Common to all: {_settings(settings, none='nothing')}."),
        Paragraph(
            f"fwd vs A: forward seconds / those of {comparison.baseline}, input by input, median over the inputs that are"
            f" steady in both (timed). bit-equal: inputs that passed in both and have bit-identical log-probs."
        ),
    ]


def _compared(replay: ReplaySummary, against: Against) -> tuple[str, ...]:
    beside = ("1", "-", "-")
    if replay.label != "A":
        slower = "-" if against.forward_ratio is None else f"{against.forward_ratio:.2f}"
        beside = (slower, str(against.timed), f"{against.digests_equal} / {against.digests_differ}")
    times = (seconds(replay.forward.median), seconds(replay.forward.p95), rate(replay.tokens_per_s.median))
    return replay.label, f"{replay.counts.passed}/{replay.counts.inputs}", *times, human_bytes(replay.peak_memory_bytes), *beside


def _configured(replay: ReplaySummary, against: Against) -> str:
    differs = meant(as_ran(replay.asked, replay.resolved), against.differs)
    text = f"{replay.label}  {replay.replay_id}: {_settings(differs, none='the same configuration')}"
    if replay.label == "A" or against.mean_moved is None:
        return text
    return f"{text}; mean log-prob of an input moved by at most {number(against.mean_moved, 3)} nats"


def _facts(replay: ReplaySummary) -> Iterable[str]:
    yield f"result: {counted(replay.counts)}" + ("" if replay.status == "complete" else f" (the replay is {replay.status})")
    yield f"inputs: {_selected(replay)}"
    if replay.resolved:
        yield f"ran as: {on_machine(replay.asked, replay.resolved)}"
        if RECORDED_WEIGHTS in replay.resolved:
            yield f"weights: {replay.resolved[RECORDED_WEIGHTS]}"
    else:
        yield f"no worker became ready; requested: {label(as_ran(replay.asked))}"
        yield f"logs: the store's replays/{replay.replay_id}/"
    if replay.command:
        command = typed_again(replay.command) or "its record has no actordbg command"
        yield f"command: {command}"
    if replay.versions:
        versions = [f"{name} {version}" for name, version in sorted(replay.versions.items())]
        yield f"versions: {listed(versions)}"


def _selected(replay: ReplaySummary) -> str:
    text = f"{plural(replay.counts.inputs, 'dump')} by {replay.order}"
    if replay.where:
        where = _LISTED_IDS.sub(lambda ids: f"dump_id in (... {ids['ids'].count(',') + 1} ids)", replay.where)
        text += f', --where "{shorten(where, _MOST_WHERE)}"'
    if replay.inputs.seq_len_min is not None:
        low, mid, high = replay.inputs.seq_len_min, replay.inputs.seq_len_median, replay.inputs.seq_len_max
        lengths = f"{low}" if low == high else f"{low} to {high} (median {mid:g})"
        text += f"; seq_len {lengths}; {plural(replay.inputs.tokens, 'token')}"
    return text


_LISTED_IDS = re.compile(r"dump_id in \((?P<ids>'[^()]{160,})\)")
"""A list of ids too long to show, as `--diverse` and `--longest` make it."""


def counted(counts: Counts) -> str:
    """Return "3 passed, 1 hung of 4"; zero counts are left out, except "0 passed"."""
    names = ("passed", "failed", "crashed", "hung", "stopped", "not_run")
    shown = [f"{count:,} {name.replace('_', ' ')}" for name in names if (count := getattr(counts, name)) or name == "passed"]
    return f"{listed(shown)} of {counts.inputs:,}"


def _stopped(replay: ReplaySummary) -> list[Block]:
    """Show why the replay ended early: the error, and the last lines of the log."""
    if not replay.why:
        return []
    first, *log = replay.why.strip().splitlines()
    last_lines = [Code("\n".join(log[-_LOG_LINES:]))] if log else []
    return [Heading("Why it stopped", 3), Paragraph(first), *last_lines]


def _failures(replay: ReplaySummary) -> list[Block]:
    return [Heading("Failures", 3), *(block for group in replay.failures for block in _failure(group))] if replay.failures else []


def _failure(group: FailureGroup) -> list[Block]:
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(group.statuses.items()))
    kind = f" ({group.error_class})" if group.error_class and group.error_class != group.name else ""
    lines = [f"{group.name}{kind}: {plural(group.count, 'input')}, {statuses}"]
    if group.cause:
        lines.append(f"cause: {' '.join(group.cause.split())}")
    if group.explanation:
        lines.append(f"why: {group.explanation}")
    lines += [f"try: {way}" for way in group.ways_out]
    lines += [f"for example: {example}" for example in group.examples]
    log = group.log_excerpt or ""
    shown = in_brief(log) if group.explanation else "\n".join(log.strip().splitlines()[-8:])
    ours = (group.error_class or "").startswith("actordbg.base.")  # its message says what and why
    return [Items(lines), *([Code(shown)] if shown and not ours else [])]


def _timing(replay: ReplaySummary) -> list[Block]:
    model = as_ran(replay.asked, replay.resolved)["model"]
    heading = Heading(f"Time and memory by seq_len{toy(model, ', of a ')}", 3)
    if not replay.buckets:
        return [heading, Paragraph("No input has a result.")]
    columns = ("seq_len", "inputs", "steady", "fwd", "p95", "bwd", "p95", "tok/s", "tok/s all", "peak mem")
    rows: list[tuple[str, int, int, Timed]] = [(each.label, each.inputs, each.steady, each) for each in replay.buckets]
    if len(rows) > 1:
        rows.append(("all", replay.counts.inputs - replay.counts.not_run, sum(each.steady for each in replay.buckets), replay))
    cells = [
        (name, str(inputs), str(steady), *map(seconds, (of.forward.median, of.forward.p95, of.backward.median, of.backward.p95)),
         rate(of.tokens_per_s.median), rate(of.tokens_per_s.total), human_bytes(of.peak_memory_bytes))
        for name, inputs, steady, of in rows
    ]  # fmt: skip
    return [heading, Grid(columns, cells, {"seq_len"}), Paragraph(_warm_up(replay))]


def _warm_up(replay: ReplaySummary) -> str:
    warm = replay.warm_up
    text = "fwd, bwd: median seconds of steady inputs."
    if warm.first_inputs:
        text += f" First inputs ({plural(replay.worker_starts, 'worker start')}): forward {_range(warm.first_forward)}."
    if warm.compiling_inputs:
        text += f" {plural(warm.compiling_inputs, 'later input')} compiled: forward {_range(warm.compiling_forward)}."
    if not replay.forward.count:
        text += " No steady-state input: each was a first run or a compiling one."
    return text


def _range(spread: Spread) -> str:
    if spread.count == 1:
        return f"{seconds(spread.median)} s"
    return f"median {seconds(spread.median)} s, largest {seconds(spread.largest)} s"


def _slowest(replay: ReplaySummary) -> list[Block]:
    if not replay.slowest:
        return []
    title = "Slowest inputs" if replay.slowest_are_steady else "Slowest inputs (warm-up included)"
    rows = [
        (s.dump_id, str(s.rank), str(s.batch_size), str(s.seq_len), seconds(s.forward_s), seconds(s.backward_s))
        for s in replay.slowest
    ]
    return [Heading(title, 3), Grid(("dump", "rank", "B", "S", "fwd s", "bwd s"), rows, {"dump"})]


def replay_numbers(replay: ReplaySummary) -> list[Block]:
    lines: list[str] = []
    if replay.logprobs:
        p = replay.logprobs
        lines.append(
            f"log-probs of {plural(p.results, 'input')}, {plural(p.count, 'token')}: mean {number(p.mean)},"
            f" from {number(p.lowest)} to {number(p.highest)} nats; {p.nonfinite:,} non-finite"
        )
        if p.entropy_mean is not None:
            lines.append(f"entropy: mean {number(p.entropy_mean)} nats")
        if p.folded_ids:
            lines.append(f"token ids of {plural(p.folded_ids, 'input')} were wrapped (modulo) into the model's vocabulary")
    own = against_the_run(replay.golden, replay.golden_entropy, replay.generators, replay.not_compared)
    lines += [f"against the run's own {text}" for text in own]
    lines += [f"ranks: {text}" for text in ranks_in_words(replay.ranks)]
    lines += laws_in_words(replay.laws)
    if replay.compiled:
        c = replay.compiled
        lines.append(f"torch.compile: {plural(c.graphs, 'graph')}, {plural(c.graph_breaks, 'graph break')}")
    return section("Numbers", lines)


def _settings(data: dict[str, Any], none: str) -> str:
    """Describe settings and facts, without facts that no worker reported. none: the words for no setting."""
    known = (in_words(name, value) for name, value in data.items() if value is not None or name in SETTINGS)
    return listed(known) or none


def _comparisons(replay: ReplaySummary) -> list[Block]:
    """Tabulate the newest comparison (from `actordbg compare`) with each other side."""
    if not replay.comparisons:
        return []
    columns = ("against", "verdict", "dumps", "max", "mean", "clip", "|g| rel")
    rows = [
        (
            NAMES_OF_B.get(c.against_kind, c.against),
            c.verdict,
            f"{c.compared}/{c.dumps}",
            number(c.max_abs, 3),
            number(c.mean_abs, 2),
            "-" if c.clip_share is None else f"{c.clip_share:.1%}",
            number(c.grad_norm_rel, 2),
        )
        for c in replay.comparisons
    ]
    details = Items([_compared_with(c) for c in replay.comparisons])
    return [Heading("Compared", 3), Grid(columns, rows, {"against", "verdict"}), details]


def _compared_with(c: ComparisonRun) -> str:
    against, reasons = c.against_label or c.against, c.reasons or "nothing in common"
    text = f"{c.comparison_id}: {against}"
    text += f"; {c.mismatches:,} a mismatch" if c.mismatches else ""
    if c.within_noise:
        comma = "," if c.mismatches else ";"
        text += f"{comma} {c.within_noise:,} within the noise"
    if c.worst_dump is not None and c.mismatches:
        text += f"; the worst is {c.worst_dump}"
    text += f"; thresholds: {c.thresholds_from}" if c.compared else f"; {reasons}"
    return text + (f"; noise floor {c.noise_id}" if c.noise_id else "")
