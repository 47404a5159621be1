"""Did the rollout engines get the weights? Judged from recorded transfers (`run --hash-weights`), parameter by parameter.

The ladder has four rungs: what the trainer had, what it sent, what reached each engine's loader, and what the loader took. A
parameter may not move in a step, since bf16 rounds small steps away: an engine is held against what was sent.
Parameters of other steps come from the hashes at recorded calls, which tell how far the trainer went after the last transfer.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actordbg.base.errors import NothingToDo, StoreProblem
from actordbg.base.units import plural, some
from actordbg.catalog import query
from actordbg.document.blocks import RIGHT, ROLLOUT, TRAINER, Grid, number
from actordbg.document.command_result import CommandResult
from actordbg.document.found import answer_of, verdict_of
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.weight_hashes import WEIGHTS, ParameterHash, WeightRecord
from actordbg.formats.weight_syncs import SYNCS, EngineAnswer, SentParameter, WeightSync
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.records.finding import Finding, Findings, NotChecked, Rule, outcomes_of
from actordbg.records.run_files import read_sync, read_weights, weights_of
from actordbg.store.layout import Store, require_run_name

RULES = FRESH, SAME, SENT, AS_HELD, ARRIVED, AS_SENT, KNOWN = tuple(
    Rule(name, holds, remedy=remedy, side=side, fails=fails)
    for name, side, fails, holds, remedy in (
        (
            "fresh",
            ROLLOUT,
            "the engine has old weights",
            "an engine has the weights of the last transfer",
            "asynchronous training may mean to; else see that each transfer ran, and ended before the generation",
        ),
        (
            "ranks",
            TRAINER,
            "ranks have different weights",
            "all ranks of the trainer have the same weights",
            "compare the ranks, from the broadcast at the start to the averaging of gradients",
        ),
        (
            "sent",
            TRAINER,
            "parameters were never sent",
            "every parameter is sent",
            "compare the names that the trainer sends with its parameters",
        ),
        (
            "sent as held",
            TRAINER,
            "parameters changed on their way out of the trainer",
            "a parameter leaves the trainer as it has it",
            "look at casts and gathers before it is sent, and at which model is sent (an average, an adapter)",
        ),
        (
            "arrived",
            ROLLOUT,
            "the engine never loaded parameters that were sent",
            "what is sent reaches the engine",
            "compare the names that were sent with those that its load_weights returns",
        ),
        (
            "arrived as sent",
            ROLLOUT,
            "parameters arrived changed",
            "a parameter reaches the engine as it was sent",
            "compare dtype, shape and shards of what was sent and what arrived: correct the cast or the mapping of shards",
        ),
        (
            "known",
            ROLLOUT,
            "the engine skipped parameters that it does not know",
            "the engine takes each parameter that reaches it",
            "look at the names that its loader maps",
        ),
    )
)
"""What must hold of the transfers of a run."""


def weights_answer(store: Store, run: str | None = None) -> CommandResult:
    """Judge the transfers of a run, by default of the newest that has some. Raises NothingToDo if none was recorded."""
    run, syncs, damaged = _transfers(store, run)
    unrecorded = sum(not _recorded(sync, engine) for sync in syncs for engine in range(sync.engines))
    asked = sum(sync.engines for sync in syncs)
    each = [parameter for sync in syncs for parameter in sync.parameters.values() if parameter.answers]
    unhashed = sum(parameter.had is None for parameter in each)
    found, unknown = _found(store, run, syncs, whole=not damaged)
    judged = unrecorded < asked and not (each and unhashed == len(each))
    left = {
        f"{plural(unrecorded, 'answer')} of engines that were not recorded": (unrecorded, ARRIVED),
        f"{unhashed} of {plural(len(each), 'parameter')}, which could not be hashed when sent": (unhashed, AS_SENT),
        f"{plural(damaged, 'transfer')}, whose files are damaged": (damaged, SENT),
        unknown: (unknown, FRESH),
    }
    findings = Findings(outcomes_of(RULES, found, len(syncs) if judged else 0), f"run {run}")
    findings.left = [NotChecked(rule, said) for said, (holds, rule) in left.items() if holds]
    if judged:
        hashed = sum(parameter.had is not None for parameter in syncs[-1].parameters.values())
        said = f"{plural(len(syncs), 'transfer')} of {plural(hashed, 'parameter')} to {plural(syncs[-1].engines, 'engine')}: "
        said += f"{asked - unrecorded} of {plural(asked, 'answer')} were recorded, and " if unrecorded else ""
        said += "each arrived as sent"
    else:
        why = "their processes were not recorded" if unrecorded == asked else "no parameter was hashed when it was sent"
        said = f"what arrived in the engines: {why}"
    moved = _moved(syncs)
    verdict = verdict_of(findings, said, {RIGHT: f"actordbg lint --where \"run='{run}'\""})
    about = {"run": run, "transfers": len(syncs), "moved": moved}
    return answer_of(findings, verdict, _table(syncs, moved), title=f"weights of run {run}", **about)


def _table(syncs: Sequence[WeightSync], moved: Sequence[int]) -> Grid:
    rows = []
    for sync, of_sync in zip(syncs, [None, *moved[1:]], strict=True):  # the first has none before it
        each = sync.parameters.values()
        sent, arrived = sum(bool(p.had or p.answers) for p in each), sum(any(a.sha256 for a in p.answers) for p in each)
        rows.append((_step(sync), *map(number, (len(each), sent, of_sync, arrived)), f"{sync.seconds:.2f}"))
    return Grid(("transfer", "parameters", "sent", "moved", "arrived", "took, s"), tuple(rows), {"transfer"})


def _moved(syncs: Sequence[WeightSync]) -> list[int]:
    """Count the parameters of each transfer that are not those of the one before."""
    before: Mapping[str, SentParameter] = {}
    moved = []
    for sync in syncs:
        moved.append(sum(before.get(name, each).had != each.had for name, each in sync.parameters.items()))
        before = sync.parameters
    return moved


def _transfers(store: Store, run: str | None) -> tuple[str, list[WeightSync], int]:
    """Read a run's transfers in their order; also return its name, and how many files are damaged."""
    require_run_name(run)
    named = (folder for folder in (store.root / SYNCS).glob(run or "*") if is_plain_name(folder.name))
    folders = [folder for folder in named if any(folder.glob("*.json"))]
    if not folders:
        hint = "record them: actordbg run --hash-weights -- COMMAND (OpenRLHF with vLLM)"
        of_run = f" for run {run}" if run else ""
        raise NothingToDo(f"no transfer of weights was recorded{of_run}", hint=hint)
    folder = max(folders, key=lambda each: max(path.stat().st_mtime_ns for path in each.glob("*.json")))
    syncs, damaged = [], 0
    for path in folder.glob("*.json"):
        try:
            syncs.append(read_sync(path))
        except (StoreProblem, OSError):
            damaged += 1
    if not syncs:
        raise NothingToDo(f"every transfer of run {folder.name} is damaged", hint="run `actordbg store fsck`")
    return folder.name, sorted(syncs, key=lambda sync: (sync.timestamp, sync.number)), damaged


def _found(store: Store, run: str, syncs: Sequence[WeightSync], *, whole: bool) -> tuple[list[Finding], str]:
    """Return what is wrong with the transfers, and what is not known. whole: whether all of them could be read."""
    found, unknown = [], ""
    if stale := _stale(syncs):
        found.append(Finding(FRESH, stale))
    else:
        behind, unknown = _behind(store, run, syncs, whole=whole)
        found += [Finding(FRESH, behind, side=TRAINER)] if behind else []
    rows = query.select_dumps(query.open_fresh(store), f"run = '{run}'", losses=True)
    unequal = [words for _, words in unequal_ranks(store.root, rows) if words]
    found += [Finding(SAME, f"weights differ: {words}") for words in unequal[:1]]
    held = {(each.host, each.pid, each.step): each.parameters for each in _at_calls(store, run)}
    return [*found, *_faults(syncs, stale, held)], unknown


def _answers(sync: WeightSync, engine: int) -> list[EngineAnswer]:
    return [each.answers[engine] for each in sync.parameters.values() if engine < len(each.answers)]


def _recorded(sync: WeightSync, engine: int) -> bool:
    return any(answer.recorded for answer in _answers(sync, engine))


def _step(sync: WeightSync) -> str:
    return f"transfer {sync.number}" if sync.step is None else f"step {sync.step}"


def _changed(sync: WeightSync, engine: int) -> bool:
    return any(answer.sha256 for answer in _answers(sync, engine))


def _stale(syncs: Sequence[WeightSync]) -> str:
    """Say since when no transfer reached an engine; "" if the last reached all."""
    last = syncs[-1]
    for engine in range(last.engines):
        reached = [sync for sync in syncs if _changed(sync, engine)]
        named = f"engine {engine}" if last.engines > 1 else "the engine"
        if _recorded(last, engine) and (not reached or reached[-1] is not last):
            since = f"since {_step(reached[-1])}" if reached else "since it was started"
            return f"{named} has not changed {since}, and the trainer is at {_step(last)}"
    return ""


def _behind(store: Store, run: str, syncs: Sequence[WeightSync], *, whole: bool) -> tuple[str, str]:
    """Say that the trainer went further after the last transfer than ever between two; or why that is not known. whole: whether
    all transfers could be read.
    """
    last = syncs[-1]
    after = (record.step for record in _at_calls(store, run) if record.step is not None and record.timestamp > last.timestamp)
    later = max(after, default=None)
    if last.step is None or later is None or later <= last.step + 1:
        return "", ""
    steps = [sync.step for sync in syncs if sync.step is not None]
    apart = max((after - before for before, after in itertools.pairwise(steps)), default=0)
    if apart <= 0 or not whole:
        return "", f"whether a transfer is due at step {later}: too few were recorded to tell how many steps they are apart"
    if later <= last.step + apart:
        return "", ""
    return f"the engine has not changed since step {last.step}, and the trainer is at step {later}: no transfer was made", ""


def _at_calls(store: Store, run: str) -> Iterator[WeightRecord]:
    for path in (store.root / WEIGHTS / run).glob("[!.]*.json"):
        try:
            yield read_weights(path)
        except (StoreProblem, OSError):
            continue


def unequal_ranks(root: Path, calls: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yield, for each model and step that several ranks hashed, one of the calls (records or rows of the catalog), and which
    parameters differ from rank to rank, "" if none does. Shards are not compared, nor a model of which ranks hold other parts.
    """
    files: dict[Path, tuple[Any, WeightRecord]] = {}
    for call in {(call.run, call.pid, call.instance, call.step, call.role is None): call for call in calls}.values():
        path = weights_of(root, call)
        if path is not None and (path not in files or call.role is not None):
            with contextlib.suppress(StoreProblem, OSError):
                files[path] = call, files[path][1] if path in files else read_weights(path)
    models: dict[tuple[str, str, int | None], dict[int, list[tuple[Any, WeightRecord]]]] = {}
    for call, record in files.values():
        role = (call.role or "policy").removesuffix(" loss")
        models.setdefault((record.run, role, record.step), {}).setdefault(record.rank, []).append((call, record))
    for _, by_rank in sorted(models.items(), key=lambda model: (*model[0][:2], model[0][2] or 0)):
        if len(by_rank) < 2 or any(len(each) > 1 for each in by_rank.values()):
            continue  # a rank that was there twice: another job of this run
        (_, first), *others = (by_rank[rank][0] for rank in sorted(by_rank))
        whole = {name: each for name, each in first.parameters.items() if each.part is None}
        for call, record in others:
            same = {
                name: known
                for name, each in whole.items()
                if (other := record.parameters.get(name))
                and other.shape == each.shape
                and (known := _alike(each, other)) is not None
            }
            differ = [name for name, alike in same.items() if not alike]
            if not same or (differ and not _is_replica(root, call, first)):
                continue
            at = "" if record.step is None else f"step {record.step}: "
            many = f"{len(differ)} of {plural(len(same), 'parameter')} differ between ranks {first.rank} and {record.rank}"
            yield call, f"{at}{many}: {some(differ)}" if differ else ""


def _alike(ours: ParameterHash, theirs: ParameterHash) -> bool | None:
    """Return whether two ranks held the same parameter, by its hash, else by its sample; None if neither has both."""
    if ours.sha256 and theirs.sha256:
        return ours.sha256 == theirs.sha256
    return ours.sample == theirs.sample if ours.sample and theirs.sample and theirs.part is None else None


def _is_replica(root: Path, call: Any, held: WeightRecord) -> bool:
    """Check that tensor parallelism has not divided the parameters: one still has the size of the configuration."""
    record = call if hasattr(call, "actor") else RecordedCall.read(str(root / call.path)).record
    size = record.actor.get("intermediate_size")
    return size is None or any(size in each.shape for each in held.parameters.values())


_Rung = Callable[[SentParameter, EngineAnswer], bool]
_RUNGS: tuple[tuple[Rule, str, _Rung], ...] = (
    (ARRIVED, "{many} never arrived: {names}", lambda each, answer: answer.sha256 is None),
    (AS_SENT, "{names} arrived other than sent", lambda each, answer: answer.sha256 not in (None, each.sent or each.had)),
    (KNOWN, "the engine did not know {many}: {names}", lambda each, answer: answer.sha256 is not None and answer.loaded == 0),
)


_Held = Mapping[str, ParameterHash]


def _is_held(each: SentParameter, own: ParameterHash | None) -> bool:
    """Check that a parameter was sent as the trainer had it, and as the policy computed with it at the same step."""
    return each.sent in (None, each.had) and (own is None or own.part is not None or own.sha256 in (None, each.had))


def _faults(syncs: Sequence[WeightSync], stale: str, held: Mapping[tuple[str, int, int | None], _Held]) -> Iterator[Finding]:
    """Yield what is wrong with transfers, the same parameters in consecutive transfers as one fault. held: at calls, by host,
    process and step.
    """
    faults: dict[tuple[Rule, str, tuple[str, ...]], list[WeightSync]] = {}
    for sync in syncs:
        of = len(sync.parameters)
        if silent := tuple(name for name, each in sync.parameters.items() if each.had is None and not each.answers):
            were = "was" if len(silent) == 1 else "were"
            words = f"{len(silent)} of {of} parameters {were} never sent: {some(silent)}"
            faults.setdefault((SENT, words, silent), []).append(sync)
        own = held.get((sync.host, sync.pid, sync.step), {})
        if other := tuple(name for name, each in sync.parameters.items() if each.had and not _is_held(each, own.get(name))):
            faults.setdefault((AS_HELD, f"{some(other)} left the trainer other than it had it", other), []).append(sync)
        for engine in range(sync.engines):
            if not _recorded(sync, engine) or (stale and not _changed(sync, engine)):
                continue  # not recorded; or nothing arrived, which is said once
            for rule, words, is_wrong in _RUNGS:
                wrong = tuple(
                    name
                    for name, each in sync.parameters.items()
                    if each.had and engine < len(each.answers) and is_wrong(each, each.answers[engine])
                )
                if wrong:
                    many = f"{len(wrong)} of {of} parameters"
                    faults.setdefault((rule, words.format(many=many, names=some(wrong)), wrong), []).append(sync)
    for (rule, words, names), at in faults.items():
        since, until = _step(at[0]), _step(at[-1])
        when = since if since == until else f"{since} to {until}"
        yield Finding(rule, f"{words} ({when})", {"parameter": some(names, 20)})
