"""`compare`: how far a replay is from another, from the truth or from recorded outputs; a missing truth is computed."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from actordbg.api.desk import Desk, counting
from actordbg.api.reports import texts_of
from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem, Unsupported, UsageError
from actordbg.catalog.query import get_replay, open_fresh, select_dumps
from actordbg.compare import noise_floor
from actordbg.compare.comparing import compare, save
from actordbg.compare.find_truth import Wanted, ensure_lone_rows, find_truth, require_torch, wanted_rounding, wanted_truth
from actordbg.compare.same_weights import weights_of_outputs, without_unknown_weights
from actordbg.compare.sides import RECORDED_NAMES, TRUTH, open_replay, rests_on_others
from actordbg.compare.thresholds import asked
from actordbg.config.replay_config import ANY_WIDER, TINY
from actordbg.document.blocks import Paragraph
from actordbg.document.command_result import CommandResult
from actordbg.judge.comparison_document import comparison_charts, document
from actordbg.judge.explain_outputs import with_explanation
from actordbg.judge.wrong_tokens import wrong_tokens
from actordbg.records.comparison_record import MISMATCH, ComparisonRecord, NoiseRecord
from actordbg.records.run_files import RECORDED_WEIGHTS
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.supervise import spec_and_owner
from actordbg.store.layout import Store


def compared(
    desk: Desk, a: str, b: str, where: str | None, limits: Mapping[str, float | None], *,
    noise: str | None, truth: str, flat: bool, power: bool, worst: int, tokenizer: str | Path | None, charts: bool,
) -> CommandResult:  # fmt: skip
    """Compare a replay with another, with "truth" or with "recorded". charts: draw them, which reads the tensors again."""
    texts, thresholds, store = texts_of(tokenizer), asked(limits), desk.store.require()
    if power and (flat or b != "truth"):
        raise UsageError("--power needs a truth comparison", hint="compare REPLAY truth --power, without --flat-limits")
    if a in ("truth", *RECORDED_NAMES):
        raise UsageError(f"A is the side under test; it cannot be {a}", hint=f"swap them: compare REPLAY {a}")
    catalog = open_fresh(store)
    judged = desk.replay_named(catalog, a)
    resolved = get_replay(catalog, judged).resolved or {}
    floor = None if noise is None else noise_of(store, judged, noise)
    # evaluated first: a typo in `where` must not cost the computation of a truth
    only = None if where is None else {row.dump_id for row in select_dumps(store, where)}
    rounding = None
    if b == "truth":
        b, rounding = truth_and_rounding(desk, judged, truth, flat=flat, planted=power)
    elif b not in RECORDED_NAMES:
        b = desk.replay_named(catalog, b)
    with desk.client.progress("comparing", None) as advance:
        record = compare(
            store,
            judged,
            b,
            thresholds=thresholds,
            noise=floor,
            rounding=rounding,
            only=only,
            on_progress=lambda done, total: advance(1, total=total),
        )
    if b in RECORDED_NAMES and record.verdict == MISMATCH:
        record = with_cause(desk, record)
        noise_of_each = {dump.dump_id: record.explained.noise for dump in record.compared} if record.explained else {}
        record = without_unknown_weights(record, weights_of_outputs(record, resolved, noise_of_each))
    path = kept(desk, record)
    desk.settle()
    others = rests_on_others(store, record)
    blocks = document(record, worst, comparison_charts(store, record, texts) if charts else [], others)
    if (pattern := wrong_tokens(store, record)) is not None:
        blocks.insert(2, Paragraph(f"Wrong tokens: {pattern.sentence}."))
    if b in RECORDED_NAMES and (weights := resolved.get(RECORDED_WEIGHTS)):
        blocks.insert(2, Paragraph(f"Weights: {weights}."))
    if path is not None:
        desk.client.note(f"saved as {path}", minor=True)
    by_others = record.b.kind == TRUTH and rests_on_others(store, record, subject=False)
    good = record.good and not by_others
    return CommandResult(good, {**vars(record), "good": good}, blocks)


def with_truth(desk: Desk, replay_id: str) -> ComparisonRecord:
    """Compare a replay with its truth, computed now if it does not exist, and keep the comparison."""
    truth, rounding = truth_and_rounding(desk, replay_id, ANY_WIDER, flat=False, planted=False)
    record = compare(desk.store, replay_id, truth, rounding=rounding)
    kept(desk, record)
    return record


def kept(desk: Desk, record: ComparisonRecord) -> Path | None:
    """Save the comparison and return its path; None, with a note, if the store cannot be written."""
    try:
        return save(desk.store, record)
    except StoreProblem as problem:
        desk.client.note(f"this comparison is not saved: {problem.message}")
        return None


def noise_of(store: Store, replay_id: str, name: str) -> NoiseRecord:
    """Return the named noise floor; for "last", the newest that was measured under the configuration of this replay."""
    if name != "last":
        return NoiseRecord.named(store.noise, name, "noise")
    if (newest := noise_floor.newest_for(store, replay_id)) is not None:
        return newest
    raise UsageError(
        f"no noise floor was measured under the configuration of {replay_id}",
        hint="run actordbg noise with the same options as that replay",
    )


def with_cause(desk: Desk, record: ComparisonRecord) -> ComparisonRecord:
    """Name the cause of a mismatch, which loads the model of the replay."""
    replay_id = record.a.replay_id or ""
    spec, owner = spec_and_owner(desk.store, replay_id)
    try:
        desk.store.require_writable()
        desk.client.approve(f"replay {replay_id}, whose model {spec.config.model!r} would be loaded", owner)
    except ActordbgError as problem:
        return replace(record, reasons=(*record.reasons, f"no cause was searched for: {problem.message}"))
    with desk.progress("naming the cause", len(record.compared)) as advance, WarmGroups() as warm:
        return with_explanation(desk.store, record, on_event=counting(advance), warm=warm)


def truth_and_rounding(desk: Desk, replay_id: str, dtype: str, *, flat: bool, planted: bool) -> tuple[str, str | None]:
    """Return the ids of a replay's truth and of the replay that measures its dtype's rounding (None for fixed limits).

    Computes either replay if it does not exist yet. Asks for approval once before it loads the model of another user's replay.
    Raises Unsupported if the replay has nothing to compare.
    """
    store = desk.store
    ours = open_replay(store, replay_id)
    kept_or_why: object = "it has no inputs"
    for dump_id in ours.inputs:
        kept_or_why = ours.read(dump_id)
        if not isinstance(kept_or_why, str):
            break
    else:
        raise Unsupported(f"replay {replay_id} has nothing to compare: {kept_or_why}", hint="replay with --keep-tensors")
    spec, owner = spec_and_owner(store, replay_id)
    model = spec.config.model
    approve_once = cache(partial(desk.client.approve, f"replay {spec.replay_id}, whose model {model!r} would be loaded", owner))

    def computed(request: Wanted, label: str, command: str) -> str:
        if (there := find_truth(store, request)) is not None:
            return there
        require_torch(request)
        store.require_writable()
        if model != TINY:
            approve_once()
        with desk.progress(label, len(request.inputs)) as advance:
            reason = f"{command} replay {replay_id}"
            return ensure_lone_rows(store, request, command=reason, on_event=counting(advance), warm=warm)

    with WarmGroups() as warm:
        truth = computed(wanted_truth(store, spec, dtype), "computing the truth", "the truth of")
        rounding = None if flat else wanted_rounding(store, spec, planted=planted)
        try:
            label = "measuring the dtype's rounding"
            return truth, None if rounding is None else computed(rounding, label, "the rounding of")
        except Unsupported:
            return truth, None  # a kernel that this dtype lacks: the comparison says that its limits are fixed
        except (StoreProblem, EnvironmentProblem) as problem:  # a store may hold the truth where nothing can be computed
            desk.client.note(f"the dtype's rounding was not measured: {problem.message}")
            return truth, None
