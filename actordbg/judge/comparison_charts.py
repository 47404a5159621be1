"""Pictures of a comparison: its worst dump's tokens, A against B, differences counted, gradients by parameter and layer.

Figures come from the comparison's record; tokens from what both replays kept, where it is still there. Of many dumps the worst
are read, since a page holds a few thousand marks and no reader looks at more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from actordbg.base.errors import ActordbgError
from actordbg.base.units import plural
from actordbg.document.blocks import Chart, number
from actordbg.document.specifications import MOST_MARKS, hints, layer, layered, names, quantity
from actordbg.judge.comparison_document import table
from actordbg.judge.token_charts import Rows, Texts, TokenPair, histogram_chart, scatter_chart, tokens_chart
from actordbg.records.comparison_record import ComparisonRecord, DumpComparison
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import ReplaySpec
from actordbg.store.layout import Store

MOST_DUMPS = 24
"""Dumps whose tokens are read."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_OUTSIDE = "-"


def comparison_charts(
    store: Store, record: ComparisonRecord, texts: Texts | None = None, floor: float | None = None
) -> list[Chart]:
    """Every picture of a comparison that there is something to show in. floor: the noise floor of a log-prob, nats."""
    pairs = list(_pairs(store, record))
    limits = [pair.limit for pair in pairs if pair.limit is not None]
    tokens, scatter = tokens_chart(pairs[0], texts) if pairs else None, scatter_chart(pairs, max(limits, default=None), floor)
    return [chart for chart in (tokens, scatter, histogram_chart(pairs), gradients_chart(record.dumps)) if chart is not None]


def _pairs(store: Store, record: ComparisonRecord) -> Iterable[TokenPair]:
    """The worst dumps that both sides kept."""
    ours, theirs = record.a.replay_id, record.b.replay_id
    if ours is None or theirs is None:
        return
    try:
        paths = {given.dump_id: given.path for given in ReplaySpec.from_file(store.replays / ours / SPEC).inputs}
    except Exception:  # noqa: BLE001  whatever is wrong with it, the picture has no prompt and no text, and the report is there
        paths = {}
    for dump in [dump for dump in record.compared if dump.log_probs][:MOST_DUMPS]:
        a, b = kept_rows(store, ours, dump.dump_id), kept_rows(store, theirs, dump.dump_id)
        if a is None or b is None or [len(row) for row in a[1]] != [len(row) for row in b[0]]:
            continue
        limit = dump.limits.get("max_abs", record.thresholds.get("max_abs"))
        ids, real = token_rows(store, paths[dump.dump_id]) if dump.dump_id in paths else (None, None)
        yield TokenPair(dump.dump_id, a[0], b[0], a[1], ids, real, limit)


def kept_rows(store: Store, replay_id: str, dump_id: str) -> tuple[Rows, Rows] | None:
    """The log-probs that a replay kept of a dump, and its mask; None if they are gone, or unlike what they should be."""
    from safetensors import SafetensorError

    from actordbg.judge.sides import opened, tensors_path

    try:
        with opened(tensors_path(store, replay_id, dump_id)) as file:
            log_probs, mask = file.get_tensor("log_probs"), file.get_tensor("mask")
    except (SafetensorError, OSError):
        return None
    return (log_probs.tolist(), mask.tolist()) if log_probs.ndim == 2 and log_probs.shape == mask.shape else None


def token_rows(store: Store, path: str) -> tuple[Rows | None, Rows | None]:
    """The token ids of the dump at this path below the store, and which are not padding; None for what cannot be read."""
    from actordbg.store.plain_tensors import load_plain

    try:
        tensors = load_plain(store.root / path)[1]
    except (ActordbgError, OSError):
        return None, None
    ids, real = (tensors[name].values.tolist() if name in tensors else None for name in ("sequences", "attention_mask"))
    return ids, real


def gradients_chart(dumps: Sequence[DumpComparison]) -> Chart | None:
    """By kind of parameter and layer, the largest |a - b| / |b| of a gradient over the worst dumps."""
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for dump in dumps:
        known = {one.name: one.figures.distance for one in dump.parameters if one.figures.distance is not None}
        for name, distance in (dump.distances or known).items():
            field = place_of(name)
            worst[field] = max(worst.get(field, (-1.0, "")), (distance, dump.dump_id))
    if not worst:
        return None
    fields = sorted(worst, key=lambda field: (field[1] == _OUTSIDE, field[1].zfill(6), field[0]))[:MOST_MARKS]
    rows: list[dict[str, Any]] = [
        {"p": name, "l": at, "v": float(f"{worst[name, at][0]:.4g}"), "d": worst[name, at][1]} for name, at in fields
    ]
    shown = hints(("p", "gradient of"), ("l", "layer"), ("v", "|a-b| / |b|"), ("d", "dump"))
    height = max(70, min(520, 24 * len({name for name, _ in fields})))
    rectangles = layer("rect", tooltip=shown, color=quantity("v", "|a-b| / |b|"))
    spec = layered(rows, rectangles, height=height, x=names("l", "layer"), y=names("p", None))
    name, at = max(worst, key=lambda field: worst[field])
    value, dump_id = worst[name, at]
    count = sum(bool(dump.distances or dump.parameters) for dump in dumps)
    where = name if at == _OUTSIDE else f"{name} of layer {at}"
    says = f"The furthest is {where}: {number(value, 3)} in {dump_id}. A field is the largest over {plural(count, 'dump')}."
    lines = [{"gradient of": row["p"], "layer": row["l"], "|a-b|/|b|": number(row["v"], 3)} for row in rows]
    title = f"Gradients by parameter and layer: {plural(len(worst), 'parameter')}"
    return Chart(title, says, spec, table(lines, "gradient of"))


def place_of(name: str) -> tuple[str, str]:
    """A parameter's kind and layer: "model.layers.3.mlp.up_proj.weight" is ("mlp.up_proj.weight", "3"). Experts are one kind."""
    found = _LAYER.search(name)
    if found is None:
        return name.removeprefix("model."), _OUTSIDE
    return _EXPERT.sub("experts.*.", name[found.end() :]), found[1]
