"""Reduce a replay: from its wrong input to the smallest case with the same fingerprint, confirmed and checked.

    record = reduce_replay(store, spec, most=200, seconds=300)
    record.case, record.fingerprint, record.confirmed

1. The wrong input is checked again, in a store of its own inside the reduction's folder. What `check` says is the fingerprint.
2. The case that is furthest from the replay and shows it is the start: transformers alone before the trainer, a small random
   model before the checkpoint, one process before several.
3. It is shrunk (`shrink`). The result runs twice in this call, in two processes, and is checked as a replay: a smaller
   case with another law or module is set aside, and the last case with the same is taken.

`store/reductions/<id>/` has `trials.jsonl` and `reduction.json`; <id> is the replay's, so the same command continues.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from actordbg.actor.family_models import build_families, config_of_model
from actordbg.actor.hub_model import folder_of, read_json, versions_of
from actordbg.actor.models import ensure_tiny
from actordbg.base.errors import ActordbgError, NothingToDo, Unsupported
from actordbg.base.units import plural
from actordbg.config.replay_config import ATTENTIONS, COMPILE_BACKENDS, TINY, ReplayConfig
from actordbg.formats.dump_record import DumpRecord, contiguous_strides, make_dump_id, now_timestamp
from actordbg.formats.encoding import PlainTensor
from actordbg.judge.check import run_check
from actordbg.records.comparison_record import StoredRecord
from actordbg.records.journal import read_results, read_standing
from actordbg.records.replay_record import PASSED, ReplayInput, ReplaySpec, answers_of, violations
from actordbg.reduce.case import (
    ALONE,
    DIFFERENCE,
    ENGINES,
    LIMITS,
    MODEL,
    PACKED,
    PADDED,
    SEVERAL,
    TRAINER,
    FaultCase,
    clean_config,
    leaks,
)  # fmt: skip
from actordbg.reduce.fingerprint import Fingerprint, fingerprint_of
from actordbg.reduce.shrink import Shrinker, neighbours
from actordbg.reduce.trials import RETURNED, OutOfBudget, Trials
from actordbg.replay.plan import law_order, make_plan
from actordbg.replay.selection import rows_of
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain, load_plain

RECORD = "reduction.json"
LEAKED = (
    "packed rows attend to each other: transformers keeps rows apart by position_ids only without an attention mask and without "
    "a cache (use_cache=False)"
)
MOST_CHECKED = 3
"""Inputs of the replay that are checked again, the likeliest first."""
WIDEST = 1024
"""The largest hidden size of a random model that has the sizes of the replay's."""


@dataclass(frozen=True)
class Reduction(StoredRecord):
    """A reduction. start: the size of the first case in words. trials: how many ran. finished: nothing smaller shows it.

    confirmed: the case ran twice, in two processes, and showed it. checked: a replay of the case has the same law or module, or
    `unchecked` says why that was not checked. aside: smaller cases with another fault. tried: settings beside the case's, and
    whether they are right. stack: the innermost frames of an exception.
    """

    what: ClassVar[str] = "reduction"

    reduction_id: str
    created_at: str
    fingerprint: Fingerprint
    case: FaultCase
    start: str
    trials: int
    seconds: float
    finished: bool
    confirmed: bool
    checked: bool
    unchecked: str = ""
    aside: dict[str, str] | None = None
    tried: dict[str, str] | None = None
    stack: tuple[str, ...] = ()
    versions: dict[str, str] | None = None


def folder_of_reduction(store: Store, reduction_id: str) -> Path:
    """Return the folder of a reduction; its id is the replay's or the comparison's."""
    return store.root / "reductions" / reduction_id


def reduce_replay(
    store: Store, spec: ReplaySpec, *, reduction_id: str = "", recorded: bool = False, wrong: Collection[str] = (),
    most: int = 200, seconds: float = 300.0, on_step: Callable[[str], None] = lambda words: None,
) -> Reduction:  # fmt: skip
    """Reduce a replay's wrong input. recorded: the outputs that the run recorded are wrong, not the replay's.
    wrong: ids of the dumps that a comparison says are wrong.

    most, seconds: the budget of trials of this call. Raises NothingToDo if no input is wrong now, Unsupported if no script
    shows it.
    """
    began, folder = time.monotonic(), folder_of_reduction(store, reduction_id or spec.replay_id)
    own = Store(folder / "store").create()
    on_step("checking the input again")
    fingerprint, case = _recorded(store, own, spec) if recorded else _original(store, own, spec, wrong)
    with Trials(folder, most=most, seconds=seconds) as trials:
        shrinker, finished = Shrinker(trials, fingerprint, case, on_step), True
        try:
            shrinker = Shrinker(trials, fingerprint, _start(trials, fingerprint, case, on_step), on_step)
            shrinker.run()
        except OutOfBudget:
            finished = False
        on_step("checking the smallest case as a replay")
        accepted = shrinker.accepted
        last = (len(accepted) - 1, "a replay passes use_cache=False")
        good, unchecked = last if recorded else _checked(own, spec.config, fingerprint, accepted)
        aside = shrinker.aside | ({"another law or module": accepted[-1].words} if good < len(accepted) - 1 else {})
        best = accepted[good]
        on_step("running it again")
        confirmed = all(fingerprint.shown_by(best, trials.ending(best, afresh=True)) for _ in range(2 - trials.ran(best)))
        ending = trials.ending(best)
        tried = {}
        for words, case_beside in neighbours(best):
            try:
                tried[words] = _in_words(fingerprint, case_beside, trials)
            except OutOfBudget:
                break
        count, stack = trials.known, ending.frames
    record = Reduction(
        folder.name, now_timestamp(), fingerprint, best, case.words, count, round(time.monotonic() - began, 1), finished,
        confirmed, not unchecked, unchecked, aside, tried, stack, dict(versions_of(spec.config.model)),
    )  # fmt: skip
    store.publish_text(folder / RECORD, record.to_json())
    return record


def _in_words(fingerprint: Fingerprint, case: FaultCase, trials: Trials) -> str:
    ending = trials.ending(case)
    if fingerprint.shown_by(case, ending):
        return "shows it too"
    if ending.status != RETURNED:
        return f"{ending.error_class or ending.status}"
    right = all(value is not None and value <= case.limit for value in ending.values)
    return (f"right, to {case.limit:g} nats" if ending.values else "right") if right else "wrong in another way"


def _original(store: Store, own: Store, spec: ReplaySpec, wrong: Collection[str]) -> tuple[Fingerprint, FaultCase]:
    """Check the wrong inputs one by one; return the first fingerprint, and its case."""
    candidates = _candidates(store, spec, wrong)
    for item in candidates[:MOST_CHECKED]:
        record, tensors = load_plain(store.root / item.path)
        fingerprint, resolved = _check(own, spec.config, record, tensors)
        if fingerprint is not None:
            return fingerprint, _case(own, spec.config, fingerprint, tensors, resolved)
    raise NothingToDo(
        f"none of the {plural(min(len(candidates), MOST_CHECKED), 'input')} tried is wrong now, of {len(candidates)} of replay "
        f"{spec.replay_id}",
        hint="reduce a replay that fails `actordbg check`, in its environment",
    )


def _candidates(store: Store, spec: ReplaySpec, mismatched: Collection[str] = ()) -> list[ReplayInput]:
    """Return the replay's inputs, those first that failed, broke a law or are `mismatched`, then those that show the most."""
    results = read_results(store.replays / spec.replay_id)

    def wrong(item: ReplayInput) -> bool:
        result = results.get(item.dump_id)
        failed = result is not None and (result.status != PASSED or bool(violations(answers_of(result.extra))))
        return failed or item.dump_id in mismatched

    order = {index: rank for rank, index in enumerate(law_order(spec.inputs))}
    ranked = sorted(enumerate(spec.inputs), key=lambda pair: (not wrong(pair[1]), order[pair[0]]))
    return [item for _, item in ranked]


def _check(
    own: Store, config: ReplayConfig, record: DumpRecord, tensors: Mapping[str, PlainTensor]
) -> tuple[Fingerprint | None, dict[str, Any]]:
    """Check one dump in the reduction's own store; return its fingerprint, None if it is right, and what the workers resolved."""
    identity = f"{make_dump_id(now_timestamp(), 0, 0, '0' * 8)}"
    copy = replace(record, dump_id=identity, rank=0, world_size=1) if record.dump_id else record
    own.put_dump(*encode_plain(copy, tensors), hint="make room")
    rows = rows_of(own, f"dump_id='{identity}'", (), "time", None)
    settings = replace(config, laws=1, keep_tensors=True, keep_gradients=config.backward is not False, truth=None, vary=None,
                       name=None, memory_snapshot=False, accept=None)  # fmt: skip
    spec = make_plan(rows, settings, command="actordbg reduce").spec
    fingerprint = fingerprint_of(run_check(own, spec))
    return fingerprint, read_standing(own.replays / spec.replay_id)[0]


def _case(
    own: Store, config: ReplayConfig, fingerprint: Fingerprint, tensors: Mapping[str, PlainTensor], ran: Mapping[str, Any]
) -> FaultCase:
    """Build the case that is nearest to the replay: the same model, rows and settings."""
    if "sequences" not in tensors or "attention_mask" not in tensors:
        raise Unsupported("only calls with `sequences` and `attention_mask` can be reduced", hint="see `actordbg dump show`")
    ids, mask = (np.asarray(tensors[name].values).astype(np.int64) for name in ("sequences", "attention_mask"))
    vocabulary = ran.get("vocab_size") or int(ids.max()) + 1
    rows = tuple(
        tuple(int(token) % vocabulary for token in row[real != 0]) for row, real in zip(ids, mask, strict=True) if real.any()
    )
    left = tuple(int(real.argmax()) for real in mask if real.any())
    packed = bool(ran.get("packing", config.packing))
    padded = len({len(row) for row in rows}) > 1 or any(left)
    model = str(ensure_tiny(own.models)) if config.model == TINY else config.model
    dtype = str(ran.get("dtype") or config.dtype or "bf16")
    attn = str(ran.get("attn") or config.attn or "sdpa")
    several = config.nproc if fingerprint.kind in SEVERAL else 1
    return FaultCase(
        fingerprint.kind, rows, () if packed else left, checkpoint=model, layers=config.num_layers,
        layout=PACKED if packed else PADDED if padded else ALONE,
        dtype=dtype if dtype in LIMITS else "fp32", attn=attn if attn in ATTENTIONS else "sdpa",
        compile=(config.compile_backend or COMPILE_BACKENDS[0]) if config.compile else "",
        temperature=float(ran.get("temperature") or 1.0),
        backward=bool(ran.get("backward")), through=MODEL if ran.get("through") == "rows" else TRAINER,
        engine=config.backend if config.backend in ENGINES and several == config.nproc else "", zero=config.zero_stage,
        processes=several,
        limit=LIMITS.get(dtype, 1e-4), error_class=fingerprint.error_class, error=fingerprint.error, memory=_memory(),
        timeout_s=min(config.timeout_s, 60.0),
    )  # fmt: skip


def _memory() -> int | None:
    """Return this process's limit of address space, which its trials have too."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _recorded(store: Store, own: Store, spec: ReplaySpec) -> tuple[Fingerprint, FaultCase]:
    """Return the case of a run whose own outputs are wrong: packed rows that leaked in its forward."""
    for item in _candidates(store, spec):
        record, tensors = load_plain(store.root / item.path)
        if leaks(record.arguments):
            resolved = read_standing(store.replays / spec.replay_id)[0]
            fingerprint = Fingerprint(DIFFERENCE, LEAKED, cause="cache", behind=True)
            case = _case(own, spec.config, fingerprint, tensors, resolved | {"packing": True, "through": "rows"})
            return fingerprint, replace(case, cache=True, left=())
    raise Unsupported(
        "the run's recorded outputs cannot be computed again from this store",
        hint="reduce the replay, or run `actordbg explain` on the comparison",
    )


def _start(trials: Trials, fingerprint: Fingerprint, case: FaultCase, on_step: Callable[[str], None]) -> FaultCase:
    """Return the simplest start that shows it: a random model before the checkpoint, transformers before the trainer."""
    plain = {"processes": 1, "engine": "", "zero": 0, "through": MODEL}
    stacks: list[dict[str, Any]] = [plain, {**plain, "through": case.through}, {"through": MODEL}, {}]
    shown: list[str] = []
    for changes in [change for index, change in enumerate(stacks) if change not in stacks[:index]]:
        for model in _models(case):
            start = replace(case, **changes, **model)
            on_step(f"does this show it? {start.words}, {'random weights' if start.config else 'the checkpoint'}")
            ending = trials.ending(start)
            if fingerprint.shown_by(start, ending):
                return start
            shown.append(f"{ending.error_class or ending.status} {ending.error}"[:100].strip())
    raise Unsupported(
        f"no script without actordbg shows it ({'; '.join(dict.fromkeys(shown))})",
        hint="the fault may be in the trainer's own code, in this process's state, or need several processes, of which a script "
        "shows crashes and hangs only: `actordbg explain` names the module",
    )


def _models(case: FaultCase) -> Iterator[dict[str, Any]]:
    """Yield the models to try: small random ones of the family, a random one with the model's own sizes, the checkpoint."""
    folder = folder_of(case.checkpoint)
    configs: list[dict[str, Any]] = []
    if folder is not None:
        own = clean_config(read_json(Path(folder) / "config.json"))
        with contextlib.suppress(ActordbgError):  # a family without small sizes
            configs.append(clean_config(config_of_model(Path(folder))))
        if "vision_config" not in own and int(own.get("hidden_size") or 0) <= WIDEST:
            configs.append(own)
    for found in configs:
        vocabulary = int(found.get("vocab_size") or 0)
        rows = tuple(tuple(token % vocabulary for token in row) for row in case.rows) if vocabulary else case.rows
        yield {"config": found, "checkpoint": "", "layers": None, "rows": rows}
    yield {}


def _checked(own: Store, config: ReplayConfig, fingerprint: Fingerprint, accepted: Sequence[FaultCase]) -> tuple[int, str]:
    """Return the index of the last accepted case that `check` says the same of, by bisection, and why it was not checked."""
    low, high, why = 0, len(accepted) - 1, ""

    def same(index: int) -> bool:
        nonlocal why
        try:
            return fingerprint.matches(_check_case(own, config, accepted[index]))
        except ActordbgError as problem:
            why = problem.message
            return True

    if same(high):
        return high, why
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if same(middle) else (low, middle)
    if low == 0 and (high == 0 or not same(0)):
        why = "no case has the same law or module"
    return low, why


def _check_case(own: Store, config: ReplayConfig, case: FaultCase) -> Fingerprint | None:
    """Check a case as a replay, with the model in a folder of the reduction."""
    model, kept = case.checkpoint, case.layers
    if case.config is not None:
        folder = own.models / f"case-{case.key}"
        if problems := build_families({folder: dict(case.config)}):
            raise Unsupported(next(iter(problems.values())))
        model, kept = str(folder), None
    settings = replace(
        config, model=model, num_layers=kept, dtype=case.dtype, attn=case.attn, packing=case.layout == PACKED,
        temperature=case.temperature, backward=case.backward, compile=bool(case.compile), deepcompile=False,
        compile_backend=case.compile or None, backend=case.engine or "plain", zero_stage=case.zero, nproc=case.processes, tp=1,
        ring=1, align=None, through="rows" if case.through == MODEL else config.through,
        timeout_s=min(config.timeout_s, case.timeout_s),
    )  # fmt: skip
    return _check(own, settings, *dump_of(case))[0]


def dump_of(case: FaultCase) -> tuple[DumpRecord, dict[str, PlainTensor]]:
    """Return a case's rows as a dump: padded to the longest, on the left as the case has it."""
    left = case.left or (0,) * len(case.rows)
    width = max(before + len(row) for before, row in zip(left, case.rows, strict=True))
    ids, mask = np.zeros((2, len(case.rows), width), np.int64)
    for number, (before, row) in enumerate(zip(left, case.rows, strict=True)):
        ids[number, before : before + len(row)] = row
        mask[number, before : before + len(row)] = 1
    tensors = {"sequences": ids, "attention_mask": mask, "action_mask": mask[:, 1:] != 0}
    record = DumpRecord(
        dump_id=make_dump_id(now_timestamp(), 0, 0, "0" * 8), run="reduced", rank=0, timestamp=now_timestamp(),
        batch_size=len(case.rows), seq_len=width, tokens=case.tokens, source="create", world_size=1, action_len=width - 1,
        arguments={"return_output": False, "allgather_logits": False, "return_logprobs": False, "return_entropy": False},
    )  # fmt: skip
    return record, {
        name: PlainTensor(v.dtype.name, np.ascontiguousarray(v), contiguous_strides(v.shape)) for name, v in tensors.items()
    }
