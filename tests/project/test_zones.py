"""The three process zones: what runs in a training job stays light, and what runs at the desk does not load torch."""

import json
import sys

import pytest
from catalogcases import append, fill, result, spec, write_spec
from roots import ROOT, environment
from runkit import python

from actordbg.cli.app import CONTENTS
from actordbg.cli.lazy import every_command
from actordbg.config.sources import parse_toml
from actordbg.store.layout import Store

CONTRACTS = parse_toml((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
(DESK_ONLY,) = [set(contract["forbidden_modules"]) for contract in CONTRACTS if "the capture zone is light" in contract["name"]]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with two dumps and a finished replay of them, the id of the first dump, and a training's log beside it."""
    store = Store(tmp_path_factory.mktemp("zones") / "store").create()
    (store.root.parent / "train.log").write_text("gpt_loss: 5.78\ngpt_loss: 5.7\ngpt_loss: 5.6\n")
    records = fill(store, 2)
    folder = write_spec(store, spec("r1", records, model="tiny"))
    results = [result("r1", record.dump_id, forward_s=1.0, logprob_mean=-2.0) for record in records]
    append(folder / "rank0.jsonl", {"event": "ready", "pid": 1, "attempt": 1, "config": {}}, *results, {"event": "done"})
    append(folder / "supervisor.jsonl", {"event": "finished", "status": "complete"})
    return store, records[0].dump_id


def test_the_capture_zone_loads_nothing_of_the_desk():
    code = """
import sys, torch
before = {name.partition(".")[0] for name in sys.modules}
import safetensors.torch, zstandard, actordbg.capture.hook
print("\\n" + " ".join({name.partition(".")[0] for name in sys.modules} - before))
"""
    added = set(python(code, environment()).splitlines()[-1].split())
    assert len(DESK_ONLY) >= 10 and "zstandard" in added and added & DESK_ONLY == set()


DESK_COMMANDS = """replay --help
dump ls
dump show DUMP
dump verify
index
run true
dump status
report
compare-logs LOG LOG
dump pack
dump ls --limit 5
dump show last
dump unpack --all
dump prune --where seq_len<0 --yes --allow-empty""".splitlines()
"""Behind `pack` once more of what is packed."""


ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from actordbg.cli.app import main
heavy, answers = {"torch", "vl_convert"}, {}
for name, arguments in json.loads(sys.argv[1]).items():
    before, said = set(sys.modules), io.StringIO()
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
    answers[name] = {"code": code, "loaded": sorted(heavy & (set(sys.modules) - before)), "said": said.getvalue()}
print("\\n" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def desk(filled):
    """What each command answers and loads, one after the other in one process: heavy modules are told of the first that loads them."""
    store, dump_id = filled
    meant = {"DUMP": dump_id, "LOG": str(store.root.parent / "train.log")}
    commands = {line: ["--store", str(store.root), *(meant.get(word, word) for word in line.split())] for line in DESK_COMMANDS}
    said = python(ONE_AFTER_THE_OTHER, environment(), json.dumps(commands))
    answers = json.loads(said.splitlines()[-1])
    return answers


@pytest.mark.parametrize("name", DESK_COMMANDS)
def test_the_desk_does_not_load_torch(desk, name):
    assert (desk[name]["code"], desk[name]["loaded"]) == (0, []), desk[name]["said"]


EVERY_HELP = """
import sys, typer
before = set(sys.modules)
from actordbg.cli.app import CONTENTS, app
from actordbg.cli.lazy import every_command
def loaded(*lines):
    for line in lines:
        try:
            app(line.split())
        except SystemExit as end:
            assert not end.code, line
    print("\\n" + " ".join(set(sys.modules) - before))
loaded("--help", "dump --help", "--version")
loaded(*(f"{name} --help" for name, _ in every_command(CONTENTS)))
"""


def test_the_help_of_a_group_imports_no_command_and_a_commands_own_nothing_that_it_works_with():
    """Options, and what declares them: no other package than typer, no database, no room but cli/, config/, base/ and the methods."""
    said = python(EVERY_HELP, environment())
    assert said.count("Usage: ") == 2 + len(list(every_command(CONTENTS)))
    of_groups, loaded = (set(line.split()) for line in said.splitlines() if "actordbg.cli.app" in line.split())
    beginning = {
        "actordbg",
        *(f"actordbg.{name}" for name in ("cli", "cli.app", "cli.lazy", "base", "base.errors", "base.fault")),
    }
    assert {name for name in of_groups if name.partition(".")[0] == "actordbg"} == beginning
    own = {name for name in loaded if name.partition(".")[0] == "actordbg"}
    assert {name.partition(".")[0] for name in loaded - own} - sys.stdlib_module_names - {"typer"} == set()
    assert {"sqlite3", "hashlib", "tempfile", "socket", "statistics", "csv", "webbrowser"}.isdisjoint(loaded)
    targets = {f"actordbg.cli.{one.target.partition(':')[0]}" for _, one in every_command(CONTENTS)}
    left = own - targets - {name for name in own if name.endswith("options") or name.startswith("actordbg.base")}
    assert left <= {
        "actordbg", "actordbg.cli", "actordbg.cli.app", "actordbg.cli.lazy", "actordbg.cli.output", "actordbg.cli.from_signature",
        "actordbg.api", "actordbg.api.plain_commands", "actordbg.api.store_commands",
        "actordbg.config", "actordbg.config.sources",
        "actordbg.config.consent", "actordbg.config.replay_config", "actordbg.config.setting",
    }  # fmt: skip
