"""`report`: replays side by side, or the list of all, in every format."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.actor.hub_model import TOKENIZER, cached_file
from actordbg.base.errors import ActordbgError, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import human_bytes
from actordbg.catalog.query import open_fresh
from actordbg.config.as_ran import on_machine
from actordbg.document.blocks import FAILED, WRONG, Block, Heading, Items, Verdict
from actordbg.document.command_result import CommandResult
from actordbg.judge.exports import render_csv
from actordbg.judge.load_replays import ALL, load, report_blocks
from actordbg.judge.replay_document import document, replay_numbers, replay_results
from actordbg.judge.replay_findings import Judged
from actordbg.judge.replay_list import index_document, listed
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.summary import summary_of
from actordbg.judge.verdicts import replay_verdict
from actordbg.records.journal import TENSORS
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.replay_data import ReplayData, data_of
from actordbg.store.layout import Store

if TYPE_CHECKING:
    from actordbg.judge.token_charts import Texts


@dataclass(frozen=True, eq=False, repr=False)
class Report(CommandResult):
    """A report. It says what the results are, so that it is always ok; `verdict` has their worst."""

    store: Store | None = None
    names: Sequence[str] = ()
    where: str | None = None

    @cached_property
    def replays(self) -> tuple[ReplayData, ...]:
        """The replays, with their results."""
        assert self.store is not None
        return load(self.store, self.names, self.where).replays

    def to_csv(self) -> str:
        """Return a header row, and a row for each result."""
        return render_csv(self.replays)


def report(store: Store, names: Sequence[str], where: str | None, *, tokenizer: str | Path | None, charts: bool) -> Report:
    """Report replays, side by side if there are several; ["all"] lists them with their verdicts. charts: draw them."""
    texts = texts_of(tokenizer)
    about: dict[str, Any] = {"store": store, "names": tuple(names), "where": where}
    if list(names) == [ALL] and where is None:
        catalog = open_fresh(store)
        blocks, page = (index_document(catalog, commands=commands) for commands in (False, True))
        return Report(True, {"replays": listed(catalog)}, blocks, page, **about)
    material = load(store, names, where)
    summary = material.summary()
    blocks = report_blocks(store, material, texts) if charts else document(summary, linted=material.linted)
    return Report(True, asdict(summary), blocks, **about)


def texts_of(path: str | Path | None) -> Texts | None:
    """Return a function that decodes token ids with a local tokenizer; None if `path` is None.

    Downloads nothing and runs no model code.
    """
    if path is None:
        return None
    path = Path(path)
    from tokenizers import Tokenizer

    file = path / TOKENIZER if path.is_dir() else path if path.is_file() else cached_file(str(path), TOKENIZER)
    if file is None or not file.is_file():
        hint = f"pass a folder with a {TOKENIZER}, or that file; for a hub model, first run `hf download NAME {TOKENIZER}`"
        why = f"it has no {TOKENIZER}" if path.is_dir() else "no such folder or file, and nothing is downloaded"
        raise UsageError(f"--tokenizer {path}: {why}", hint=hint)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises Exception itself
        raise UsageError(f"--tokenizer {path}: {error}", hint="pass a tokenizer.json of the tokenizers library") from None

    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


_COUNTS = ("passed", "failed", "crashed", "hung", "stopped", "not_run")
_RECORDED = ("golden", "golden_entropy", "generators", "not_compared")
"""Distances from the run's own outputs, and what could not be compared with them."""


def replay_answer(
    store: Store, spec: ReplaySpec, *, restarts: int = 0, interrupted: bool = False, recorded_model: str | None = None,
    **about: Any,
) -> CommandResult:  # fmt: skip
    """Read a replay's answer. recorded_model: the model that the dumps name, where another was replayed. about: more of its data.

    Times in seconds over steady inputs. `folded_ids` counts inputs with token ids outside the model's vocabulary, which were
    wrapped (modulo its size). `folder` has the journals and logs; `kept_bytes` is the size of log-probs, entropies and gradients.
    """
    folder, data = store.replays / spec.replay_id, data_of(store, spec)
    with contextlib.suppress(ActordbgError, OSError):  # a locked catalog does not lose a replay's result
        for known in load(store, [spec.replay_id]).replays:
            data = replace(data, comparisons=known.comparisons)
    summary = summary_of(data)
    verdict = replay_verdict(Judged(summary))
    copied = ("replay_id", "peak_memory_bytes", *_RECORDED, "ranks", "laws", "resolved")
    answer: dict[str, Any] = {
        **about,
        **{name: getattr(summary, name) for name in copied},
        **{name: getattr(summary.counts, name) for name in _COUNTS},
        "status": "interrupted" if interrupted and summary.status != "complete" else summary.status,
        "recorded_model": recorded_model,
        "good": summary.counts.passed == summary.counts.inputs and verdict.word not in (WRONG, FAILED),
        "restarts": restarts,
        "forward_median_s": summary.forward.median,
        "forward_p95_s": summary.forward.p95,
        "backward_median_s": summary.backward.median,
        "tokens_per_s": summary.tokens_per_s.median,
        "folded_ids": summary.logprobs.folded_ids if summary.logprobs else 0,
        "failures": [
            {"signature": group.name, "error": group.cause}
            | {name: getattr(group, name) for name in ("count", "statuses", "explanation", "ways_out", "examples")}
            for group in summary.failures
        ],
        "configuration": on_machine(spec.config, data.resolved) if data.resolved else "",
        "folder": str(folder),
        "kept_bytes": _size_of(folder / TENSORS),
    }
    return CommandResult(answer["good"], answer, _blocks(summary, verdict, answer))


def _size_of(folder: Path) -> int:
    """Return the total size of the files in a folder; 0 if it is missing or unreadable, which must not lose a replay's result."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def _blocks(summary: ReplaySummary, verdict: Verdict, answer: dict[str, Any]) -> Sequence[Block]:
    beside = {
        "restarts": answer["restarts"],
        "your model": answer["recorded_model"] and f"the dumps recorded it: --model {in_shell(answer['recorded_model'])}",
        "saved": answer["kept_bytes"] and f"{human_bytes(answer['kept_bytes'])} of outputs, for `actordbg compare`",
        "journals, logs": answer["folder"],
    }
    facts = Items([f"{name}: {text}" for name, text in beside.items() if text])
    return [
        Heading(f"replay {summary.replay_id}", 1),
        verdict,
        *replay_results(summary),
        *replay_numbers(summary),
        facts,
    ]
