"""The table of recorded fields in the docs, `docs/reference/recorded-fields.md`, and what laws of recorded data really read."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

from actordbg.recorded.lint import lint
from actordbg.recorded.recorded_calls import Answer, RecordedCall
from actordbg.recorded.recorded_laws import LAWS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recorded-fields.md"


def linted(store):
    """What the laws say of all dumps of a store that are files of their own."""
    return lint(store.root, [str(path.relative_to(store.root)) for path in store.iter_dumps()])


def listed():
    """Each field of the table: the laws that read it, and what else reads it, or why nothing does."""
    rows = re.findall(r"^\| `([^`]+)` \|([^|]*)\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: ({law.strip() for law in laws.split(",")} - {"-", ""}, why.strip()) for name, laws, why in rows}


def unlisted(names):
    """The fields that the table lacks, or has without a law or a reason."""
    known = listed()
    return [name for name in names if not any(known.get(name, (set(), "")))]


def unlisted_of(paths):
    """The fields of these dumps that the table lacks."""
    names = set[str]()
    for path in paths:
        call = RecordedCall.read(str(path))
        names |= call.recorded_names - {call.record.point}
        names |= {f"record.{name}" for name in vars(call.record)} | {f"actor.{name}" for name in call.record.actor}
    return unlisted(sorted(names))


class _Traced:
    """A record that notes which of its fields are read."""

    def __init__(self, record, names):
        self._record, self._names = record, names

    def __getattr__(self, name):
        self._names.add(f"record.{name}")
        value = getattr(self._record, name)
        return _TracedFacts(value, self._names) if name == "actor" else value


class _TracedFacts(dict[str, Any]):
    def __init__(self, facts, names):
        super().__init__(facts)
        self._names = names

    def get(self, name, default=None):
        self._names.add(f"actor.{name}")
        return super().get(name, default)


def read_by_laws(root, paths):
    """Yield each law with the fields that it read of these dumps."""
    array, fact = RecordedCall.array, RecordedCall.fact
    for law in LAWS:
        names = set()

        def traced(self, *asked, names=names):
            names.update(asked)
            return array(self, *asked)

        def told(self, name, names=names):
            names.add(name)
            return fact(self, name)

        calls = [RecordedCall.read(str(root / path)) for path in paths]
        for call in calls:
            call.root = root
            call.record = _Traced(call.record, names)  # type: ignore[assignment]
        with patch.object(RecordedCall, "array", traced), patch.object(RecordedCall, "fact", told):
            for judged in [calls] if law.over_calls else calls:
                law.judge(judged, Answer(law))
        yield law.name, names
