"""Did the rollout engines get the weights? Judged from recorded transfers (`run --hash-weights`), parameter by parameter.

The ladder has four rungs: what the trainer had, what it sent, what reached each engine's loader, and what the loader took. A
parameter may not move in a step, since bf16 rounds small steps away: an engine is held against what was sent.
Parameters of other steps come from the hashes at recorded calls, which tell how far the trainer went after the last transfer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actordbg.base.errors import NothingToDo, StoreProblem
from actordbg.base.units import plural, some
from actordbg.catalog import query
from actordbg.document.blocks import RIGHT, ROLLOUT, TRAINER, UNCHECKED, WRONG, Block, Grid, Verdict, number, section
from actordbg.document.command_result import CommandResult
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.weight_hashes import WEIGHTS, ParameterHash, WeightRecord, weights_of
from actordbg.formats.weight_syncs import SYNCS, EngineAnswer, SentParameter, WeightSync
from actordbg.judge.recorded_calls import RecordedCall
from actordbg.records.run_files import read_sync, read_weights
from actordbg.store.layout import Store, require_run_name


@dataclass(frozen=True)
class LadderFault:
    """A fault of transfers. side: which is wrong. since, until: the steps of the first and the last transfer with it.
    parameters: their names.
    """

    side: str
    words: str
    since: str
    until: str
    parameters: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Say the fault, and when it was there."""
        when = self.since if self.since == self.until else f"{self.since} to {self.until}"
        return f"{self.words} ({when})" if when else self.words


@dataclass(frozen=True)
class WeightLadder:
    """The transfers of a run. stale: the sentence about an engine that no transfer reached lately, or ""; stale_side: which is
    wrong then. left: what else was not checked.
    """

    run: str
    syncs: Sequence[WeightSync]
    faults: Sequence[LadderFault]
    stale: str
    stale_side: str
    unrecorded: int
    moved: Sequence[int]
    left: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        """Say whether everything arrived, and what did not."""
        if told := [*([self.stale] if self.stale else []), *(fault.sentence for fault in self.faults)]:
            return "; ".join(told)
        last = self.syncs[-1]
        hashed = sum(each.had is not None for each in last.parameters.values())
        said = f"{plural(len(self.syncs), 'transfer')} of {plural(hashed, 'parameter')} to {plural(last.engines, 'engine')}: "
        asked = sum(sync.engines for sync in self.syncs)
        answers = f"{asked - self.unrecorded} of {plural(asked, 'answer')} were recorded, and each arrived as sent"
        return said + (answers if self.unrecorded else "each arrived as sent")

    @property
    def verdict(self) -> Verdict:
        """WRONG with a fault; NOT CHECKED if no engine was recorded."""
        blind = self.unrecorded == sum(sync.engines for sync in self.syncs)
        missing = [f"{plural(self.unrecorded, 'answer')} of engines that were not recorded"] if self.unrecorded else []
        each = [parameter for sync in self.syncs for parameter in sync.parameters.values() if parameter.answers]
        unhashed = sum(parameter.had is None for parameter in each)
        missing += [f"{unhashed} of {plural(len(each), 'parameter')}, which could not be hashed when sent"] * bool(unhashed)
        missing += self.left
        faulty = bool(self.faults or self.stale)
        if blind and not faulty:
            return Verdict(UNCHECKED, "what arrived in the engines: their processes were not recorded", not_checked=missing)
        if each and unhashed == len(each) and not faulty:
            said = "what arrived in the engines: no parameter was hashed when it was sent"
            return Verdict(UNCHECKED, said, not_checked=missing)
        sides = [self.stale_side] * bool(self.stale) + [fault.side for fault in self.faults]
        said = f"run {self.run}: {self.sentence}"
        following = "" if faulty else f"actordbg lint --where \"run='{self.run}'\""
        return Verdict(WRONG if faulty else RIGHT, said, not_checked=missing, next=following, wrong=sides[:1])

    @property
    def blocks(self) -> list[Block]:
        """Return what `actordbg weights` shows below the verdict."""
        rows = []
        for sync, moved in zip(self.syncs, [None, *self.moved[1:]], strict=True):  # the first has none before it
            each = sync.parameters.values()
            sent, arrived = sum(bool(p.had or p.answers) for p in each), sum(any(a.sha256 for a in p.answers) for p in each)
            rows.append((_step(sync), *map(number, (len(each), sent, moved, arrived)), f"{sync.seconds:.2f}"))
        many = [fault for fault in self.faults if len(fault.parameters) > 3]
        named = [fault.words.replace(some(fault.parameters), some(fault.parameters, 20)) for fault in many]
        table = Grid(("transfer", "parameters", "sent", "moved", "arrived", "took, s"), tuple(rows), {"transfer"})
        return [table, *section("", named)]


def weights_answer(store: Store, run: str | None = None) -> CommandResult:
    """Judge the transfers of a run, by default of the newest that has some. Raises NothingToDo if none was recorded."""
    ladder = climb(store, run)
    faults = [vars(fault) | {"sentence": fault.sentence} for fault in ladder.faults]
    data = {"run": ladder.run, "transfers": len(ladder.syncs), "stale": ladder.stale, "faults": faults, "moved": [*ladder.moved]}
    return CommandResult.of(ladder.verdict, data, *ladder.blocks, title=f"weights of run {ladder.run}")


def climb(store: Store, run: str | None = None) -> WeightLadder:
    """Read a run's transfers and find what is wrong with them. Damaged files are left out, and counted."""
    require_run_name(run)
    named = (folder for folder in (store.root / SYNCS).glob(run or "*") if is_plain_name(folder.name))
    folders = [folder for folder in named if any(folder.glob("*.json"))]
    if not folders:
        hint = "record them: actordbg run --hash-weights -- COMMAND (OpenRLHF with vLLM)"
        raise NothingToDo(f"no transfer of weights was recorded{f' for run {run}' if run else ''}", hint=hint)
    folder = max(folders, key=lambda each: max(path.stat().st_mtime_ns for path in each.glob("*.json")))
    syncs, left = [], []
    for path in folder.glob("*.json"):
        try:
            syncs.append(read_sync(path))
        except (StoreProblem, OSError):
            left.append(path)
    if not syncs:
        raise NothingToDo(f"every transfer of run {folder.name} is damaged", hint="run `actordbg store fsck`")
    syncs.sort(key=lambda sync: (sync.timestamp, sync.number))
    before: Mapping[str, SentParameter] = {}
    moved = []
    for sync in syncs:
        moved.append(sum(before.get(name, each).had != each.had for name, each in sync.parameters.items()))
        before = sync.parameters
    answered = [[_recorded(sync, engine) for engine in range(sync.engines)] for sync in syncs]
    unrecorded = sum(not each for of_sync in answered for each in of_sync)
    missing = [f"{plural(len(left), 'transfer')}, whose files are damaged"] if left else []
    stale, side = _stale(syncs), ROLLOUT
    if not stale:
        side = TRAINER
        stale, unknown = _behind(store, folder.name, syncs, whole=not left)
        missing += [unknown] if unknown else []
    rows = query.select_dumps(query.open_fresh(store), f"run = '{folder.name}'", losses=True)
    unequal = [(call, words) for call, words in unequal_ranks(store.root, rows) if words]
    faults = [LadderFault(TRAINER, f"weights differ: {words}", "", "", ()) for _, words in unequal[:1]]
    return WeightLadder(folder.name, syncs, [*faults, *_faults(syncs, stale)], stale, side, unrecorded, moved, missing)


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
_RUNGS: tuple[tuple[str, _Rung], ...] = (
    ("{many} never arrived: {names}", lambda each, answer: answer.sha256 is None),
    ("{names} arrived other than sent", lambda each, answer: answer.sha256 not in (None, each.sent or each.had)),
    ("the engine did not know {many}: {names}", lambda each, answer: answer.sha256 is not None and answer.loaded == 0),
)


def _faults(syncs: Sequence[WeightSync], stale: str) -> Iterator[LadderFault]:
    """Yield what is wrong with transfers, the same parameters in consecutive transfers as one fault."""
    faults: dict[tuple[str, str, tuple[str, ...]], list[WeightSync]] = {}
    for sync in syncs:
        of = len(sync.parameters)
        if silent := tuple(name for name, each in sync.parameters.items() if each.had is None and not each.answers):
            words = f"{len(silent)} of {of} parameters {'was' if len(silent) == 1 else 'were'} never sent: {some(silent)}"
            faults.setdefault((TRAINER, words, silent), []).append(sync)
        if other := tuple(name for name, each in sync.parameters.items() if each.had and each.sent not in (None, each.had)):
            faults.setdefault((TRAINER, f"{some(other)} left the trainer other than it had it", other), []).append(sync)
        for engine in range(sync.engines):
            if not _recorded(sync, engine) or (stale and not _changed(sync, engine)):
                continue  # not recorded; or nothing arrived, which is said once
            for words, is_wrong in _RUNGS:
                wrong = tuple(
                    name
                    for name, each in sync.parameters.items()
                    if each.had and engine < len(each.answers) and is_wrong(each, each.answers[engine])
                )
                if wrong:
                    many = f"{len(wrong)} of {of} parameters"
                    faults.setdefault((ROLLOUT, words.format(many=many, names=some(wrong)), wrong), []).append(sync)
    for (side, words, names), at in faults.items():
        yield LadderFault(side, words, _step(at[0]), _step(at[-1]), names)
