"""The last verdict of each dump, from everything that judged it: journals, comparisons and lints, by their rows.

Each replay of a dump answers questions about it, each by a rule:

    run                  did it pass?
    neighbour, ...       does a law hold?
    identity             is the model the checkpoint's? An answer for every dump of that replay
    local                is every module's output the truth's? A comparison without a mismatch of its own fails by that
    ranks                do the ranks agree (`--align same`)?
    truth                do its values match the truth?
    recorded             are the training run's own outputs what its model gives?

Of each rule the newest answer counts, among the replays under the configuration of the dump's newest replay (`fold`):

* A rule that is broken makes the dump WRONG until a later replay of that configuration answers the same rule. A replay that does
  not ask cannot take it away.
* Else a newest replay that did not pass, or a law that could not be checked, makes it FAILED.
* A law of recorded data that is broken makes it WRONG, whatever was replayed, until a lint of as much data says otherwise. Those
  that hold change nothing: no model was run.
* RIGHT needs a match with the truth, by the log-probs of the newest replay, bit for bit: later values were not compared.
* Everything else is NOT CHECKED.

The cells of a matrix count together, as if they were the newest replay: the worst of their verdicts. Truths and variations are
not under test, and a comparison of two replays says nothing about either. What came from elsewhere (`origin`) counts
for `theirs` alone, and so does what was compared with it.

Example::

    fold([Judgement(7, "20250619T052608-9f3a2c", "passed", answers={"neighbour": "broken"})]).verdict      # "WRONG"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from actordbg.base.units import grouped, listed
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG
from actordbg.records.comparison_record import GOOD, MISMATCH, NOT_COMPARED
from actordbg.records.finding import BROKEN, NOT_CHECKED, RAISED
from actordbg.records.locate_record import IDENTITY, LOCAL
from actordbg.records.replay_record import NONDETERMINISTIC, PASSED, STOPPED

if TYPE_CHECKING:
    from sqlite3 import Connection

TRUTH, RECORDED = "truth", "recorded"
"""Rules of comparisons."""
WORST_FIRST = (WRONG, FAILED, UNCHECKED, RIGHT)
MATRIX, LOCATED = "matrix ", "modules of replay "
"""Beginnings of the commands of replays that other commands start: cells of a matrix, and where `explain` judges modules."""
_BAD = (BROKEN, MISMATCH)
_UNASKED = (NOT_CHECKED, NOT_COMPARED)
"""Answers that leave a rule open."""
_RULE_OF = {"truth": TRUTH, "golden": RECORDED}
"""Rules by what B is in a comparison."""
AT_ONCE = 500


@dataclass
class Judgement:
    """A result of a dump, and the answers of its replay by rule. number: its row. digest: of its log-probs.

    configuration: equal for equal settings; None if it judges nothing. command: of the replay. mine: whether it was made here.
    accept: an answer that breaks no rule.
    """

    number: int
    replay_id: str
    status: str
    digest: str | None = None
    configuration: str | None = ""
    command: str = ""
    accept: str | None = None
    mine: bool = True
    answers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LastVerdict:
    """The columns of a dump that say how it was judged last (`models.Dump`)."""

    last_result: int | None = None
    verdict: str | None = None
    broken: str | None = None
    theirs: str | None = None


def fold(judgements: Sequence[Judgement], linted: Sequence[str] = ()) -> LastVerdict:
    """Return the last verdict of a dump. judgements: the newest first. linted: the laws of recorded data that it breaks."""
    mine = [each for each in judgements if each.mine and each.configuration is not None]
    theirs = [each for each in judgements if not each.mine and each.configuration is not None]
    newest = _newest(mine) or _newest(theirs) or next(iter(judgements), None)
    verdict, broken = _of_newest(mine)
    word, _ = _of_newest(theirs)
    if linted:
        verdict, broken = WRONG, [*linted, *broken]
    return LastVerdict(newest.number if newest else None, verdict, listed(broken) or None, word)


def _newest(judgements: Sequence[Judgement]) -> Judgement | None:
    """Return the newest replay that was run for itself, else any; None without one."""
    return next((each for each in judgements if not each.command.startswith(LOCATED)), judgements[0] if judgements else None)


def _of_newest(judgements: Sequence[Judgement]) -> tuple[str | None, list[str]]:
    """Return the word of the newest replay's configuration, of a matrix the worst one, and what made it so."""
    newest = _newest(judgements)
    if newest is None:
        return None, []
    if not newest.command.startswith(MATRIX):
        return _word([each for each in judgements if each.configuration == newest.configuration], newest)
    together = {each.configuration for each in judgements if _occasion(each) == _occasion(newest)}
    words = []
    for configuration in sorted(together, key=str):
        under = [each for each in judgements if each.configuration == configuration]
        words.append(_word(under, _newest(under) or newest))
    worst = min((word for word, _ in words), key=WORST_FIRST.index)
    return worst, list(dict.fromkeys(rule for word, broken in words if word == worst for rule in broken))


def _occasion(judgement: Judgement) -> str:
    """Return what started a replay: a matrix, or itself."""
    command = judgement.command
    return command.partition(",")[0] if command.startswith(MATRIX) else judgement.replay_id


def _word(judgements: Sequence[Judgement], newest: Judgement) -> tuple[str, list[str]]:
    """Return the word of a configuration, and the rules that broke. judgements: under it, the newest first."""
    asked: dict[str, tuple[str, Judgement]] = {}
    for each in judgements:
        for rule, answer in each.answers.items():
            if answer not in _UNASKED:
                asked.setdefault(rule, (answer, each))
    failed = [] if newest.status in (PASSED, STOPPED) else [newest.status]
    if not asked:
        return (FAILED if failed else UNCHECKED), failed
    broken = [rule for rule, (answer, each) in asked.items() if breaks(answer, each.accept)]
    failed = [*(rule for rule, (answer, _) in asked.items() if answer == RAISED), *failed]
    if broken:
        return WRONG, [*broken, *failed]
    if failed:
        return FAILED, failed
    answer, compared = asked.get(TRUTH, ("", newest))
    same = compared is newest or (newest.digest is not None and compared.digest == newest.digest)
    passed = newest.status == PASSED and newest.answers.get(RECORDED) != NOT_COMPARED
    return (RIGHT if answer in GOOD and same and passed else UNCHECKED), []


def breaks(answer: str, accept: str | None) -> bool:
    """Check whether an answer means that its rule is broken. accept: an answer that the user accepts."""
    return answer in _BAD or (answer == NONDETERMINISTIC != accept)


def fold_news(connection: Connection) -> int:
    """Fold the verdicts of some dumps with news, and forget that they had any; return how many dumps that were."""
    names = [name for (name,) in connection.execute("SELECT dump_id FROM unjudged LIMIT ?", (AT_ONCE,))]
    marks = ",".join("?" * len(names))
    judged = _judgements(connection, names, marks)
    linted = grouped((name, law) for name, law, _ in connection.execute(LINTED.format(f"WHERE dump_id IN ({marks})"), names))
    verdicts = {name: fold(judged.get(name, []), linted.get(name, [])) for name in names}
    rows = ((*vars(verdict).values(), name) for name, verdict in verdicts.items())
    changes = ", ".join(f"{field.name} = ?" for field in fields(LastVerdict))
    connection.executemany(f"UPDATE dump SET {changes} WHERE dump_id = ?", rows)
    connection.execute(f"DELETE FROM unjudged WHERE dump_id IN ({marks})", names)
    return len(names)


LINTED = (
    "SELECT dump_id, law, looked_at FROM (SELECT dump_id, law, looked_at, verdict, max(created_at) FROM lint_answer {} "
    f"GROUP BY dump_id, law) WHERE verdict = '{BROKEN}'"
)
"""The laws of recorded data that are broken by the newest answer of lints, with dumps. {}: a condition."""
_RESULTS = (
    "SELECT r.dump_id, r.id, r.replay_id, r.status, r.output_digest, p.configuration, coalesce(p.command, ''), p.accept, "
    "p.origin IS NULL FROM result AS r JOIN replay AS p ON p.replay_id = r.replay_id WHERE r.dump_id IN ({}) "
    "ORDER BY r.finished_at DESC, r.replay_id DESC"
)
_COMPARED = (
    "SELECT c.dump_id, c.replay_id, f.against_kind, c.verdict, f.verdict = 'mismatch' AND NOT f.mismatches, "
    "f.origin IS NULL AND b.origin IS NULL AND n.origin IS NULL FROM comparison AS c "
    "JOIN comparison_run AS f ON f.comparison_id = c.comparison_id LEFT JOIN replay AS b ON b.replay_id = f.against "
    "LEFT JOIN replay AS n ON n.replay_id = f.rounding_id WHERE c.dump_id IN ({}) "
    "AND (f.against_kind = 'golden' OR (f.against_kind = 'truth' AND b.replay_id IS NOT NULL)) ORDER BY c.created_at"
)
"""Comparisons, the oldest first, with whether all dumps together are a mismatch though none is alone."""


def _judgements(connection: Connection, names: Sequence[str], marks: str) -> Mapping[str, list[Judgement]]:
    """Read everything that judged these dumps, the newest first."""
    by_dump: dict[str, list[Judgement]] = defaultdict(list)
    passed: dict[tuple[str, str], Judgement] = {}
    for dump_id, *facts in connection.execute(_RESULTS.format(marks), names):
        judgement = Judgement(*facts)
        by_dump[dump_id].append(judgement)
        if judgement.status == PASSED:  # others have the one answer that they did not
            passed[judgement.replay_id, dump_id] = judgement
    replays = sorted({each.replay_id for each in passed.values()})
    models, modules = (_of_replays(connection, replays, law) for law in (IDENTITY, LOCAL))
    for judgement in passed.values():
        if judgement.replay_id in models:
            judgement.answers[IDENTITY] = models[judgement.replay_id]
    bad = (
        f"SELECT dump_id FROM law_answer WHERE dump_id IN ({marks}) AND verdict IN ('{BROKEN}', '{NONDETERMINISTIC}', '{RAISED}')"
    )
    sql = f"SELECT replay_id, dump_id, law, verdict FROM law_answer WHERE dump_id IN ({bad})"  # of others nothing is broken
    for replay_id, dump_id, law, answer in connection.execute(sql, names):
        if (replay_id, dump_id) in passed:
            passed[replay_id, dump_id].answers.setdefault(law, answer)
    for dump_id, replay_id, against, answer, together, made_here in connection.execute(_COMPARED.format(marks), names):
        compared = passed.get((replay_id, dump_id))
        if compared is not None and (made_here or not compared.mine):
            rule = LOCAL if together and modules.get(replay_id) == BROKEN else _RULE_OF[against]
            answer = MISMATCH if together else answer
            if answer not in _UNASKED or rule not in compared.answers:
                compared.answers[rule] = answer
    return by_dump


def _of_replays(connection: Connection, replay_ids: Sequence[str], law: str) -> dict[str, str]:
    """Return what each of these replays answers in all of its results: broken in any, else kept."""
    answers: dict[str, str] = {}
    for first in range(0, len(replay_ids), AT_ONCE):
        some = replay_ids[first : first + AT_ONCE]
        of_some = f"replay_id IN ({','.join('?' * len(some))}) AND law = '{law}'"
        answers |= dict(connection.execute(f"SELECT replay_id, min(verdict) FROM law_answer WHERE {of_some} GROUP BY 1", some))
    return answers
