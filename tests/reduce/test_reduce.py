"""`actordbg reduce` and `repro`: what is the same fault, what is smaller, and a script that runs without actordbg."""

import ast
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import codedmodel
import pytest
from amounts import first_or_all
from commandline import invoke, run_here
from comparecases import write_replay
from ownercases import give_away
from replaycases import publish
from roots import json_of, run_program, write_json
from test_gates import loads_that_may_ask, starts_with_our_input
from victims import wait_for

from actordbg.actor.family_models import FAMILIES
from actordbg.api import reducing
from actordbg.api.client import Client
from actordbg.api.desk import Desk
from actordbg.base.errors import BadResult, CorruptDump, LaunchProblem, Refused, UnsafeInput, UsageError
from actordbg.base.foreign_text import in_lines
from actordbg.base.processes import read_stat
from actordbg.compare.comparing import compare, save
from actordbg.config.replay_config import ReplayConfig
from actordbg.config.sources import Settings
from actordbg.records.comparison_record import MISMATCH, DumpComparison, Figures
from actordbg.records.replay_record import ResultRecord
from actordbg.reduce import handover, reduction, suspects, templates, trials as running
from actordbg.reduce.case import (
    ALONE,
    CRASH,
    DIFFERENCE,
    ERROR,
    GRADIENT,
    HANG,
    PACKED,
    PADDED,
    RERUN,
    SEVERAL,
    TRAINER,
    FaultCase,
    clean_config,
    drawn,
    normalized,
)  # fmt: skip
from actordbg.reduce.handover import Script, issue_text, script_of, title_of
from actordbg.reduce.reduction import Reduction, _in_words
from actordbg.reduce.script import _build, _flat, _main, in_a_folder, render
from actordbg.reduce.shrink import Shrinker, ddmin, least
from actordbg.reduce.suspects import Checks
from actordbg.reduce.trial_host import RETURNED, _attempt, _without_folder
from actordbg.reduce.trials import Ending, Fingerprint, OutOfBudget, Trials, _of_failure, fingerprint_of
from actordbg.replay.supervise import spec_and_owner

LLAMA = FAMILIES["llama3"].config | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
CASE = FaultCase(DIFFERENCE, rows=drawn((20, 14, 16), 256), config=dict(LLAMA), layout=PACKED)
FINGERPRINT = Fingerprint(DIFFERENCE, "row 1 depends on row 0", laws=("neighbour",), behind=True)


@pytest.mark.parametrize("wanted, items", [({7}, 16), ({0, 15}, 16), ({3, 4, 9}, 31), (set(range(5)), 5)])
def test_delta_debugging_leaves_only_what_is_needed(wanted, items):
    assert ddmin(range(items), lambda kept: wanted <= set(kept)) == sorted(wanted)


def test_bisection_finds_the_least_number():
    assert [least(1, 100, lambda n, at=at: n >= at) for at in (1, 23, 100)] == [1, 23, 100]


class Simulated(Trials):
    """Trials whose endings a function of the case gives."""

    def __init__(self, folder, ends, most=500):
        super().__init__(folder, most=most)
        self._ends, self.run = ends, 0

    def _answer(self, request):
        self.run += 1
        return vars(self._ends(self.case))

    def ending(self, case, *, again=False):
        self.case = case
        return super().ending(case, again=again)


def leaking(case):
    """Row 1 and later are wrong where rows are packed, have token 255 in front of them, and the model has two layers or more."""
    if case.layout == PADDED:
        return Ending(running.RAISED, error_class="ValueError", error="no padding")
    shown = case.layout == PACKED and any(255 in row for row in case.rows[:-1]) and (case.depth or 0) >= 2
    return Ending(running.RETURNED, (0.0, *[1.0 if shown else 0.0 for _ in case.rows[1:]]))


def test_a_case_shrinks_to_what_shows_its_fingerprint(tmp_path):
    rows = (CASE.rows[0][:9] + (255,) + CASE.rows[0][9:], *CASE.rows[1:])
    start = replace(CASE, rows=rows, dtype="bf16", attn="eager", temperature=0.7)
    with Simulated(tmp_path, leaking) as trials:
        shrinker = Shrinker(trials, FINGERPRINT, start)
        shrinker.run()
        best = shrinker.best
    assert best.layout == PACKED and len(best.rows) == 2 and 255 in best.rows[0] and max(map(len, best.rows)) == 2
    assert (best.depth, best.dtype, best.attn, best.temperature, best.synthetic) == (2, "fp32", "sdpa", 1.0, False)
    assert all(FINGERPRINT.shown_by(case, leaking(case)) for case in shrinker.accepted)


def test_a_stopped_reduction_continues_and_repeats_no_trial(tmp_path, monkeypatch):
    with Simulated(tmp_path, leaking, most=6) as trials:
        first = Shrinker(trials, replace(FINGERPRINT, behind=False), replace(CASE, rows=((255, 1, 2), (3, 4))))
        with pytest.raises(OutOfBudget):
            first.run()
        assert trials.run == 6
    with Simulated(tmp_path, leaking) as trials:
        again = Shrinker(trials, replace(FINGERPRINT, behind=False), replace(CASE, rows=((255, 1, 2), (3, 4))))
        again.run()
        known, ran = trials.known, trials.run
    assert ran == known - 6 and again.best.tokens <= first.best.tokens
    with (tmp_path / running.JOURNAL).open("a") as journal:
        journal.write('{"event": "trial"}\n')
    with Simulated(tmp_path, leaking) as trials:
        trials.ending(again.best)
        assert trials.run == 0
    monkeypatch.setattr(running, "versions_of", lambda model: {"torch": "another"})
    with Simulated(tmp_path, leaking) as trials:
        trials.ending(again.best)
        assert trials.run == 1
        assert trials.ending(again.best, again=True) == leaking(again.best) and trials.run == 2


def test_a_trial_of_a_checkpoint_runs_again_once_its_files_changed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (journal := tmp_path / "journal").mkdir()
    case = replace(CASE, config=None, checkpoint=str(tmp_path))
    for content, ran in (("a", 1), ("a", 0), ("b", 1)):
        (tmp_path / "model.safetensors").write_text(content)
        os.utime(tmp_path / "model.safetensors", (7, 7))
        with Simulated(journal, leaking) as trials:
            trials.ending(case)
            assert trials.run == ran


@pytest.mark.parametrize("program", ["true", "false"])
def test_a_host_of_trials_that_ends_at_once_is_said(program, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which(program))
    with pytest.raises(LaunchProblem, match="exit code"), Trials(tmp_path) as trials:
        trials.ending(CASE)


def test_a_smaller_case_with_another_fault_is_set_aside(tmp_path):
    def ends(case):
        few = Ending(running.RAISED, error_class="IndexError", error="row 0 of 4")
        return few if case.tokens < 12 else Ending(running.RETURNED, (1.0,) * len(case.rows))

    with Simulated(tmp_path, ends) as trials:
        shrinker = Shrinker(trials, replace(FINGERPRINT, behind=False), CASE)
        shrinker.run()
    assert shrinker.best.tokens == 12 and "IndexError: row 0 of 4" in shrinker.aside


def test_the_same_fault_is_the_same_error_law_or_module():
    error = Fingerprint(ERROR, "", error_class="RuntimeError", error=normalized("size 12 of /a/b/c.py\nmore"))
    raised = Ending(running.RAISED, error_class="RuntimeError", error="size 7 of /x/y.py\nmore")
    assert error.shown_by(CASE, raised) and not error.shown_by(CASE, replace(raised, error="size 7 of /x/y.py\nless"))
    assert not FINGERPRINT.shown_by(CASE, Ending(running.RETURNED, (1.0, 1.0))), "the first row is wrong too"
    assert FINGERPRINT.shown_by(CASE, Ending(running.RETURNED, (0.0, None))), "a log-prob that is not finite"
    assert FINGERPRINT.matches(replace(FINGERPRINT, laws=("alone", "neighbour"))) and not FINGERPRINT.matches(
        replace(FINGERPRINT, laws=())
    )
    place = Fingerprint(DIFFERENCE, "", module="model.layers.N.mlp", cause="out")
    assert (
        place.matches(replace(place, said="x"))
        and not place.matches(replace(place, module="lm_head"))
        and not place.matches(None)
    )


@pytest.mark.parametrize("far, kind", [(0.0, GRADIENT), (1.0, DIFFERENCE)])
def test_a_parameter_called_A_log_is_no_difference_of_log_probs(far, kind):
    name = "model.layers.0.mixer.A_log"
    reason = f"parameter_distance 0.9 is above 0.5 ({name})"
    tokens = Figures(9, max_abs=far)
    dump = DumpComparison("d", MISMATCH, (reason,), log_probs=tokens, parameter_distance=0.9, worst_parameter=name)
    record = mock.Mock(verdict=MISMATCH, dumps=(dump,), thresholds={"max_abs": 0.5}, furthest=None)
    found = fingerprint_of(mock.Mock(data=mock.Mock(results=()), local=None, comparison=record))
    assert found is not None and found.kind == kind


SCRIPTS = {
    "packed": CASE,
    "alone": replace(CASE, layout=ALONE),
    "padded": replace(CASE, layout=PADDED, left=(0, 3, 2), synthetic=True),
    "gradient": replace(CASE, kind=GRADIENT, temperature=0.7),
    "rerun": replace(CASE, kind=RERUN, cache=True),
    "error": replace(CASE, kind=ERROR, error_class="RuntimeError", error='it says "N"', compile="eager", borders=True),
    "crash": replace(CASE, kind=CRASH, error="SIGSEGV", backward=True, memory=2**40),
    "hang": replace(CASE, kind=HANG, processes=2, engine="fsdp2", timeout_s=20.0),
    "deepspeed": replace(CASE, kind=HANG, processes=2, engine="deepspeed", zero=3),
    "checkpoint": replace(CASE, config=None, checkpoint="meta-llama/Llama-3.1-8B", layers=2),
    "trainer": replace(CASE, through=TRAINER),
    "trainer, a hang": replace(CASE, kind=HANG, processes=2, through=TRAINER),
    "deepspeed, one process": replace(CASE, layout=ALONE, dtype="bf16", engine="deepspeed", zero=2),
}


def test_scripts_are_short_formatted_and_import_what_they_may(tmp_path):
    for name, case in SCRIPTS.items():
        text = render(
            case, 'a "title" of \\ it\n"""', versions="torch 2.13.0", weights=1.5 if case.checkpoint else None, private=True
        )
        (tmp_path / f"{name}.py").write_text(text)
        assert not [*starts_with_our_input(text), *loads_that_may_ask(text)], name
        assert (
            "actordbg" not in text
            and ("deepspeed" in text) == ("deepspeed" in name)
            and ("openrlhf" in text) == ("trainer" in name)
        )
        assert len(text.splitlines()) < 120 or case.through == TRAINER or case.kind in SEVERAL, name
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--diff"], ["check"]):
        ran = run_program([*ruff, *words, "--isolated", str(tmp_path)])
        assert ran.returncode == 0, ran.stdout


def test_a_script_leaves_what_a_checkpoint_keeps_in_fp32(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    names = {"torch": torch, "AutoModelForCausalLM": LlamaForCausalLM, "MODEL": str(tmp_path)}
    exec(_build(replace(CASE, config=None, checkpoint=str(tmp_path), dtype="bf16"), None), names)
    mine, right = (names["build"]("eager", dtype) for dtype in (torch.bfloat16, torch.float32))
    assert {model.model.rotary_emb.inv_freq.dtype for model in (mine, right)} == {torch.float32}
    assert (mine.lm_head.weight.dtype, right.lm_head.weight.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "eval"},
        {"config": {"auto_map": {}}},
        {"config": {"a": {"auto_map": {}}}},
        {"config": LLAMA | {"auto_map": {}}},
        {"config": LLAMA | {"hidden_act": '"""\nimport pwned'}},
        {"config": LLAMA | {"rope_parameters": {"rope_type": "default", "auto_map": {}}}},
        {"config": {"model_type": "own-llama", "vocab_size": 2}},
        {"attn": "some/kernel"},
        {"rows": ()},
        {"processes": 0},
        {"processes": 2},
    ],
)
def test_a_case_from_a_file_cannot_bring_code(bad):
    assert FaultCase.from_json(CASE.to_json()) == CASE
    with pytest.raises(CorruptDump):
        FaultCase.from_json(json.dumps(json.loads(CASE.to_json()) | bad))


@pytest.mark.parametrize(
    "same, answer",
    [("0001", (3, True)), ("1110", (2, True)), ("1000", (0, True)), ("0000", (0, False)), ("0", (0, False)), ("1", (0, True))],
)
def test_a_case_is_checked_only_if_a_replay_matches(same, answer):
    cases = [replace(CASE, timeout_s=float(number)) for number in range(len(same))]
    matching = [FINGERPRINT if sign == "1" else None for sign in same]
    index, unchecked = reduction._checked(
        mock.Mock(of_case=lambda case, wanted: matching[int(case.timeout_s)]), FINGERPRINT, cases
    )
    assert (index, not unchecked) == answer


@pytest.mark.parametrize(
    "kind, codes, exit_code",
    [
        (CRASH, [0, -11], 1), (CRASH, [-9, 0], 2), (CRASH, [None, 1], 2), (CRASH, [0, 0], 0),
        (HANG, [None, 0], 1), (HANG, [None, 1], 2), (HANG, [None, -11], 2), (HANG, [0, 0], 0),
    ],
)  # fmt: skip
def test_a_script_exits_with_1_for_its_own_fault_only(kind, codes, exit_code):
    names = {"sys": sys, "signal": signal, "SIGNAL": "SIGSEGV"}
    exec(_main(replace(CASE, kind=kind, error="SIGSEGV")), names)
    names["endings"] = lambda: codes
    assert names["main"]() == exit_code


@pytest.mark.parametrize(
    "raised, shown",
    [
        (AssertionError(""), True), (AssertionError("x"), False), (ValueError(""), False),
        (type("Fp8Error", (Exception,), {})(f"size 7 of /a/b.py\nrow {'2' * 200}"), True), (KeyError("/a/b"), True),
    ],
)  # fmt: skip
def test_a_script_compares_errors_as_trials_do(raised, shown):
    wanted = raised if shown else AssertionError("")
    case = replace(CASE, kind=ERROR, error_class=type(wanted).__name__, error=normalized(str(wanted)))
    lines = [line for line in render(case, "").splitlines() if line.startswith(("PATHS =", "ERROR ="))]

    def attempt():
        raise raised

    names = {"re": re, "attempt": attempt}
    exec("\n".join([*lines, templates.MAIN_ERROR]), names)
    with contextlib.nullcontext() if shown else pytest.raises(type(raised)):
        assert names["main"]() == 1


def test_a_script_without_its_packages_exits_with_2(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for case in SCRIPTS.values():
        text = render(case, "", private=True)
        with pytest.raises(SystemExit) as ended:
            exec(text, {"__name__": "__main__"})
        assert ended.value.code == 2
    assert _attempt(text)["error_class"] == "ModuleNotFoundError"


@pytest.mark.parametrize("ran, good", [((1, "row 0: WRONG"), True), ((1, "ImportError: x"), False), ((0, "right"), False)])
def test_a_script_is_handed_over_only_if_it_shows_the_fault(ran, good, monkeypatch):
    monkeypatch.setattr(handover, "run_fresh", lambda *what: ran)
    with contextlib.nullcontext() if good else pytest.raises(BadResult, match="fresh interpreter"):
        assert script_of(reduced(FINGERPRINT, CASE)).output == ran[1]


def test_what_a_script_cannot_show_is_not_its_start(store, tmp_path, monkeypatch):
    """Several processes are for crashes and hangs; a hub name is not a folder, a relative one is found from anywhere."""
    config = ReplayConfig(model="org/model", nproc=2, backend="deepspeed", zero_stage=3)
    tensors, ran = suspects.dump_of(CASE)[1], {"vocab_size": 256}
    for kind, stack in {DIFFERENCE: (1, ""), ERROR: (1, ""), HANG: (2, "deepspeed")}.items():
        case = suspects._case(mock.Mock(store=store, config=config), Fingerprint(kind, ""), tensors, ran)
        assert (case.processes, case.engine) == stack
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    checks = mock.Mock(store=store, config=replace(config, model="./mine"))
    assert suspects._case(checks, Fingerprint(DIFFERENCE, ""), tensors, ran).checkpoint == str(tmp_path / "mine")
    names = {"gpt2": False, "org/model": False, "/a/b": True, "a/b/c": True, str(store.root): True}
    assert {name: in_a_folder(replace(CASE, config=None, checkpoint=name)) for name in names} == names
    assert eval(_flat([math.inf, -math.inf, 1.5])) == [math.inf, -math.inf, 1.5]


def test_the_dump_that_a_comparison_names_is_checked_first(store):
    replay = "20260101T000000-aaaaaa"
    write_replay(store, replay, publish(store, 5))
    spec = spec_and_owner(store, replay)[0]
    for item in spec.inputs:
        assert suspects._candidates(store, spec, {item.dump_id})[0] == item


def test_what_a_replay_and_its_comparison_say_needs_no_check(store):
    """The input that was judged module by module; else the one that is not the truth's is checked again, first of all."""
    items, replay = publish(store, 3), "20260101T000000-aaaaaa"
    place = {"module": "lm_head", "kind": "out", "what": "lm_head", "ratio": 4.0, "limit": 1.1, "rows": [0], "of_rows": 2}
    located = {"located": {"places": 49, "wrong": [place], "count": 1, "unchecked": [], "dtype": "bfloat16"}}
    checks = mock.Mock(store=store, config=ReplayConfig())
    checks.of.return_value = (FINGERPRINT, {})
    for judged in ({}, located):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(store.replays / replay)
        write_replay(
            store, replay, items, change=lambda index, made: made | {"log_probs": made["log_probs"] + (index == 1)},
            result=lambda index, judged=judged: {"extra": {"temperature": 1.0} | (judged if index == 2 else {})},
        )  # fmt: skip
        if not judged:
            write_replay(store, "20260101T000000-bbbbbb", items, truth="fp32")
            save(store, compare(store, replay, "20260101T000000-bbbbbb"))
        subject = reducing.subject_of(store, replay)
        suspect = next(suspects.suspects_of(store, checks, spec_and_owner(store, replay)[0], subject.compared, print))
        assert suspect[0].module == ("lm_head" if judged else "")
    assert [call.args[0].dump_id for call in checks.of.call_args_list] == [items[1].dump_id]


HOSTILE = (
    'x"""\nimport pwned\n"""',
    "x'\nimport pwned\n'",
    'x"\nimport pwned\n#',
    "\\",
    "deepspeed.x",
    '"',
    "\x1b[2J\0\u202e\ud800",
)
FIELDS = {
    "versions": lambda text: CASE,
    "title": lambda text: CASE,
    "checkpoint": lambda text: replace(SCRIPTS["checkpoint"], checkpoint=text),
    "error": lambda text: replace(SCRIPTS["error"], error_class=text, error=text),
    "signal": lambda text: replace(SCRIPTS["crash"], error=text),
}


@pytest.mark.parametrize("field", FIELDS)
def test_no_text_of_a_record_becomes_code_in_the_script(field):
    for text in HOSTILE:
        said = {"title": text if field == "title" else "t", "versions": text if field == "versions" else "torch 2"}
        script = render(FIELDS[field](text), private=False, **said)
        assert in_lines(script) == script and script.encode(), "it can be shown in a terminal, and written to a file"
        tree = ast.parse(script)
        imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        assert imported.isdisjoint({"pwned", "deepspeed"})


def test_no_path_of_this_machine_leaves():
    path = "/home/alice/acme-secret/ckpt"
    failed = ResultRecord("r", "d", "failed", error=f"{path} is not\na folder of 2", error_class="builtins.OSError")
    said = _of_failure(failed)
    assert said.said == "OSError: PATH is not a folder of 2" and said.error == "PATH is not a folder of N"
    assert Ending(running.RAISED, error_class="OSError", error=path).words == "OSError: PATH"
    assert [_without_folder(f"{path}/{name}") for name in ("train.py", "site-packages/torch/a.py")] == ["train.py", "torch/a.py"]


SECRETS = {
    "_name_or_path": "/home/alice/ckpt", "auto_map": {}, "attn_implementation": "org/kernel", "tokenizer": "~/x", "files": ["/a/b"],
    "api_key": "sk-1", "project": "acme", "id2label": {"0": "acme"}, "problem_type": "acme", "base": "C:\\Users\\alice", "acme": 3,
}  # fmt: skip


def test_of_a_configuration_only_what_changes_the_forward_leaves():
    """It is listed, so that a key that nobody thought of stays; a text under a known key is a plain word."""
    inner = {"rope_parameters": LLAMA["rope_parameters"] | SECRETS, "hidden_act": "~/x"}
    assert clean_config(LLAMA | SECRETS | inner) == LLAMA | {"hidden_act": None}
    whole = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "vocab_size": 2} | SECRETS} | SECRETS
    assert clean_config(whole) == {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "vocab_size": 2}}
    assert clean_config(SECRETS | {"model_type": "acme"}) == {}
    for name, family in FAMILIES.items():
        assert clean_config(family.config) == family.config, name


@pytest.mark.parametrize("path", ["/home/alice/acme", "~/acme", r"C:\Users\alice\acme", "'/home/alice smith/acme'"])
def test_no_path_of_an_error_or_a_title_leaves(path):
    assert normalized(f"no {path} there").replace("'", "") == "no PATH there"
    case = replace(SCRIPTS["checkpoint"], checkpoint=path.strip("'").replace("C:", "/C").replace("\\", "/"))
    assert "acme" not in title_of(reduced(FINGERPRINT, case)) and "acme" not in render(case, "t", private=True)


def test_a_reduction_of_another_user_runs_only_if_that_is_accepted(store, monkeypatch):
    """And one without a confirmed case, or with fields that are no longer known, is reduced again."""
    replay = "20260101T000000-aaaaaa"
    write_replay(store, replay, publish(store, 1))
    path, again = reduction.folder_of_reduction(store, replay) / reduction.RECORD, reduced(FINGERPRINT, CASE)
    unconfirmed = replace(again, confirmed=False).to_json()
    store.publish_text(path, again.to_json().replace('"layers"', '"revision": "", "layers"'))
    monkeypatch.setattr(reducing, "reduced", lambda *what: again)
    desk = Desk(store, Settings(store.root), Client(lambda *what, **more: None))
    assert reducing.known_or_reduced(desk, replay, 9, 9.0) is again
    store.publish_text(path, unconfirmed)
    assert reducing.known_or_reduced(desk, replay, 9, 9.0) is again
    give_away(path, monkeypatch)
    with pytest.raises(Refused, match="wrote reduction"):
        reducing.known_or_reduced(desk, replay, 9, 9.0)


def test_what_anothers_journal_says_of_a_trial_is_not_believed(tmp_path, monkeypatch):
    for expected in (1, 0, 1):
        with Simulated(tmp_path, leaking) as trials:
            trials.ending(CASE)
        assert trials.run == expected
        if not expected:
            give_away(tmp_path / running.JOURNAL, monkeypatch)


@pytest.mark.parametrize("words", [["reduce"], ["bundle"]])
@pytest.mark.parametrize("name", ["1**a", "0/../../*", "2["])
def test_a_name_is_a_name_and_no_pattern(words, name, store):
    (store.comparisons / "0").mkdir(parents=True)
    for path in (store.comparisons / "1xa.json", store.root / "outside.json"):
        path.write_text("{}")
    done = run_here("--store", store.root, *words, name)
    assert isinstance(done.exception, UsageError) and "no replay" in done.exception.message


@pytest.mark.parametrize("runs", ["repro", "trial"])
def test_a_checkpoint_that_ships_with_code_is_refused_whoever_wrote_the_case(runs, tmp_path, monkeypatch):
    """Nothing that loads it is started; if it changes afterwards, the script says itself that its code does not run."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "own", "auto_map": codedmodel.AUTO_MAP})
    case = replace(SCRIPTS["checkpoint"], checkpoint=str(folder))
    monkeypatch.setattr(subprocess, "run", lambda *what, **how: pytest.fail("it ran"))
    monkeypatch.setattr(subprocess, "Popen", lambda *what, **how: pytest.fail("it ran"))
    with pytest.raises(UnsafeInput), Trials(tmp_path) as trials:
        script_of(reduced(FINGERPRINT, case)) if runs == "repro" else trials.ending(case)


@pytest.mark.slow
def test_no_answer_on_a_commands_input_is_consent_to_code(store, tmp_path):
    """`yes |` answers the question of transformers in whatever child has our input; `--yes` is for what others wrote."""
    replay, (folder, mark) = "20260101T000000-aaaaaa", codedmodel.make(tmp_path / "model")
    write_replay(store, replay, publish(store, 1))
    path = reduction.folder_of_reduction(store, replay) / reduction.RECORD
    store.publish_text(path, reduced(FINGERPRINT, replace(SCRIPTS["checkpoint"], checkpoint=str(folder))).to_json())
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "repro", replay, "--yes"]
    for consent in first_or_all([["--trust-remote-code"], []]):  # the script of a case never runs code, with consent neither
        ran = run_program([*command, *consent], input="y\n" * 99, cwd=tmp_path)
        assert ran.returncode in (1, 3), ran.stderr
        assert not mark.exists()


def reduced(fingerprint, case, **more):
    return Reduction("r", "2026", fingerprint, case, "", 1, 1.0, True, True, True, **({"versions": {"torch": "2.13.0"}} | more))


@pytest.mark.parametrize(
    "dtype, said", [("fp32", "right, to 0.0001 nats"), ("bf16", "not shown: rounding alone may be 0.1 nats")]
)
def test_a_fault_that_rounding_hides_is_not_called_right(dtype, said):
    """A reader whose red replay ran in bf16 takes "in bf16: right" for the contrary of it."""
    trials = SimpleNamespace(ending=lambda case: Ending(RETURNED, values=(1e-5,)))
    fingerprint = SimpleNamespace(shown_by=lambda case, ending: False)
    assert _in_words(fingerprint, replace(CASE, dtype=dtype), trials) == said


def test_an_issue_says_what_each_project_would_need():
    module = "the attention of model.layers.N.linear_attn"
    found = reduced(
        replace(FINGERPRINT, module=module), CASE, tried={"each row alone": "right"}, aside={"ValueError: x": "1 row"}
    )
    text = issue_text(found, Script("print()", "row 1: WRONG"))
    assert text.startswith(f"# {title_of(found)}") and "- each row alone: right" in text and "ValueError: x" in text
    assert "transformers would need to use `cu_seq_lens_q`" in text and "OpenRLHF" in text and "guess" in text
    stack = ("torch/_inductor/lowering.py:7 lower",)
    foreign = issue_text(
        replace(found, fingerprint=replace(FINGERPRINT, said="@team ![](//x)"), tried={"@team": "\n# x"}),
        Script("", "```\n@team"),
    )
    assert foreign.count("@team") == 1 and "````text\n```\n@team\n````" in foreign and "\n# x" not in foreign
    failed = reduced(Fingerprint(ERROR, "RuntimeError: no", error_class="RuntimeError"), replace(CASE, kind=ERROR), stack=stack)
    assert "A guess, from the innermost frame: **torch**" in issue_text(failed, Script("", ""))


@pytest.mark.forked
def test_trials_are_isolated_and_warm(tmp_path):
    """One host forks for each trial; what dies or hangs costs its trial alone."""
    packed = replace(CASE, rows=((5, 7, 9), (11, 13)))
    fatal = "import os, time\ndef attempt():\n    {}"
    with Trials(tmp_path) as trials:
        right, leaks = trials.ending(packed), trials.ending(replace(packed, cache=True))
        host = trials._host
        assert right.status == running.RETURNED and max(value or 0 for value in right.values) < 1e-4
        assert FINGERPRINT.shown_by(packed, leaks)
        for line, ended in {
            "os.kill(os.getpid(), 11)": running.DIED,
            "time.sleep(99)": running.HUNG,
            'time.sleep(99) if os.environ["RANK"] == "0" else 1 / 0': running.RAISED,
        }.items():
            request = {"source": fatal.format(line), "modules": ["json"], "ranks": 2, "timeout_s": 0.5}
            assert trials._answer(request)["status"] == ended
        assert trials._host is host and trials.ending(packed) == right
        mark = tmp_path / "pid"
        source = fatal.format(f"open({str(mark)!r}, 'w').write(f'{{os.getpid()}}\\n')\n    time.sleep(99)")
        assert trials._host and trials._host.stdin
        trials._host.stdin.write(json.dumps({"source": source, "modules": [], "ranks": 1, "timeout_s": 99}) + "\n")
        trials._host.stdin.flush()
        wait_for(lambda: mark.exists() and mark.read_text().endswith("\n"))
    wait_for(lambda: (stat := read_stat(int(mark.read_text()))) is None or stat.state in "ZX")


@pytest.mark.forked
def test_from_a_wrong_replay_to_a_script_that_shows_it(tmp_path, store, monkeypatch):
    """OPT, whose packed rows see each other: reduced, checked as a replay, shown by a script in a fresh interpreter.

    Only what the first check says is given; the last, of the smallest case, is made.
    """
    model = tmp_path / "private" / "opt"
    model.mkdir(parents=True)
    write_json(model / "config.json", FAMILIES["opt"].config)
    settings = {"attn": "sdpa", "dtype": "fp32", "through": "rows", "packing": True}
    write_replay(store, "20260101T000000-aaaaaa", publish(store, 1, length=16), model=str(model), backward=False, **settings)
    check, answers = Checks.of, iter([(FINGERPRINT, settings | {"vocab_size": 256})])
    monkeypatch.setattr(Checks, "of", lambda *what, **more: next(answers, None) or check(*what, **more))
    script, issue = tmp_path / "repro.py", tmp_path / "issue.md"
    words = ["repro", "last", "-o", str(script), "--issue", str(issue), "--trials", "12", "--json"]
    done = invoke(store, *words)
    assert done.exit_code == 0, done.output
    shown = json_of(done)
    assert shown["lines"] < 120 and "depends on row 0" in shown["title"] and "WRONG" in shown["output"]
    (file,) = store.root.glob("reductions/*/reduction.json")
    record = Reduction.from_file(file)
    assert record.confirmed and record.checked and record.case.config and record.case.tokens < 16
    for text in (script.read_text(), issue.read_text()):
        assert str(tmp_path) not in text and "private" not in text and "actordbg" not in text
