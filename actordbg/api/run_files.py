"""What `check PATH...` and `lint PATH...` are given: stores, dumps, packs, old pickles, and the files that a run left behind.

A store is used itself. Dump files and packs are selected as files. Everything else is imported first: by `check` into the store,
by `lint` judged as they are read, so that its findings name files and their rows.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from actordbg.api.checks import linted
from actordbg.api.client import Client
from actordbg.api.desk import Desk, DumpSelection
from actordbg.base.errors import CorruptDump, UnsafeInput, Unsupported, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import MOST_NAMED, plural
from actordbg.catalog.query import select_dumps
from actordbg.catalog.selections import joined
from actordbg.catalog.where import of_dumps
from actordbg.document.command_result import CommandResult
from actordbg.dumps.importer import ImportSummary, find_files, import_paths
from actordbg.dumps.layouts import columns_of
from actordbg.formats.dump_record import SUFFIX
from actordbg.measure.log_lines import TrainLog
from actordbg.measure.run_logs import answer, curve_table, judge_logs, left_of, logs_below
from actordbg.recorded.lint import READ, Linting, lint_answer
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.records.finding import Finding, NotChecked
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX


def store_of_paths(
    usual: Store, paths: Sequence[Path], chosen: DumpSelection, client: Client, columns: Sequence[str]
) -> tuple[Store, DumpSelection]:
    """Return the store to check and what the paths select: a store is checked instead of the usual one, dumps and packs are
    selected as files, and other files and folders are imported first and checked alone.

    Where there is no store, that of the first dump is used, else one is made. columns: see `layouts.columns_of`. Raises
    UsageError for a path that does not exist, and for a store or dumps beside other paths; CorruptDump if nothing is imported.
    """
    dumps = [path for path in paths if _is_dump(path)]
    if paths and len(dumps) == len(paths):
        if not usual.exists():
            near = [folder for folder in paths[0].resolve().parents if Store(folder).exists()]
            usual = Store(near[0]) if near else usual.create()
            client.note(f"using the store {usual.root}" if near else f"using a new store, {usual.root}")
        return usual, replace(chosen, files=(*chosen.files, *paths))
    if not paths:
        return usual, chosen
    if stores := [path for path in paths if Store(path).exists()]:
        if len(paths) > 1 or chosen.files:
            raise UsageError(f"{stores[0]} is a store: check it alone", hint="name one store, or files")
        return Store(stores[0]), chosen
    if alone := [*dumps, *chosen.files]:
        raise UsageError(f"{alone[0]} is a dump: check it alone", hint="name dumps, or files of a run")
    if usual.exists():
        usual.require_writable()
    logs, files = logs_and_others(paths)
    if not files:
        raise UsageError(
            f"{paths[0]} is a log, without rows to replay", hint=f"`actordbg lint {in_shell(str(paths[0]))}` judges its curves"
        )
    summary = imported(partial(import_paths, usual), paths, files, client=client, columns=columns)
    client.note(f"{plural(summary.added, 'dump')} imported into {usual.root}, {summary.present:,} already there")
    every = joined(chosen.where, _only(summary.dump_ids))
    return usual, replace(chosen, where=joined(every, "point = 'forward'"), with_losses=every, logs=logs)


def _only(dump_ids: Sequence[str]) -> str:
    """Return the condition for these dumps: by id, or for more than a condition can name, all imported ones of their time."""
    if len(dump_ids) <= MOST_NAMED:
        return of_dumps(dump_ids)
    first, last = (f"{each[:4]}-{each[4:6]}-{each[6:11]}:{each[11:13]}:{each[13:23]}" for each in (min(dump_ids), max(dump_ids)))
    return f"source = 'import' and timestamp >= '{first}' and timestamp <= '{last}'"


def imported(
    take: Callable[..., ImportSummary],
    paths: Sequence[Path],
    files: Sequence[Path],
    *,
    client: Client,
    columns: Sequence[str],
    may_be_none: bool = False,
) -> ImportSummary:
    """Import or read files, found at paths, by `take`, and note what was refused.

    Raises CorruptDump if nothing was imported, unless that may be; Unsupported or UnsafeInput for the reason of a single file.
    """
    parts = columns_of(columns)
    with client.progress("importing", len(files)) as advance:
        summary = take(files, columns=parts, on_file=lambda dump_id: advance(1))
    if may_be_none and not summary.dump_ids:
        return summary
    refused = [f"refused[{each.code}]: {each.path}: {each.told}" for each in summary.refused]
    if not summary.dump_ids and len(refused) == 1 and not paths[0].is_dir():
        (only,) = summary.refused
        kind = next((each for each in (Unsupported, UnsafeInput) if each.code == only.code), CorruptDump)
        raise kind(f"{only.path}: {only.reason}", hint=only.hint or "docs/reference/layouts.md lists what is read")
    client.note_some([*summary.notes, *refused])
    if not summary.dump_ids:
        raise CorruptDump(f"no file below {paths[0]} could be imported", hint="`actordbg dump import` names every bad file")
    return summary


def linted_files(
    desk: Desk, paths: Sequence[Path], where: str | None, max_inputs: int | None, columns: Sequence[str]
) -> CommandResult:
    """Check the laws on files that a run left behind and the curves of its logs, or the laws on the dumps of a store.

    Raises as `store_of_paths`.
    """
    if len(paths) == 1 and Store(paths[0]).exists():
        return linted(replace(desk, store=Store(paths[0])), where, max_inputs)
    if given := [path for path in paths if _is_dump(path)]:
        raise UsageError(f"{given[0]} is a dump", hint="name its store, or `actordbg lint --where \"dump_id='ID'\"`")
    logs, files = logs_and_others(paths)
    if not files:
        return answer(logs)
    linting = Linting()
    give = partial(import_paths, None, give=lambda record, tensors: linting.judge(RecordedCall(record, tensors)))
    selects = where is not None or max_inputs is not None  # by the columns of a catalog
    with tempfile.TemporaryDirectory(prefix="actordbg-") if selects else contextlib.nullcontext("") as folder:
        store = Store(Path(folder) / "store")
        # Beside a log in a folder lie files of other kinds; a file that was named has to be read.
        only_found = not {*files} & {*paths}
        take = partial(import_paths, store) if selects else give
        summary = imported(take, paths, files, client=desk.client, columns=columns, may_be_none=bool(logs) and only_found)
        if not summary.dump_ids:
            left_out = plural(len(summary.refused), "other file")
            desk.client.note(f"{left_out} not read as rows: `actordbg dump import {in_shell(str(paths[0]))}` names each")
            return answer(logs)
        chosen = select_dumps(store, where, order="newest", limit=max_inputs, losses=True) if selects else []
        for row in chosen:
            linting.judge(RecordedCall.read(str(store.root / row.path)))
        if selects and not chosen:
            raise replace(desk, store=store).nothing("lint", where)
    findings = linting.finish()
    desk.client.note_some(findings.unreadable)
    damaged = [f"{each.path}: {each.reason}" for each in summary.refused if each.code == CorruptDump.code]
    findings.left = [*findings.left, *(NotChecked(READ, why) for why in (*summary.left_out, *damaged))]
    origins = {call.record.dump_id: call.record.origin for call in linting.kept}
    findings.rows = sum(call.rows for call in linting.kept if not call.is_loss)
    for outcome in findings.outcomes:
        outcome.found = [in_file(finding, origins) for finding in outcome.found]
    findings.files = [str(path) for path in paths]
    if logs:
        findings.outcomes = [*findings.outcomes, *judge_logs(logs)]
        findings.left = [*findings.left, *left_of(logs)]
    return lint_answer(findings, *([curve_table(logs)] if logs else []))


def logs_and_others(paths: Sequence[Path]) -> tuple[list[TrainLog], list[Path]]:
    """Return the logs among files and below folders, and the other files that may have rows.

    Raises as `find_files`, and UsageError for a model.
    """
    logs = logs_below(paths)
    if models := [
        path for path in paths if not logs and any((path / f"{name}config.json").is_file() for name in ("", "adapter_"))
    ]:
        command = f"actordbg check --model {in_shell(str(models[0]))}"
        raise UsageError(f"{models[0]} is a model, not files of a run", hint=f"`{command}` checks it on recorded inputs")
    known = {log.path for log in logs}
    if known.issuperset(map(str, paths)):
        return logs, []
    try:
        files = find_files(paths)
    except UsageError:
        if not logs or not all(path.exists() for path in paths):
            raise
        files = []  # beside the logs
    return logs, [path for path in files if str(path) not in known]


def in_file(finding: Finding, origins: dict[str, dict[str, object]]) -> Finding:
    """Name the file and its row instead of the dump that was made of them."""
    place = dict(finding.place)
    origin = origins.get(str(place.pop("dump", "")), {})
    first = origin.get("row", 0)
    if "row" in place and isinstance(first, int):
        place["row"] += first
    return replace(finding, place={"file": origin.get("name", ""), **place})


def _is_dump(path: Path) -> bool:
    return not path.is_dir() and str(path).partition("#")[0].endswith((SUFFIX, PACK_SUFFIX))
