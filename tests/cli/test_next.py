"""`next:` leads somewhere: from each starting point, the commands that answers name are taken, and end. No worker starts.

A replay is made up: its results follow from its configuration and from a fault that is planted there, or not.
"""

import json
import shlex
from dataclasses import replace

import docpages
import pytest
from amounts import WHOLE
from commandline import in_json, invoke, run_here, tried
from comparecases import write_replay
from replaycallers import callers
from replaycases import old_pickle
from stepcases import RecordedRun

from actordbg.api import reducing
from actordbg.campaign import run_matrix
from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.compare import find_truth
from actordbg.dumps.create import create_dumps
from actordbg.dumps.packing import pack_dumps
from actordbg.formats.dump_record import LOSS, now_timestamp
from actordbg.formats.ringfile import SUFFIX as RING, place
from actordbg.judge import check
from actordbg.recorded.lint import lint as linted
from actordbg.records.journal import SPEC
from actordbg.reduce.case import DIFFERENCE, FaultCase
from actordbg.reduce.handover import Script
from actordbg.reduce.reduction import Reduction
from actordbg.reduce.trials import Fingerprint
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import COMPLETE, ReplayOutcome
from actordbg.store.layout import Store
from actordbg.store.places import read_record

MOST = 10
"""Commands in which a walk has to end: a circle has no end."""
USERS_TURN = ("YOUR_MODEL", "actordbg demo", "python -I ", "pip install")
"""What only the user can do, or takes minutes."""
FAULTS = {
    "right": lambda spec: {},
    "a law under packing": lambda spec: {"law": "broken"} if spec.config.packing else {},
    "a law": lambda spec: {"law": "broken"},
    "log-probs": lambda spec: {"off": 0.1},
    "failed": lambda spec: {"status": "failed", "error_class": "ValueError", "error": "no such thing"},
    "not checked": lambda spec: {"off": None},
}


def made_up(fault):
    """A `run_replay` with a planted fault; a truth has none."""

    def run_replay(store, spec, *_, **__):
        planted = {} if spec.config.truth else FAULTS[fault](spec)
        off, law = planted.pop("off", 0.0), planted.pop("law", "kept")
        extra = {"temperature": 1.0, "laws": [{"law": "neighbour", "verdict": law, "words": f"neighbour {law}"}]}
        if spec.locate:
            identity = {"looked_at": 116, "differences": [], "unchecked": [], "rank": 0, "ran": True}
            located = {"places": 49, "wrong": [], "count": 0, "unchecked": [], "dtype": "bfloat16"}
            extra |= {"identity": [identity], "located": located}
        settings = vars(spec.config) | {"dtype": spec.config.dtype or "fp32"}
        write_replay(
            store, spec.replay_id, spec.inputs, versions=spec.versions, command=spec.command, **settings,
            change=lambda index, made: None if off is None else made | {"log_probs": made["log_probs"] + off},
            result=lambda index: {"extra": extra, "forward_s": 0.1, "folded_ids": False, **planted},
            resolved={"backward": bool(spec.config.backward)},
        )  # fmt: skip
        folder = store.replays / spec.replay_id
        (folder / SPEC).write_text(spec.to_json())
        outcome = ReplayOutcome(spec.replay_id, folder, COMPLETE, len(spec.inputs))
        data = data_of(store, spec)
        outcome.resolved, outcome.results = data.resolved, {result.dump_id: result for result in data.results}
        return outcome

    return run_replay


@pytest.fixture
def planted(monkeypatch):
    """Make replays up, with this fault; and reductions, which find it."""

    def plant(fault):
        for module in callers():
            monkeypatch.setattr(module, "run_replay", made_up(fault))
        monkeypatch.setattr("actordbg.replay.supervise.run_replay", made_up(fault))
        for function in (check.run_check, find_truth.ensure_lone_rows):
            monkeypatch.setitem(function.__kwdefaults__, "run", made_up(fault))
        monkeypatch.setattr(run_matrix, "run_trials", lambda trials, warm: [trial.run(warm) for trial in trials])
        case = FaultCase(DIFFERENCE, rows=((3, 4, 5),), config={"model_type": "llama"})
        found = Reduction("R", "2026-01-01T00:00:00.000000Z", Fingerprint(DIFFERENCE, "x"), case, "", 1, 1.0, True, True, True)
        monkeypatch.setattr(reducing, "reduced", lambda *what: found)
        monkeypatch.setattr(reducing, "known_or_reduced", lambda *what: found)
        monkeypatch.setattr(reducing, "script_of", lambda *what: Script("print()", "row 0: WRONG"))

    return plant


def walk(store, first):
    """The commands from the first one, with --store typed, to where `next:` ends; each is accepted as it is shown."""
    typed = f"actordbg --store {store.root} "
    walked, following = list[str](), first.replace("actordbg ", typed)
    while following and not any(words in following.replace(typed, "actordbg ") for words in USERS_TURN):
        assert len(walked) < MOST, f"`next:` has no end: {walked}"
        walked.append(following)
        (words,) = docpages.invocations(following)
        docpages.parse(words)
        assert following.startswith(typed), following
        done = run_here(*words, "--json")
        if getattr(done.exception, "exit_code", 0) == 3:  # what another user wrote: somebody at a terminal is asked, and agrees
            done = run_here(*words, "--json", "--yes")
        code = getattr(done.exception, "exit_code", done.exit_code)
        assert code in ((0, 1, 5) if len(walked) == 1 else (0, 1)), (walked, done.output, done.exception)
        answer = json.loads(done.stdout) if done.stdout else {}
        if isinstance(answer, list):  # rows: their text names the command
            done = run_here(*words)
            answer = {"next": done.stderr.rpartition("next: ")[2].strip() if "next: " in done.stderr else ""}
        following = answer.get("next", "")
    for words in docpages.invocations(following):
        docpages.parse(words)
    return [command.replace(typed, "actordbg ") for command in (*walked, following)]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 512}')
    return folder


@pytest.mark.parametrize("first", ["doctor --quick", "actor init", "status", "dump status", "report", "report --all", "dump ls"])
@pytest.mark.parametrize("made", [False, True])
def test_from_an_empty_machine_and_an_empty_store(tmp_path, planted, first, made, monkeypatch):
    planted("right")
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "store")
    if made or not first.startswith(("doctor", "actor")):
        store.create()
    walk(store, f"actordbg {first}")


FIRST = (
    "check --packing --model MODEL", "check --packing", "replay --all --packing --model MODEL", "locate --packing",
    "matrix --attn sdpa,eager --packing both --compile off --model MODEL", "lint", "noise --packing",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, fault",
    [
        (first, fault)
        for at, first in enumerate(FIRST)
        for fault in FAULTS
        if WHOLE or at == 0 or fault == (*FAULTS,)[at % 2]
        if fault != "not checked" or not first.startswith(("replay", "noise"))
    ],
)
def test_from_recorded_dumps_whatever_is_wrong(store, tmp_path, model, planted, fault, first, monkeypatch):
    planted(fault)
    monkeypatch.chdir(tmp_path)
    create_dumps(store, 3, seq_len=16, vocab_size=400)
    walked = walk(store, f"actordbg {first.replace('MODEL', shlex.quote(str(model)))}")
    assert "--all" not in " ".join(walked[1:]), "nothing leads to a replay of everything"
    if first.startswith("check") and fault not in ("right", "not checked"):
        assert walked[-1].startswith("python -I "), "the fault ends as a script"
    if first.startswith("check") and fault == "a law under packing":
        assert any("--no-packing" in command for command in walked), "what decides is tried"
    if fault == "right" and "MODEL" not in first:
        assert walked[-1] == "actordbg check --model YOUR_MODEL", walked


@pytest.mark.parametrize("options", ["--backend deepspeed --nproc 2", "--backend fsdp2 --ring 2 --nproc 2 --packing"])
def test_numbers_of_several_processes_are_asked_of_one_and_not_of_a_script(store, model, planted, monkeypatch, options):
    monkeypatch.setitem(FAULTS, "several", lambda spec: {"off": 0.1, "law": "broken"} if spec.config.nproc > 1 else {})
    planted("several")
    create_dumps(store, 3, seq_len=16, vocab_size=400)
    walked = " ".join(walk(store, f"actordbg check {options} --model {shlex.quote(str(model))}"))
    assert "--backend plain" in walked and "reduce" not in walked


def test_a_right_check_does_not_lead_to_the_fault_of_another_model(store, model, planted):
    planted("a law under packing")
    create_dumps(store, 1, seq_len=16, vocab_size=400)
    invoke(store, "check --packing")
    assert "matrix" in in_json(store, "check --model", str(model))["next"]


def test_from_old_pickles_and_from_a_bundle(tmp_path, planted, monkeypatch):
    planted("a law")
    monkeypatch.chdir(tmp_path)
    old_pickle(tmp_path / "pickles")
    store = Store(tmp_path / "store")
    walked = walk(store, "actordbg dump import pickles")
    assert len(walked) > 3, walked
    for words in (["bundle", "last", "-o", "case.tar.zst"], ["bundle", "--where", "rank=0", "-o", "dumps.tar.zst"]):
        assert invoke(store, *words).exit_code == 0
        name = words[-1].partition(".")[0]
        walked = walk(Store(tmp_path / f"store-{name}"), f"actordbg dump import {words[-1]}")
        assert len(walked) > 2, walked


def losses_alone(store):
    RecordedRun(store, store.root).write()
    for path in store.iter_dumps():
        if read_record(path).point != LOSS:
            path.unlink()


def in_packs(store):
    create_dumps(store, 3, seq_len=16, vocab_size=400)
    pack_dumps(store)


def losses_in_packs(store):
    losses_alone(store)
    pack_dumps(store, "point = 'loss'")


def kept_in(folder, name):
    def keep(store):
        path = store.root / folder / "r" / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")

    return keep


def ring_of_the_dead(store):
    folder = place(store)
    folder.mkdir(parents=True)
    (folder / f"h-1-2{RING}").write_bytes(b"")


@pytest.mark.parametrize(
    "holds, only, reader",
    [
        (lambda store: None, "", ""),
        (lambda store: create_dumps(store, 1, seq_len=8), "", "lint"),
        (in_packs, "", "lint"),
        (losses_alone, "4 losses", "lint"),
        (losses_in_packs, "4 losses", "lint"),
        (kept_in("turns", "h-1-0.json"), "turns", "turns"),
        (kept_in("syncs", "0-h-1-0.json"), "transfers of weights", "weights"),
        (ring_of_the_dead, "1 flight recorder file of dead processes", "dump recover"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)  # fmt: skip
def test_a_store_without_forwards_says_what_it_holds_and_which_command_reads_it(store, holds, only, reader):
    write_control(store, Control(enabled=True, run="ppo", since=now_timestamp()))
    holds(store)
    stopped = invoke(store, "dump disable").stderr
    assert ("next: actordbg dump ls" in stopped) == (reader == "lint")
    if not only:
        return
    listed = tried(store, "dump ls")
    assert f"only {only}" in listed.stdout and f"next: actordbg {reader}\n" in listed.stderr
    summary = invoke(store, "status")
    assert f"only        {only}: `actordbg {reader}`" in summary.stdout and f"next: actordbg {reader}\n" in summary.stderr
    judged = linted(store.root, [store.relative(path) for path in store.iter_dumps()])
    assert not replace(judged, outcomes=[]).verdict().next, "a check reads no loss alone"
    for command in ("check", "replay", "lint"):
        nothing = tried(store, command).exception
        assert command == reader or (f"only {only}" in nothing.message and f"`actordbg {reader}`" in nothing.hint), command
