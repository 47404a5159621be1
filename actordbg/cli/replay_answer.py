"""What `actordbg replay` answers: its output type, how it is read from the store, and how it is printed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from actordbg.actor.signatures import explain
from actordbg.base.foreign_text import in_shell
from actordbg.cli import output
from actordbg.config.as_ran import on_machine, toy
from actordbg.formats.weight_hashes import RECORDED_WEIGHTS
from actordbg.judge.agreement import (
    Generators,
    Golden,
    LawSummary,
    NotCompared,
    RankAgreement,
    against_the_run,
    laws_in_words,
    ranks_in_words,
)
from actordbg.judge.report_model import FailureGroup
from actordbg.judge.summary import summarise
from actordbg.records.journal import TENSORS
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.replay_data import data_of
from actordbg.store.layout import Store


@dataclass
class ShareAnswer:
    """What ranks that run their inputs together get in a plan: which dumps, in which order, and of which lengths."""

    ranks: tuple[int, ...]
    dumps: tuple[str, ...]
    seq_lens: tuple[int, ...]


@dataclass
class ReplayAnswer:
    """What a replay came to. Times in seconds over steady inputs (see `actordbg report`); `replay_id` None: nothing matched.
    `selected` counts the dumps that were chosen, `skipped` why others of them were left out. `folded_ids` counts the
    inputs with token ids outside of the model's vocabulary, which were folded into it. `golden`, `golden_entropy` and
    `generators` say how far what came out is from what the run itself recorded (None: nothing to compare),
    `not_compared` what was recorded and could not be compared. `ranks`: whether the ranks that ran an input together
    agree, None where each runs its own; `settings_from`: settings that no flag gave, and the variable or file that did.
    `recorded_model`: the model that the dumps name, where none was asked for.
    `asked_for_same`: --align same asked just that. `laws`: what they said, None where none was
    to be asked. `shares`: of a plan, what each group of ranks gets. `folder` has the
    journals and logs, and `kept_bytes` of log-probs, entropies and gradients.
    """

    replay_id: str | None
    status: str
    selected: int
    passed: int = 0
    failed: int = 0
    crashed: int = 0
    hung: int = 0
    stopped: int = 0
    not_run: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    forward_median_s: float | None = None
    forward_p95_s: float | None = None
    first_forward_s: float | None = None
    backward_median_s: float | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    folded_ids: int = 0
    golden: Golden | None = None
    golden_entropy: Golden | None = None
    generators: Generators | None = None
    not_compared: tuple[NotCompared, ...] = ()
    ranks: RankAgreement | None = None
    asked_for_same: bool = False
    laws: LawSummary | None = None
    shares: tuple[ShareAnswer, ...] = ()
    failures: tuple[dict[str, Any], ...] = ()
    findings: tuple[dict[str, Any], ...] = ()
    resolved: dict[str, Any] = field(default_factory=dict)
    configuration: str = ""
    settings_from: dict[str, str] = field(default_factory=dict)
    recorded_model: str | None = None
    folder: str | None = None
    kept_bytes: int = 0
    note: str = ""

    @property
    def good(self) -> bool:
        """Nothing failed, nothing is missing, ranks that were to do the same (`--align same`) did, and no law is broken."""
        differ = self.asked_for_same and self.ranks is not None and bool(self.ranks.differ)
        lawful = self.laws is None or self.laws.good
        return lawful and not (self.failed or self.crashed or self.hung or self.stopped or self.not_run or differ)


def shares_of(spec: ReplaySpec) -> tuple[ShareAnswer, ...]:
    """What each lane of a plan gets."""
    config = spec.config
    width = config.lane_width
    lanes = [spec.inputs[lane :: config.lanes] for lane in range(config.lanes)]
    return tuple(
        ShareAnswer(
            tuple(range(lane * width, (lane + 1) * width)), tuple(one.dump_id for one in mine), tuple(one.seq_len for one in mine)
        )
        for lane, mine in enumerate(lanes)
    )


def answer_of(store: Store, spec: ReplaySpec, restarts: int) -> ReplayAnswer:
    """Read from the store what became of a replay."""
    folder = store.replays / spec.replay_id
    data = data_of(store, spec)
    summary = summarise([data], selection=spec.replay_id, now=spec.created_at, explain=explain).replays[0]
    same = {
        field.name: getattr(source, field.name)
        for source in (summary, summary.counts)
        for field in fields(ReplayAnswer)
        if hasattr(source, field.name)
    }
    derived = {
        "selected": len(spec.inputs),
        "restarts": restarts,
        "forward_median_s": summary.forward.median,
        "forward_p95_s": summary.forward.p95,
        "first_forward_s": summary.warm_up.first_forward.median,
        "backward_median_s": summary.backward.median,
        "tokens_per_s": summary.tokens_per_s.median,
        "folded_ids": summary.logprobs.folded_ids if summary.logprobs else 0,
        "asked_for_same": spec.config.align == "same",
        "failures": tuple(map(_failure, summary.failures)),
        "configuration": on_machine(spec.config, data.resolved) if data.resolved else "",
        "folder": str(folder),
        "kept_bytes": _size_of(folder / TENSORS),
    }
    return ReplayAnswer(**same | derived)


def _failure(group: FailureGroup) -> dict[str, Any]:
    """Inputs that failed alike. `signature` is a known failure's id or the error without what varies in it."""
    kept = {name: getattr(group, name) for name in ("count", "statuses", "explanation", "ways_out", "examples")}
    return {"signature": group.name, "error": group.cause} | kept


def _size_of(folder: Path) -> int:
    """Bytes of the files in a folder; 0 if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except OSError:
        return 0


def render(answer: ReplayAnswer) -> None:
    """The answer as text: counts, figures, what was resolved, and each kind of failure with its ways out."""
    if answer.note:
        output.say_wrapped(answer.note, "  ")
        for share in answer.shares:
            output.say_wrapped(_share(share), "    ")
        return
    counted = [(answer.passed, "passed"), (answer.failed, "failed"), (answer.crashed, "crashed"), (answer.hung, "hung")]
    counted += [(answer.stopped, "stopped by the user"), (answer.not_run, "not run")]
    output.say_wrapped(
        f"replay {answer.replay_id} ({answer.status}): {output.plural(answer.selected, 'input')}, "
        + ", ".join(f"{count:,} {name}" for count, name in counted if count)
        + (f"; {answer.laws.headline}" if answer.laws is not None else ""),
        "  ",
    )
    for label, text in _lines(answer):
        output.say_fact(f"  {label}", text, 16)
    for group in answer.failures:
        output.say(f"{group['count']:,} x {group['signature']}")
        output.say_wrapped(f"  {(group['error'].strip() or '-').splitlines()[0]}", "    ")
        if group["explanation"]:
            output.say_wrapped(f"  why: {group['explanation']}", "    ")
        for way in group["ways_out"]:
            output.say_wrapped(f"  way out: {way}", "    ")
        output.say(f"  e.g. {group['examples'][0]}")


def _share(share: ShareAnswer) -> str:
    who = ("rank " if len(share.ranks) == 1 else "ranks ") + ", ".join(map(str, share.ranks))
    if not share.dumps:
        return f"  {who}: nothing"
    runs = [(length, len(list(same))) for length, same in groupby(share.seq_lens)]
    lengths = ", ".join(f"{length} x {count}" if count > 1 else str(length) for length, count in runs[:8])
    lengths += ", ..." if len(runs) > 8 else ""
    return f"  {who}: {output.plural(len(share.dumps), 'input')}, seq_len {lengths}"


def _lines(answer: ReplayAnswer) -> list[tuple[str, str]]:
    lines = []
    of_toy = toy(answer.resolved.get("model"), ", of a ")
    if answer.first_forward_s is not None and answer.forward_median_s is not None:
        lines.append(("first forward", f"{answer.first_forward_s:.3f} s, not in the figures below (compiling, warming up)"))
    elif answer.first_forward_s is not None:
        why = "warming up: none is steady, since each input was a worker's first"
        lines.append(("forward", f"{answer.first_forward_s:.3f} s, {why}"))
        lines.append(("", "more inputs than workers give a steady one (--max-inputs)"))
    if answer.forward_median_s is not None:
        lines.append(("forward", f"median {answer.forward_median_s:.3f} s, p95 {answer.forward_p95_s or 0:.3f} s"))
    if answer.backward_median_s is not None:
        lines.append(("backward", f"median {answer.backward_median_s:.3f} s"))
    if answer.tokens_per_s is not None:
        lines.append(("tokens/s", f"{answer.tokens_per_s:,.0f} in one worker, forward{of_toy}"))
    if answer.peak_memory_bytes is not None:
        lines.append(("peak memory", f"{output.human_bytes(answer.peak_memory_bytes)}{of_toy}"))
    if answer.restarts:
        lines.append(("restarts", str(answer.restarts)))
    if answer.configuration:
        lines.append(("configuration", answer.configuration))
    if RECORDED_WEIGHTS in answer.resolved:
        lines.append(("weights", str(answer.resolved[RECORDED_WEIGHTS])))
    if answer.recorded_model:
        lines.append(("your model", f"the dumps recorded it: --model {in_shell(answer.recorded_model)}"))
    if answer.folded_ids:
        lines.append(("ids folded", f"token ids of {output.plural(answer.folded_ids, 'input')} into the model's vocabulary"))
    own = against_the_run(answer.golden, answer.golden_entropy, answer.generators, answer.not_compared)
    lines += [("the run's own", text) for text in own]
    lines += [("ranks", text) for text in ranks_in_words(answer.ranks)]
    lines += [("laws", text) for text in laws_in_words(answer.laws)[1:]]
    if answer.kept_bytes:
        compare = f"actordbg compare {answer.replay_id} ..."
        lines.append(("kept", f"{output.human_bytes(answer.kept_bytes)} of outputs, for `{compare}`"))
    lines.append(("journals, logs", str(answer.folder)))
    return lines
