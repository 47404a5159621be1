"""Token in, token out: were the sampled ids the ids that were trained on? The first that differs, and what kind of fault it is.

Three comparisons, in this order: what a turn was given against all turns before it; what the rollout handed over against the
turns; and recorded calls of the run against what was handed over.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from actordbg.base.errors import CorruptDump, NewerFormat, NothingToDo, StoreProblem, UsageError
from actordbg.base.units import plural
from actordbg.catalog import query
from actordbg.document.blocks import RIGHT, ROLLOUT, TRAINER
from actordbg.document.command_result import CommandResult
from actordbg.document.found import answer_of, verdict_of
from actordbg.formats.turn_record import TURNS, Trajectory
from actordbg.recorded.recorded_calls import Answer, Calls, RecordedCall, key_of
from actordbg.records.finding import Finding, Findings, NotChecked, Rule, outcomes_of
from actordbg.records.run_files import read_trajectory
from actordbg.store.layout import Store, require_run_name

Decode = Callable[[Sequence[int]], str]
_IN_TRAINING = "as recorded in the training"
_WINDOW = 300
"""Tokens after the first difference that are aligned to name its kind."""
_ALIKE = 0.6
"""Least share of token ids, in any order, that a recorded row has in common with the conversation that it was made from."""
_CLEARLY = 0.1
"""How much larger that share has to be than the next row's."""
_NEAR = 1e-3
"""Distance of a reward from that of its conversation that rounding explains."""
MOST = 512
"""Trajectories that are read, the newest."""


RULES = tuple(
    Rule(name, holds, thread, remedy, fails=fails)
    for name, fails, holds, thread, remedy in (
        (
            "two BOS",
            "a prompt was sampled from with two BOS",
            "a prompt is sampled from with one BOS",
            "open-r1 PR#462",
            "encode the prompt without special tokens where its template writes a BOS",
        ),
        (
            "extra BOS",
            "one more BOS was trained on",
            "a sequence is trained on without one more BOS",
            "",
            "train on the ids that the rollout returned, without another BOS",
        ),
        (
            "EOS appended",
            "an EOS that was not sampled was appended",
            "no EOS follows a turn that was not sampled",
            "SkyRL PR#2148",
            "append no EOS; where a template needs one, its action mask is 0",
        ),
        (
            "retokenized",
            "text was tokenized again, into other ids",
            "text is not tokenized again, into other ids",
            "verl#3720, SkyRL#123",
            "hand ids from turn to turn, never text",
        ),
        (
            "border lost",
            "whitespace between turns changed",
            "whitespace between a turn and the next stays",
            "verl PR#6921",
            "hand ids from turn to turn, and do not strip text between turns",
        ),
        (
            "template drops text",
            "text of a turn is missing from what was trained on",
            "all text of a turn stays, such as its reasoning",
            "prime-rl#1334, verl#6854",
            "append each turn's sampled ids instead of rendering it again, or use a template that keeps reasoning",
        ),
        (
            "other actions",
            "tokens that no turn sampled count as actions",
            "the tokens that count as actions are those that a turn sampled",
            "SkyRL PR#1070",
            "build the mask from the ids that were sampled",
        ),
        (
            "other ids",
            "other ids were trained on than sampled",
            "the ids that were sampled are those that are trained on",
            "",
            "train on the ids that the rollout returned",
        ),
    )
)
"""Kinds of faults, each as the rule that it breaks."""
_RULE = {rule.name: rule for rule in RULES}


def difference(sampled: Sequence[int], trained: Sequence[int], decode: Decode | None, *, bos: int | None, eos: int | None,
               borders: Sequence[int] = ()) -> tuple[str, int, str] | None:  # fmt: skip
    """Return the kind of the first difference of two sequences of ids, its position and words; None if they are equal.

    trained may be cut at its end. borders: positions in `sampled` at which turns begin or end.
    """
    at = next((i for i, (a, b) in enumerate(zip(sampled, trained, strict=False)) if a != b), min(len(sampled), len(trained)))
    if at == len(trained):
        return None
    if bos is not None and trained[0] == bos and list(trained[1 : 1 + _WINDOW]) == list(sampled[:_WINDOW])[: len(trained) - 1]:
        return "extra BOS", 0, f"{_shown([bos], decode)} before {_shown(sampled[:4], decode)}"
    ours, theirs = sampled[at : at + _WINDOW], trained[at : at + _WINDOW]
    if eos is not None and theirs[0] == eos and (at == len(sampled) or list(theirs[1:9]) == list(ours[:8])[: len(theirs) - 1]):
        return "EOS appended", at, f"{_shown([eos], decode)} follows {_shown(sampled[max(at - 4, 0) : at], decode)}"
    same_text = decode is not None and _same_text(decode(ours), decode(theirs))
    tag, low, high, first, last = next(
        (code for code in SequenceMatcher(None, list(ours), list(theirs), autojunk=False).get_opcodes() if code[0] != "equal"),
        ("replace", 0, len(ours), 0, len(theirs)),
    )
    lost, added = ours[low:high], theirs[first:last]
    words = f"sampled {_shown(lost, decode)}, trained {_shown(added, decode)}"
    if same_text:
        return "retokenized", at, words
    blank = decode is not None and not (decode(lost) + decode(added)).strip()
    near = any(abs(border - at) <= 1 or abs(border - at - len(lost)) <= 1 for border in borders)
    if (tag in ("delete", "insert") and len(lost) + len(added) <= 2 and near) or blank:
        return "border lost", at, words
    if tag == "delete":
        return "template drops text", at, f"{_shown(lost, decode)} is gone"
    return "other ids", at, words


def _same_text(ours: str, theirs: str) -> bool:
    """Check whether two texts, cut at different places, begin alike for most of their length."""
    size = min(len(ours), len(theirs)) - 8
    return size > 0 and ours[:size] == theirs[:size]


def _shown(ids: Sequence[int], decode: Decode | None) -> str:
    few = list(ids[:12])
    return f"{few}" + ("..." if len(ids) > len(few) else "") + (f" {decode(few)!r}" if decode and few else "")


def fault_of(trajectory: Trajectory, row: Sequence[int] | None, decode: Decode | None, actions: Sequence[int]) -> Finding | None:
    """Return the first difference of a trajectory. row: the recorded row that was made from it, if there is one; actions: the
    positions in it that its action mask selects.
    """
    known: list[int] = []
    borders: list[int] = []

    def found(kind: str, position: int, words: str, turn: int | None, where: str) -> Finding:
        """The side that changed the ids is the rollout until it hands them over."""
        place = {"conversation": trajectory.name.removesuffix(".json"), "turn": turn, "token": position}
        known_place = {name: value for name, value in place.items() if value is not None}
        side = TRAINER if where == _IN_TRAINING else ROLLOUT
        return Finding(_RULE[kind], f"{words}, {where}", known_place, side)

    for number, turn in enumerate(trajectory.turns):
        if trajectory.bos is not None and turn.given[:2] == (trajectory.bos,) * 2:
            words = f"{_shown(turn.given[:4], decode)}: the prompt was encoded with a BOS before its own"
            return found("two BOS", 0, words, number, "as the rollout was given it")

    def fault(ids: Sequence[int], turn: int | None, where: str) -> Finding | None:
        first = difference(known, ids, decode, bos=trajectory.bos, eos=trajectory.eos, borders=borders)
        return None if first is None else found(*first, turn, where)

    for number, turn in enumerate(trajectory.turns):
        if number and (changed := fault(turn.given[: len(known)], number - 1, f"as turn {number} was given")) is not None:
            return changed
        known = [*(turn.given if len(turn.given) >= len(known) else known), *turn.sampled]
        borders += [len(turn.given), len(known)]
    end = max([len(known), *(stop for _, stop in trajectory.ranges[-1:])])
    if (changed := fault(trajectory.trained[:end], None, "as handed to the trainer")) is not None:
        return changed
    spans = zip(trajectory.turns, trajectory.ranges, strict=False)
    for number, (turn, (start, stop)) in enumerate(spans):
        if (start, stop) != (len(turn.given), len(turn.given) + len(turn.sampled)):
            words = (
                f"tokens {start} to {stop} count as actions, and {len(turn.sampled)} were sampled from token {len(turn.given)} on"
            )
            return found("other actions", start, words, number, "as handed to the trainer")
    if row is None:
        return None
    known = list(trajectory.trained)
    if (changed := fault(row, None, _IN_TRAINING)) is not None:
        return changed
    sampled = {position for start, stop in trajectory.ranges for position in range(start, stop)}
    others = [position for position in actions if position not in sampled]
    if not others or not sampled:
        return None
    words = f"{plural(len(others), 'token')} that no turn sampled count as actions"
    return found("other actions", others[0], words, None, _IN_TRAINING)


def turns_answer(store: Store, dump: str | None = None, *, run: str | None = None, decode: Decode | None = None) -> CommandResult:
    """Judge the recorded turns of a run, by default of the newest; of a dump: those that its rows begin with.

    Raises NothingToDo if no turns were recorded.
    """
    record = None if dump is None else query.get_dump(store, dump)
    require_run_name(run)
    if record is not None and run not in (None, record.run):
        raise UsageError(f"{record.dump_id} is a dump of run {record.run}, not of {run}", hint="drop --run")
    trajectories, unread = trajectories_of(store, record.run if record else run)
    if not trajectories:
        raise NothingToDo(
            "no turns were recorded", hint="record them: actordbg run --turns -- COMMAND (turns of OpenRLHF's agents only)"
        )
    name = trajectories[0].run
    rows = _rows(store, name, record)
    pairs = list(_with_rows(trajectories, [*rows]))
    if record is not None:
        pairs = [(each, row) for each, row in pairs if row is not None]
    judged = (fault_of(each, row, decode, rows.get(row or (), ())) for each, row in pairs)
    faults = [fault for fault in judged if fault is not None]
    alone = sum(row is None for _, row in pairs)
    turns = sum(len(each.turns) for each, _ in pairs)
    findings = Findings(outcomes_of(RULES, faults, len(pairs) - alone), f"run {name}")
    if alone:
        without = f"{plural(alone, 'conversation')}, of which no recorded call of the training has the row"
        findings.left.append(NotChecked(_RULE["other ids"], without))
    if unread and record is None:
        older = f"{plural(unread, 'recorded conversation')}, damaged or older than the newest {MOST}"
        findings.left.append(NotChecked(_RULE["other ids"], older))
    verdict = verdict_of(findings, _right(pairs, turns, alone), {RIGHT: f"actordbg lint --where \"run='{name}'\""})
    data = {"run": name, "trajectories": len(pairs), "turns": turns, "in_dumps": len(pairs) - alone}
    return answer_of(findings, verdict, title=f"turns of run {name}", **data)


def _right(pairs: Sequence[tuple[Trajectory, Any]], turns: int, alone: int) -> str:
    """Say what is known where nothing differs."""
    if not pairs:
        return "no trajectory begins as a row of this dump does"
    count = f"{plural(len(pairs), 'conversation')}, {plural(turns, 'turn')}"
    if alone == len(pairs):
        return f"{count}: the rollout handed over what it sampled"
    some = f"{len(pairs) - alone} of " if alone else ""
    return f"{some}{count}: trained on as sampled"


def trajectories_of(store: Store, run: str | None) -> tuple[list[Trajectory], int]:
    """Read the newest trajectories of a run, at most `MOST`; by default of the newest run. Also return how many were left out."""
    require_run_name(run)
    runs = run or "*"
    paths = sorted((store.root / TURNS).glob(f"{runs}/*.json"), key=lambda path: path.stat().st_mtime_ns)
    read = []
    own = [path for path in paths if path.parent == paths[-1].parent]
    for path in own[-MOST:]:
        with contextlib.suppress(CorruptDump, NewerFormat, OSError):
            read.append(read_trajectory(path))
    return read, len(own) - len(read)


def rewards(calls: Calls, answer: Answer) -> None:
    """Hold each row's reward against that of its conversation. Rewards that were shaped in between are not judged."""
    answer.lacks = "rewards of the rollout (run --turns), not shaped"
    found = [(call, call.array("rewards")) for call in calls if call.is_loss and call.root]
    losses: Any = [call for call, each in found if each is not None and each.size == len(call.row_keys)]
    for root, run in {(call.root, call.record.run): None for call in losses}:
        told = {(key_of(each.trained), each.reward) for each in trajectories_of(Store(root), run)[0]}
        times = Counter(key for key, _ in told)
        got = {key: reward for key, reward in told if times[key] == 1}  # equal conversations may have unlike rewards
        rows = [(call, row, key) for call in losses if call.record.run == run for row, key in enumerate(call.row_keys)]
        known = {key: (call, row) for call, row, key in rows if got.get(key) is not None}
        own = np.array([got[key] for key in known])
        given = np.array([call.array("rewards").reshape(-1)[row] for call, row in known.values()])
        bad = abs(given - own) > _NEAR
        if (abs(np.sort(given) - np.sort(own)) <= _NEAR).all():
            answer.looked_at += len(known)
            for at in bad.nonzero()[0][:1]:
                said = f"the rollout gave a row {own[at]:.4g}, and its reward is {given[at]:.4g}, another row's, in {bad.sum()}"
                answer.violated([*known.values()][at][0], f"{said} of {plural(len(known), 'row')}", [*known.values()][at][1])


def _rows(store: Store, run: str, record: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the different recorded rows, without padding, with the positions of their actions; () without an action mask."""
    catalog = query.open_fresh(store)
    where = f"run = '{run}'"
    dumps = [record] if record is not None else query.select_dumps(catalog, where, order="newest", limit=MOST, losses=True)
    rows: dict[tuple[int, ...], tuple[int, ...]] = {}
    for each in dumps:
        try:
            call = RecordedCall.read(str(store.root / each.path))
        except StoreProblem:
            continue
        if call.sequences is None or call.real is None:
            continue
        acts = np.zeros(call.real.shape, bool)
        if call.active is not None and call.array("action_mask") is not None:
            acts[:, acts.shape[1] - call.active.shape[1] :] = call.active
        for ids, real, of_row in zip(call.sequences, call.real, acts, strict=True):
            row = tuple(map(int, ids[real]))
            rows[row] = rows.get(row) or tuple(map(int, of_row[real].nonzero()[0]))
    return rows


def _with_rows(
    trajectories: Sequence[Trajectory], rows: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Trajectory, tuple[int, ...] | None]]:
    """Yield each trajectory with the row that was made from it: the same ids, else the one row with its prompt that is clearly
    most alike. Samples of a group have the same prompt: a row is compared only with the conversation that it is most alike to.
    """
    groups: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for each in trajectories:
        groups.setdefault(each.turns[0].given if each.turns else (), set()).add(each.trained)
    handed, owned = set().union(*groups.values()), dict[tuple[int, ...], list[tuple[float, tuple[int, ...]]]]()
    left = [row for row in rows if row not in handed]
    for prompt, group in groups.items():
        size = len(prompt)
        answers = [(ids, Counter(ids[size:])) for ids in group]
        for row in left:
            if prompt and prompt in (row[:size], row[1 : size + 1]):  # there may be one more BOS
                counts = Counter(row[size:])
                (share, ids), *others = sorted(((_alike(answer, counts), ids) for ids, answer in answers), reverse=True)
                if share >= _ALIKE and (not others or others[0][0] < share):
                    owned.setdefault(ids, []).append((share, row))
    known = set(rows)
    for each in trajectories:
        own = sorted(owned.get(each.trained, ()), reverse=True)
        clear = len(own) == 1 or (len(own) > 1 and own[0][0] - own[1][0] >= _CLEARLY)
        yield each, each.trained if each.trained in known else own[0][1] if clear else None


def _alike(ours: Counter[int], theirs: Counter[int]) -> float:
    return (ours & theirs).total() / max(ours.total(), theirs.total() // 2, 1)
