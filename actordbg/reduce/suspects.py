"""What is wrong in a replay, as suspects: a fingerprint, and the case that is nearest to the input that has it.

    with WarmGroups(reopen=True) as warm:
        checks = Checks(own_store, spec.config, warm)
        for fingerprint, case in suspects_of(store, checks, spec): ...

The first is what the replay itself says of an input that it judged module by module, or that failed. The second is what a check
says now: for replays that judged nothing, and where the first cannot be shown. All checks of a reduction share one worker.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actordbg.actor.hub_model import folder_of
from actordbg.actor.models import ensure_tiny, once
from actordbg.base.errors import NothingToDo, Unsupported
from actordbg.base.units import plural
from actordbg.compare.comparing import compare
from actordbg.compare.find_truth import ensure_rounding, ensure_truth
from actordbg.compare.sides import TRUTH
from actordbg.config.replay_config import ATTENTIONS, COMPILE_BACKENDS, TINY, ReplayConfig
from actordbg.dumps.create import dump_of_inputs
from actordbg.formats.dump_record import DumpRecord, make_dump_id, now_timestamp
from actordbg.formats.encoding import PlainTensor
from actordbg.judge.check import CheckedReplay
from actordbg.records.comparison_record import MISMATCH, ComparisonRecord
from actordbg.records.journal import read_results, read_standing
from actordbg.records.locate_record import LOCATED
from actordbg.records.replay_record import PASSED, ReplayInput, ReplaySpec, answers_of, violations
from actordbg.reduce.case import (
    ALONE,
    DIFFERENCE,
    ENGINES,
    GRADIENT,
    LIMITS,
    MODEL,
    PACKED,
    PADDED,
    SEVERAL,
    TRAINER,
    FaultCase,
    leaks,
)
from actordbg.reduce.trials import Fingerprint, Trials, fingerprint_of
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.plan import law_order, make_plan
from actordbg.replay.replay_data import ReplayData, data_of
from actordbg.replay.selection import rows_of
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain, load_plain

Suspect = tuple[Fingerprint, FaultCase]
LEAKED = (
    "packed rows attend to each other: transformers keeps rows apart by position_ids only without an attention mask and without "
    "a cache (use_cache=False)"
)
MOST_CHECKED = 3
"""Inputs of the replay that are checked again, the likeliest first."""


@dataclass(frozen=True)
class Checks:
    """Checks of single inputs under a replay's configuration, in a store of the reduction's own, by workers that stay."""

    store: Store
    config: ReplayConfig
    warm: WarmGroups
    trials: Trials

    def of(
        self, record: DumpRecord, tensors: Mapping[str, PlainTensor], config: ReplayConfig, *, fully: bool = True
    ) -> tuple[Fingerprint | None, dict[str, Any]]:
        """Check a dump; return its fingerprint, None if it is right, and what the workers resolved.

        The truth is computed only if neither a law nor a module is wrong; fully=False: not at all.
        """
        identity = make_dump_id(now_timestamp(), 0, 0, "0" * 8)
        copy = replace(record, dump_id=identity, rank=0, world_size=1)
        self.store.put_dump(*encode_plain(copy, tensors), hint="make room")
        rows = rows_of(self.store, f"dump_id='{identity}'", (), "time", None)
        settings = replace(config, laws=1, keep_tensors=True, keep_gradients=config.backward is not False, truth=None, vary=None,
                           name=None, memory_snapshot=False, accept=None)  # fmt: skip
        spec = replace(make_plan(rows, settings, command="actordbg reduce").spec, locate=1)
        self.warm.share(spec.replay_id)
        run_replay(self.store, spec, warm=self.warm)
        data = data_of(self.store, spec)
        fingerprint = fingerprint_of(CheckedReplay(data))
        if fingerprint is None and fully:
            truth = ensure_truth(self.store, spec.replay_id, warm=self.warm)
            rounding = ensure_rounding(self.store, spec.replay_id, warm=self.warm)
            fingerprint = fingerprint_of(CheckedReplay(data, compare(self.store, spec.replay_id, truth, rounding=rounding)))
        return fingerprint, data.resolved

    def of_case(self, case: FaultCase, wanted: Fingerprint) -> Fingerprint | None:
        """Check a case as a replay, with the model in a folder of the reduction. wanted: what it should show."""
        model, kept = case.checkpoint, case.layers
        if case.config is not None:
            folder = once(self.store.models / f"case-{case.key}", lambda folder: self.trials.save_model(case, folder))
            model, kept = str(folder), None
        settings = replace(
            self.config, model=model, num_layers=kept, dtype=case.dtype, attn=case.attn, packing=case.layout == PACKED,
            temperature=case.temperature, backward=case.backward or case.kind == GRADIENT, compile=bool(case.compile),
            deepcompile=False, compile_backend=case.compile or None, backend=case.engine or "plain", zero_stage=case.zero,
            nproc=case.processes, tp=1, ring=1, align=None, through="rows" if case.through == MODEL else self.config.through,
            timeout_s=min(self.config.timeout_s, case.timeout_s),
        )  # fmt: skip
        return self.of(*dump_of(case), settings, fully=not (wanted.laws or wanted.module))[0]


def suspects_of(
    store: Store, checks: Checks, spec: ReplaySpec, compared: ComparisonRecord | None, on_step: Callable[[str], None]
) -> Iterator[Suspect]:
    """Yield what the replay and its comparison say of the wrong input, then what a check says now.

    Raises NothingToDo if the checks find no input wrong.
    """
    wrong = {dump.dump_id for dump in (compared.dumps if compared else ()) if dump.verdict == MISMATCH}
    folder, candidates = store.replays / spec.replay_id, _candidates(store, spec, wrong)
    resolved, results = read_standing(folder)[0], read_results(folder)
    against = compared if compared and compared.b.kind == TRUTH else None
    for item in candidates:
        result = results.get(item.dump_id)
        if result is None or (result.status == PASSED and LOCATED not in result.extra):
            continue
        own = against and replace(against, dumps=tuple(dump for dump in against.dumps if dump.dump_id == item.dump_id))
        if fingerprint := fingerprint_of(CheckedReplay(ReplayData(spec, resolved, "", (result,)), own)):
            yield fingerprint, _case(checks, fingerprint, load_plain(store.root / item.path)[1], resolved)
            break
    for item in candidates[:MOST_CHECKED]:
        on_step("checking the input again")
        record, tensors = load_plain(store.root / item.path)
        fingerprint, resolved = checks.of(record, tensors, checks.config)
        if fingerprint is not None:
            yield fingerprint, _case(checks, fingerprint, tensors, resolved)
            return
    raise NothingToDo(
        f"nothing to reduce: of {plural(len(candidates), 'input')} of replay {spec.replay_id}, "
        f"{min(len(candidates), MOST_CHECKED)} ran again, and none is wrong",
        hint="reduce a replay that fails `actordbg check`, in its environment",
    )


def recorded_suspects(store: Store, checks: Checks, spec: ReplaySpec) -> Iterator[Suspect]:
    """Yield the case of a run whose own outputs are wrong: packed rows that leaked in its forward."""
    for item in _candidates(store, spec):
        record, tensors = load_plain(store.root / item.path)
        if leaks(record.arguments):
            resolved = read_standing(store.replays / spec.replay_id)[0]
            fingerprint = Fingerprint(DIFFERENCE, LEAKED, cause="cache", behind=True)
            case = _case(checks, fingerprint, tensors, resolved | {"packing": True, "through": "rows"})
            yield fingerprint, replace(case, cache=True, left=())
    raise Unsupported(
        "the run's recorded outputs cannot be computed again from this store",
        hint="reduce the replay, or run `actordbg explain` on the comparison",
    )


def _candidates(store: Store, spec: ReplaySpec, mismatched: Collection[str] = ()) -> list[ReplayInput]:
    """Return the replay's inputs, those first that failed, broke a law or are `mismatched`, then those that show the most."""
    results = read_results(store.replays / spec.replay_id)

    def right(item: ReplayInput) -> bool:
        if item.dump_id in mismatched:
            return False
        result = results.get(item.dump_id)
        return result is None or (result.status == PASSED and not violations(answers_of(result.extra)))

    return sorted((spec.inputs[index] for index in law_order(spec.inputs)), key=right)


def _case(checks: Checks, fingerprint: Fingerprint, tensors: Mapping[str, PlainTensor], ran: Mapping[str, Any]) -> FaultCase:
    """Build the case that is nearest to the replay: the same model, rows and settings."""
    if "sequences" not in tensors or "attention_mask" not in tensors:
        raise Unsupported("only calls with `sequences` and `attention_mask` can be reduced", hint="see `actordbg dump show`")
    config = checks.config
    ids = np.asarray(tensors["sequences"].values).astype(np.int64)
    mask = np.asarray(tensors["attention_mask"].values).astype(bool)
    vocabulary, held = ran.get("vocab_size") or int(ids.max()) + 1, mask.any(1)
    rows = tuple(tuple((row[real] % vocabulary).tolist()) for row, real in zip(ids[held], mask[held], strict=True))
    left = tuple(mask[held].argmax(1).tolist())
    packed = bool(ran.get("packing", config.packing))
    layout = ALONE
    if packed:
        layout = PACKED
    elif len({len(row) for row in rows}) > 1 or any(left):
        layout = PADDED
    folder = ensure_tiny(checks.store.models) if config.model == TINY else folder_of(config.model)
    model = str(folder.absolute()) if folder else config.model  # trials run in another folder
    dtype = str(ran.get("dtype") or config.dtype or "bf16")
    attn = str(ran.get("attn") or config.attn or "sdpa")
    several = config.nproc if fingerprint.kind in SEVERAL else 1
    engine = config.backend in ENGINES and several == config.nproc and fingerprint.kind != GRADIENT
    return FaultCase(
        fingerprint.kind, rows, () if packed else left, checkpoint=model, layers=config.num_layers,
        layout=layout,
        dtype=dtype if dtype in LIMITS else "fp32", attn=attn if attn in ATTENTIONS else "sdpa",
        compile=(config.compile_backend or COMPILE_BACKENDS[0]) if config.compile else "",
        temperature=float(ran.get("temperature") or 1.0),
        backward=bool(ran.get("backward")), through=MODEL if ran.get("through") == "rows" else TRAINER,
        engine=config.backend if engine else "", zero=config.zero_stage,
        processes=several,
        error_class=fingerprint.error_class, error=fingerprint.error, memory=_memory(),
        timeout_s=min(config.timeout_s, 60.0),
    )  # fmt: skip


def _memory() -> int | None:
    """Return this process's limit of address space, which its trials have too."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def dump_of(case: FaultCase) -> tuple[DumpRecord, dict[str, PlainTensor]]:
    """Return a case's rows as a dump: padded to the longest, on the left as the case has it."""
    padded = [(0,) * before + row for before, row in zip(case.left or (0,) * len(case.rows), case.rows, strict=True)]
    ids = np.zeros((len(padded), max(map(len, padded))), np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(padded):
        ids[number, : len(row)] = row
        mask[number, len(row) - len(case.rows[number]) : len(row)] = 1
    return dump_of_inputs({"sequences": ids, "attention_mask": mask, "action_mask": mask[:, 1:] != 0}, "reduced")
