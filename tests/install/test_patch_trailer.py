"""The trailer as bytes: what it appends, what it gives back, what it refuses; and that the text it appends is harmless."""

import sys

import pytest
from hypothesis import given, settings, strategies as st
from patchkit import ACTOR, HANDLER, SIGNALLED, stand_in
from roots import run_program
from runkit import clean_environment

from actordbg.base.errors import Conflict, Unsupported
from actordbg.install import trailer
from actordbg.install.trailer import State

STORE = "/data/store"
ODD_FILES = {
    "as installed": ACTOR,
    "no final newline": ACTOR.rstrip(b"\n"),
    "ends in a comment with a backslash": ACTOR + b"# the end \\",
    "ends in blanks": ACTOR + b"        ",
    "ends inside an indented block": ACTOR + b"if True:\n    if True:\n        x = 1\n        ",
    "non-ASCII": "# 演员\n".encode() + ACTOR + "# né".encode(),
    "latin-1 with a cookie": b"# -*- coding: latin-1 -*-\nname = '\xe9'\n" + ACTOR,
    "tabs": ACTOR.replace(b"    ", b"\t"),
    "Actor under if and try": b"try:\n    if 1:\n"
    + b"".join(b"        " + line + b"\n" for line in ACTOR.splitlines())
    + b"finally:\n    pass\n",
    "future import": b"from __future__ import annotations\n" + ACTOR,
    "marker inside a line": ACTOR + b"x = '" + trailer.BEGIN.encode() + b"'\n",
}
UNSUPPORTED = {
    "empty": (b"", "no class Actor"),
    "no Actor": (b"class Critic:\n    def forward(self): ...\n", "no class Actor"),
    "inherited forward": (b"class Actor(dict):\n    pass\n", "no method forward"),
    "Actor of a game": (b"class Actor:\n    def forward(self, obs): ...\n", r"takes \(self, obs\)"),
    "later Actor without forward": (ACTOR + b"class Actor:\n    pass\n", "no method forward"),
    "open string": (ACTOR + b"x = '''", "not Python source"),
    "NUL": (ACTOR + b"\0", "not Python source"),
    "wrong encoding": (ACTOR + b"x = '\xe9'\n", "not Python source"),
    "deep nesting": (ACTOR + b"x = " + b"(" * 5000 + b")" * 5000 + b"\n", "not Python source"),
}


@pytest.mark.parametrize("source", ODD_FILES.values(), ids=ODD_FILES)
def test_any_supported_file_comes_back_to_the_byte(source):
    patched = trailer.append(source, STORE, mtime_ns=1)
    assert patched.startswith(source)
    assert trailer.inspect(source).state is State.CLEAN
    assert trailer.inspect(patched).state is State.PATCHED
    assert trailer.inspect(patched).source == source


@pytest.mark.parametrize("source, reason", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_file_without_an_actor_to_patch_is_unsupported_with_the_reason(source, reason):
    found = trailer.inspect(source)
    assert found.state is State.UNSUPPORTED
    with pytest.raises(Unsupported, match=reason):
        trailer.append(source, STORE)


def test_the_trailer_is_small_ascii_and_in_the_newlines_of_the_file():
    for newline in (b"\n", b"\r\n", b"\r"):
        source = ACTOR.replace(b"\n", newline)
        added = trailer.append(source, "/é/'quoted\"/\udc80").removeprefix(source)
        assert added.isascii() and len(added) < 1500
        assert added.replace(newline, b"").count(b"\n") + added.replace(newline, b"").count(b"\r") == 0
        assert added.endswith(newline)


def test_a_store_named_like_the_trailers_own_fields_is_only_a_name():
    for store in (f"/{'0' * 64}", '/"check": "' + "0" * 64 + '"', f"/\n{trailer.BEGIN}\n{trailer.END}", "/{store}/{}"):
        found = trailer.inspect(trailer.append(ACTOR, store))
        assert found.state is State.PATCHED and found.trailer.store == store


def test_an_encoding_that_would_read_the_trailer_differently_is_unsupported():
    """In UTF-7 the text `+AGE-` is the letter a: the hook would capture into another store than it says."""
    source = b"# coding: utf-7\n" + ACTOR
    assert trailer.inspect(trailer.append(source, "/data/plain")).source == source
    with pytest.raises(Unsupported, match="would not work in this file"):
        trailer.append(source, "/data/+AGE-")


def test_lines_added_right_before_the_trailer_are_kept():
    patched = trailer.append(ACTOR, STORE)
    place = patched.index(trailer.BEGIN.encode())
    edited = patched[:place] + b"mine = 1\n" + patched[place:]
    assert trailer.inspect(edited).source == ACTOR + b"\nmine = 1\n"


@pytest.mark.parametrize(
    "damage, reason",
    {
        "text after": (lambda p: p + b"mine = 1\n", "text after"),
        "code edited": (lambda p: p.replace(b"import install", b"import installer"), "itself was edited"),
        "header gone": (lambda p: p.replace(b"# {", b"# ["), "second line was edited"),
        "cut short": (lambda p: p[:-40], "itself was edited"),
        "first line gone": (lambda p: p.replace(trailer.BEGIN.encode(), b"#"), "0 first lines"),
        "two trailers": (lambda p: p + p[len(ACTOR) :], "2 first lines"),
        "newer format": (lambda p: p.replace(b'"format": 1', b'"format": 2'), "format 2"),
    }.values(),
)  # fmt: skip
def test_a_damaged_trailer_is_never_cut_by_guesswork(damage, reason):  # type: ignore[no-untyped-def]
    damaged = damage(trailer.append(ACTOR, STORE))
    found = trailer.inspect(damaged)
    assert found.state is State.EDITED and found.source is None and reason in found.reason
    assert "lines" in trailer.remedy(damaged)
    with pytest.raises(Conflict):
        trailer.append(damaged, STORE)


def _sources():
    """Valid Python around an Actor: any comments and strings, any newlines, with or without mark and final newline."""
    words = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\r\n\0\x1a"), max_size=30)
    line = st.one_of(
        words.map(lambda text: f"# {text}"),
        words.map(lambda text: f"x = {text!r}"),
        words.map(lambda text: f"def f():  # {text}\n    return {text!r}"),
        st.sampled_from(["", "   ", "\f", "if 1:\n    pass", "x = (1,\n     2)", "x = '''a\nb'''", f"  {trailer.BEGIN}"]),
    )
    lines = st.lists(line, max_size=8)
    return st.builds(
        lambda before, after, newline, mark, final: (
            (b"\xef\xbb\xbf" if mark else b"")
            + ("\n".join([*before, ACTOR.decode(), *after]) + "\n" * final).replace("\n", newline).encode()
        ),
        lines, lines, st.sampled_from(["\n", "\r\n", "\r"]), st.booleans(), st.integers(0, 3),
    )  # fmt: skip


@settings(max_examples=100)
@given(source=_sources(), store=st.text(min_size=1, max_size=40))
def test_round_trip_for_any_valid_source_and_any_store_path(source, store):
    patched = trailer.append(source, store)
    found = trailer.inspect(patched)
    assert found.state is State.PATCHED and found.trailer.store == store
    assert trailer.inspect(patched).source == source


@settings(max_examples=200)
@given(data=st.data())
def test_whatever_changes_in_a_patched_file_nothing_of_the_user_is_lost(data):
    source = data.draw(st.sampled_from([ACTOR, ACTOR.rstrip(b"\n"), ACTOR.replace(b"\n", b"\r\n")]))
    patched = trailer.append(source, STORE)
    at = data.draw(st.integers(0, len(patched)))
    gone = data.draw(st.integers(0, 3))
    new = data.draw(st.binary(max_size=3))
    changed = patched[:at] + new + patched[at + gone :]
    if changed == patched:
        return
    begin = changed.find(trailer.BEGIN.encode())
    kept = trailer.inspect(changed).source
    if kept is None or trailer.inspect(changed).trailer is None:
        return
    assert changed.startswith(kept), "what is kept is the file's beginning, unchanged"
    assert changed[len(kept) : begin].strip(b"\r\n") == b"", "and all of it up to the trailer"
    assert changed[begin:] == patched[patched.index(trailer.BEGIN.encode()) :], "and only a whole trailer was cut"


HOOKS = {
    "absent": None,
    "other signature": "def install(): ...",
    "panics": "class Panic(BaseException): ...\nraise Panic",
    "unprintable": "class E(Exception):\n    def __str__(self): raise ValueError\ndef install(cls, *, store): raise E",
}
RUNNER = """
import sys
sys.path[:0] = sys.argv[1:2]
scope = {"__name__": "openrlhf.models.actor"}
exec(compile(open(sys.argv[2], "rb").read(), sys.argv[2], "exec"), scope)
assert scope["Actor"]().forward(7) == 7
print(sorted(name for name in scope if not name.startswith("__")), ascii(getattr(scope["Actor"], "store", None)))
"""


def _run(tmp_path, hook, store=STORE, **environment):
    """Run a patched file in a Python without site-packages, with an actordbg whose hook.py is `hook` (None: without any)."""
    (tmp_path / "actor.py").write_bytes(trailer.append(ACTOR, store))
    (tmp_path / "path").mkdir()
    if hook is not None:
        stand_in(tmp_path / "path", hook)
    command = [sys.executable, "-S", "-c", RUNNER, str(tmp_path / "path"), str(tmp_path / "actor.py")]
    return run_program(command, env=clean_environment(**environment), cwd=tmp_path / "path", timeout=60)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_training_runs_on_whatever_happens_to_actordbg(tmp_path, hook):
    done = _run(tmp_path, hook)
    assert (done.returncode, done.stdout) == (0, "['Actor'] None\n") and done.stderr.count("\n") <= 1, done.stderr
    if hook is None:
        assert done.stderr == "actordbg: not capturing: ModuleNotFoundError: No module named 'actordbg'\n"


@pytest.mark.parametrize("error", SIGNALLED)
def test_what_a_signal_handler_of_the_job_raises_passes(tmp_path, error):
    done = _run(tmp_path, HANDLER.format(error=error))
    assert done.returncode and "not capturing" not in done.stderr and done.stderr.splitlines()[-1].endswith("over")


ODD_STORE = '/it\'s/a "path"/演员/line\nbreak/\\n/undecodable/\udc80'


@pytest.mark.parametrize(
    "environment, told",
    [({}, ODD_STORE), ({"ACTORDBG_STORE": "/other"}, "/other"), ({"ACTORDBG_DISABLE": "1"}, None)],
    ids=["as named", "the environment's", "disabled"],
)
def test_the_hook_gets_the_store_as_it_was_named_or_overridden_and_none_where_disabled(tmp_path, environment, told):
    done = _run(tmp_path, "def install(cls, *, store): cls.store = store", ODD_STORE, **environment)
    assert (done.stdout, done.stderr) == (f"['Actor'] {told!a}\n", "")
