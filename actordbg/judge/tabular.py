"""A report for other programs: JSON of the whole Summary, and CSV with one row for each result.

The CSV's columns are a contract: new ones go to the end, none is renamed or moved. An input that was not run has no row. Times
are in seconds, memory in bytes, log-probs in nats; a figure that was not measured is an empty cell. `warm_up` says why a row is
no part of steady timing: "first", "compiled", or empty.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from actordbg.base.foreign_text import in_csv, in_json
from actordbg.config.as_ran import as_ran
from actordbg.config.replay_config import SETTINGS
from actordbg.document.blocks import Block, as_data
from actordbg.judge.report_model import Summary
from actordbg.records.arithmetic import warm_up_of
from actordbg.records.replay_record import NOT_CHECKED, ReplayInput, ResultRecord, answers_of, violations
from actordbg.replay.replay_data import ReplayData

CONFIGURATION = (
    "model", "backend", "dtype", "attn", "packing", "compile", "deepcompile", "zero_stage", "nproc", "backward",
    "num_layers", "temperature", "seed",
)  # fmt: skip
"""The settings that had a column first. Every row repeats them as they ran, so that rows of several replays can be pivoted."""
INPUT = ("rank", "batch_size", "seq_len")
RESULT = (
    "replay_id", "dump_id", "status", "attempt", "worker", "slot", "started_at", "finished_at", "error_class", "error",
    "signature", "load_s", "forward_s", "backward_s", "tokens", "tokens_per_s", "peak_memory_bytes", "logprob_count",
    "logprob_mean", "logprob_std", "logprob_min", "logprob_max", "nonfinite", "entropy_mean", "loss", "grad_norm",
    "output_digest", "graphs", "graph_breaks", "folded_ids", "golden_count", "golden_max_abs", "golden_mean_abs",
)  # fmt: skip
LATER = ("golden_entropy_count", "golden_entropy_max_abs", "golden_entropy_mean_abs", "rng_match")
"""Fields of a result that came when the columns above had their places."""
SETTINGS_LATER = tuple(name for name, one in SETTINGS.items() if name not in CONFIGURATION and (one.numbers or one.cost))
"""The other settings that tell one configuration from another; a new one comes last."""
OF_LAWS = ("laws_violated", "laws_not_checked")
"""The names of the laws that forbid a green verdict, and of those that could not be asked; empty where none was asked."""
COLUMNS = (*RESULT, *INPUT, "warm_up", *CONFIGURATION, *LATER, *(SETTINGS[name].stored for name in SETTINGS_LATER), *OF_LAWS)
"""Every column of the CSV, in order."""


def render_json(summary: Summary, blocks: Iterable[Block] = ()) -> str:
    """The Summary field by field, with the verdict and the charts of its document: indented JSON that ends with a line break."""
    told = dataclasses.asdict(summary) | as_data(blocks)
    return in_json(json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False, default=str)) + "\n"


def render_csv(replays: Sequence[ReplayData]) -> str:
    """One row for each result of `replays`, below a row with the names of the columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for data in replays:
        writer.writerows(_rows(data))
    return out.getvalue()


def _rows(data: ReplayData) -> Iterator[dict[str, Any]]:
    by_id = {one.dump_id: one for one in data.spec.inputs}
    first, compiling = warm_up_of(data.results)
    settings = _settings(data)
    for one in data.results:
        kind = "first" if one.dump_id in first else "compiled" if one.dump_id in compiling else ""
        row = {name: value for name, value in one.to_dict().items() if name in RESULT or name in LATER}
        row |= _input(by_id.get(one.dump_id)) | settings
        row |= _laws(one)
        yield {name: _cell(value) for name, value in (row | {"warm_up": kind}).items()}


def _laws(one: ResultRecord) -> dict[str, Any]:
    answers = answers_of(one.extra)
    unasked = [answer for answer in answers if answer.verdict == NOT_CHECKED]
    return {name: " ".join(law.law for law in laws) for name, laws in zip(OF_LAWS, (violations(answers), unasked), strict=True)}


def _settings(data: ReplayData) -> dict[str, Any]:
    """The settings as they ran. The model's own number of layers and the seed that counted stand where none was asked for."""
    values = as_ran(data.spec.config, data.resolved)
    settings = {SETTINGS[name].stored: values[name] for name in (*CONFIGURATION, *SETTINGS_LATER)}
    return settings | {name: data.resolved[name] for name in ("num_layers", "seed") if name in data.resolved}


def _input(given: ReplayInput | None) -> dict[str, Any]:
    return {name: getattr(given, name) if given else None for name in INPUT}


def _cell(value: Any) -> Any:
    """True as `true`; numbers stay numbers, and text is cleaned."""
    if isinstance(value, bool):
        return str(value).lower()
    return in_csv(value) if isinstance(value, str) else value
