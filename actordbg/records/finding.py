"""Evidence of any kind: a rule that is broken, by which side, where and by how much. What people and programs see is made of it.

A `Rule` is a row of a table: what must hold, and what to do if it does not. A `Finding` is a place where it fails, with a clause
for people, `said`, which code never reads. `NotChecked` is a rule that could not be judged, or not everywhere. A `RuleOutcome` is
what is known of a rule after it was looked at, `Findings` are the outcomes of a command. Two findings are of the same fault if
their `key` is equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actordbg.base.units import grouped, listed, plural, with_handles

KEPT, BROKEN, NOT_CHECKED, RAISED = "kept", "broken", "not-checked", "raised"
"""How a rule stands: it holds, it does not, it could not be checked, its check raised."""
PLACES = ("file", "dump", "conversation", "turn", "row", "token", "module", "parameter", "step", "rank", "cell")
"""What a place may name, in the order in which a table shows it."""
_OF_DATA = ("file", "dump", "conversation", "turn", "row", "token")
"""Places that the clause of a finding does not name."""
ISOLATION = "replay with `--no-packing`; if that is right, packing passes wrong positions or borders of rows"
"""What to do where rows depend on each other, whoever found it."""
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def any_layer(module: str) -> str:
    """Return a module's name with N for the number of its layer: "model.layers.N.mlp"."""
    return _LAYER.sub("N", module)


@dataclass(frozen=True)
class Rule:
    """What must hold. thread: where people met it broken. remedy: what to do then. needs: what has to be recorded to check it.

    side: which is wrong where it fails: ROLLOUT, TRAINER, EITHER if that is open, "" if it is neither. fails: what is wrong then,
    in a few words, with names of PLACES in braces; "" if the clause of a finding is as short.
    """

    name: str
    holds: str = ""
    thread: str = ""
    remedy: str = ""
    needs: tuple[str, ...] = ()
    side: str = ""
    fails: str = ""


@dataclass(frozen=True)
class Finding:
    """A place where a rule is broken. said: one clause with its figures, for people. place: names of PLACES, with their values.

    side: "" for the rule's own. size: how far, in the rule's unit; limit: how far is allowed. remedy: "" for the rule's own.
    whose: who says so, if it is not this user's own evidence.
    """

    rule: Rule
    said: str
    place: Mapping[str, Any] = field(default_factory=dict)
    side: str = ""
    size: float | None = None
    limit: float | None = None
    remedy: str = ""
    whose: str = ""

    @property
    def of_side(self) -> str:
        """The side that is wrong."""
        return self.side or self.rule.side

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what makes two findings the same fault: the rule, the side, and the module in any layer."""
        return self.rule.name, self.of_side, any_layer(str(self.place.get("module", "")))

    @property
    def what(self) -> str:
        """Return what is wrong, in a few words."""
        return self.rule.fails.format(**self.place) if self.rule.fails else self.said

    @property
    def where(self) -> str:
        """Return where in the data it is: "row 2 of dump 9f3a2c04"; "" for the whole of what was judged."""
        place = {name: self.place[name] for name in _OF_DATA if name in self.place}
        kind = next((name for name in ("file", "dump", "conversation") if name in place), "")
        whole = with_handles(str(place.pop(kind, "")))
        if kind == "dump":  # a file's name and a conversation's say what they are
            whole = f"dump {whole}"
        parts = ", ".join(f"{name} {value}" for name, value in place.items())
        return f"{parts} of {whole}" if parts and whole else parts or whole

    @property
    def todo(self) -> str:
        """Return what to do about it."""
        return self.remedy or self.rule.remedy

    @property
    def data(self) -> dict[str, Any]:
        """The finding as plain data, as `--json` has it."""
        own = {"rule": self.rule.name, "key": list(self.key), "said": self.said, "side": self.of_side, "place": dict(self.place)}
        about = {"remedy": self.todo, "thread": self.rule.thread, "whose": self.whose}
        return own | {"size": self.size, "limit": self.limit} | {name: text for name, text in about.items() if text}


@dataclass(frozen=True)
class NotChecked:
    """A rule that a verdict does not cover. said: of what, or why, for people; "" where nothing of it was judged. by: what would
    check it, such as an option, or what has to be recorded.
    """

    rule: Rule
    said: str = ""
    by: str = ""

    @property
    def text(self) -> str:
        """Return what was not checked, with what would check it."""
        said = self.said or self.rule.name
        return f"{said} ({self.by})" if self.by else said

    @property
    def data(self) -> dict[str, str]:
        """The rule, why it was not checked and what would check it, as `--json` has them."""
        return {"rule": self.rule.name, "said": self.said, "by": self.by}


def unchecked_in_brief(left: Sequence[NotChecked]) -> list[str]:
    """Return what was not checked, each once; rules of which nothing was judged are counted, with what most of them need."""
    texts = list(dict.fromkeys(each.text for each in left if each.said))
    if needs := grouped((each.by, each.rule.name) for each in left if not each.said):
        by, rules = max(needs.items(), key=lambda need: len(need[1]))
        others = sum(map(len, needs.values())) - len(rules)
        lacks = by or "recorded data"
        texts.append(f"{plural(len(rules), 'rule')}, for lack of {lacks}")
        texts += [f"{plural(others, 'rule')}, for lack of other data"] if others else []
    return texts


def unchecked_by_rule(left: Sequence[NotChecked]) -> list[str]:
    """Return what was not checked, a line for each rule. Rules of which nothing was judged share one if they need the same."""
    said = grouped((each.rule, each.text) for each in left if each.said)
    needs = grouped((each.by, each.rule.name) for each in left if not each.said)
    lines = ["; ".join(dict.fromkeys(texts)) for texts in said.values()]
    return lines + [f"{listed(rules)}: needs {by}" for by, rules in needs.items()]


@dataclass
class RuleOutcome:
    """What is known of a rule. looked_at: how often it could be judged. lacks: what was missing where it could not be.
    unjudged: what could not be judged beside that, in words.

    figures: measures of healthy data, by name.
    """

    rule: Rule
    looked_at: int = 0
    found: list[Finding] = field(default_factory=list)
    lacks: str = ""
    unjudged: str = ""
    figures: list[tuple[str, str]] = field(default_factory=list)

    @property
    def state(self) -> str:
        """BROKEN, KEPT, or NOT_CHECKED if nothing could be judged."""
        return BROKEN if self.found else KEPT if self.looked_at else NOT_CHECKED

    @property
    def data(self) -> dict[str, Any]:
        """The rule and how it stands, as plain data."""
        rule = {"rule": self.rule.name, "state": self.state, "holds": self.rule.holds, "thread": self.rule.thread}
        figure = "; ".join(f"{name}: {value}" for name, value in self.figures)
        needs = self.lacks if self.state == NOT_CHECKED else ""
        return rule | {"remedy": self.rule.remedy, "needs": needs, "looked_at": self.looked_at, "figure": figure}


@dataclass
class Findings:
    """What a command found. subject: of what, such as "run ppo". left: where rules that were judged could not be."""

    outcomes: Sequence[RuleOutcome]
    subject: str = ""
    left: list[NotChecked] = field(default_factory=list)

    def of(self, state: str) -> list[RuleOutcome]:
        """Return the rules that stand so, in the order of the table."""
        return [outcome for outcome in self.outcomes if outcome.state == state]

    @property
    def broken(self) -> list[Rule]:
        """The rules that fail, in the order of the table."""
        return [outcome.rule for outcome in self.of(BROKEN)]

    @property
    def held(self) -> list[Rule]:
        """The rules that hold."""
        return [outcome.rule for outcome in self.of(KEPT)]

    @property
    def not_checked(self) -> list[NotChecked]:
        """Everything that was not checked."""
        return [*self.left, *(NotChecked(outcome.rule, by=outcome.lacks) for outcome in self.of(NOT_CHECKED) if outcome.lacks)]

    @property
    def found(self) -> list[Finding]:
        """All findings, those of the first rule first."""
        return [finding for outcome in self.outcomes for finding in outcome.found]

    def __getitem__(self, name: str) -> RuleOutcome:
        """Return the outcome of the rule with this name."""
        return next(outcome for outcome in self.outcomes if outcome.rule.name == name)


def outcomes_of(rules: Sequence[Rule], found: Sequence[Finding], looked_at: int) -> list[RuleOutcome]:
    """Return the outcomes of rules that were all judged equally often."""
    by_rule = grouped((finding.rule.name, finding) for finding in found)
    return [RuleOutcome(rule, looked_at, by_rule.get(rule.name, [])) for rule in rules]
