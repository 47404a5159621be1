"""What people see first: the help of every command, and the options that every command has."""

import importlib
import inspect
import json
import re
import sys

import commandline
import pytest
from commandline import in_json, invoke, run_here

from actordbg.api.store_commands import StoreCommands
from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.app import CONTENTS
from actordbg.cli.from_signature import told
from actordbg.cli.lazy import every_command, spelled

NAMES = dict(every_command(CONTENTS))


def helped(*words):
    done = run_here(*words, env={"COLUMNS": "80"}, prog_name="actordbg")
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


@pytest.mark.parametrize("name", NAMES)
def test_a_help_shows_fifteen_options_in_the_words_of_an_engineer_and_help_all_shows_all(name):
    short, every = helped(*name.split(), "--help"), helped(*name.split(), "--help-all")
    options = [mine for mine in NAMES[name].build().params if mine.param_type_name == "option" and not mine.hidden]
    listed = re.findall(r"^  (-.+?)(?:  |$)", short.partition("\nOptions:\n")[2], re.MULTILINE)
    assert 0 < len(listed) <= 15
    if "where" in [mine.name for mine in options]:
        assert listed[0].startswith("--where EXPR")
    assert (f"All options: actordbg {name} --help-all" in short.splitlines()[-1]) is (len(options) - 1 > len(listed))
    assert [spelled(mine) for mine in options if f"  {spelled(mine)}" not in every] == []
    for text in (short, every):
        assert re.search(r"<(int|float|str|text|list|path|file|dir)\b|<.* range>|\{|\[\[|\.{4}|<=x|x>=", text) is None, text
        assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_help_and_every_help_an_option(name):
    """A docstring's `Args:` name parameters of its function, and are not left in the prose."""
    assert [mine.name for mine in NAMES[name].build().params if not mine.help] == []
    module, _, function = NAMES[name].target.partition(":")
    home = importlib.import_module(f"actordbg.cli.{module}") if module else StoreCommands
    prose, texts = told(getattr(home, function).__doc__)
    assert "Args:" not in prose and texts.keys() <= inspect.signature(getattr(home, function)).parameters.keys()


def test_at_most_sixteen_entries_at_the_top_name_every_command_of_one_word_and_each_has_one_spelling():
    listed = re.findall(r"^  (\w.*?)(?:  |$)", helped("--help").partition("\nInstall:\n")[2], re.MULTILINE)
    assert len(listed) <= 16
    assert {name for label in listed for name in label.split(", ")} == {name.split()[0] for name in NAMES}


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("measure noise", "actordbg noise"),
        ("fsck", "actordbg store fsck"),
        ("doctor adapters", "actordbg adapters"),
        ("statsu", "status"),
        ("dump lss", "ls"),
    ],
)
def test_a_command_that_is_not_there_is_answered_with_the_one_that_is(typed, meant):
    done = commandline.typed(*typed.split())
    assert done.returncode == 2 and f"Did you mean '{meant}'?" in done.stderr


def test_a_misspelt_option_is_answered_with_the_nearest_one(store):
    done = commandline.typed("--store", str(store.root), "replay", "--max-input", "3", "--json")
    assert done.returncode == 2 and "No such option: --max-input. Did you mean '--max-inputs'?" in done.stderr
    assert json.loads(done.stdout)["error"]["message"].endswith("Did you mean '--max-inputs'?")


@pytest.mark.parametrize("name, beginning", [("rows.json", "[\n"), ("rows.csv", "dump_id,")])
def test_output_is_written_as_the_suffix_says(store, tmp_path, name, beginning):
    invoke(store, "dump create --count", 60, "--seq-len", 8)
    invoke(store, "dump ls -o", tmp_path / name, "-o", tmp_path / "again.json")
    text = (tmp_path / name).read_text()
    assert text.startswith(beginning) and text.count("Z-0000") >= 60
    with pytest.raises(UsageError, match=r"cannot write \.html"):
        invoke(store, "dump ls -o", tmp_path / "rows.html")


@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_a_config_gives_the_plan_of_its_flags(store, tmp_path, form):
    invoke(store, "dump create --count", 4, "--ranks", 2, "--seq-len", 8)
    text = '[inputs]\nwhere = "rank=0"\nmax-inputs = 3\n[replay]\ndtype = "bf16"\nbackend = "deepspeed"\nnproc = 2\npacking = false\n'
    if form == "yaml":
        text = re.sub(r"\[(\w+)\]", r"\1:", re.sub(r"(?m)^([\w-]+) = ", r"  \1: ", text))
    file = tmp_path / f"replay.{form}"
    file.write_text(text)
    flags = "--where rank=0 --max-inputs 3 --dtype bf16 --backend deepspeed --nproc 2 --no-packing"
    assert in_json(store, "replay --dry-run --config", file) == in_json(store, f"replay --dry-run {flags}")


def test_a_config_is_stronger_than_the_environment_and_a_matrix_takes_lists_from_it(store, tmp_path, monkeypatch):
    invoke(store, "dump create --count", 2, "--seq-len", 8)
    config = tmp_path / "c.toml"
    config.write_text('[replay]\ndtype = "fp32"\nattn = ["sdpa", "eager"]\npacking = [false]\ncompile = false\n')
    monkeypatch.setenv("ACTORDBG_REPLAY_SEED", "7")
    done = in_json(store, "matrix --config", config, "--dtype", "bf16", "--dry-run")
    assert [(cell["config"]["dtype"], cell["config"]["attn"], cell["config"]["seed"]) for cell in done["cells"]] == [
        ("bf16", "sdpa", 7), ("bf16", "eager", 7)
    ]  # fmt: skip
    for text, why in (
        ("[replay]\nsede = 3", "unknown key 'sede'"),
        ("[inputs]\nwher = 3", "unknown key 'wher'"),
        ("[x]", "keys: x"),
    ):
        config.write_text(text)
        with pytest.raises(UsageError, match=why):
            invoke(store, "replay --config", config)


def test_settings_that_make_no_sense_together_are_refused_with_a_hint(store):
    for words, said, hint in (
        (["--no-laws", "--laws", "2"], "conflict", "use only one"),
        (["--zero-stage", "3"], "--zero-stage needs DeepSpeed", "--backend deepspeed"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)) as raised:
            invoke(store, "replay", *words, "--dry-run")
        assert hint in (raised.value.hint or "")


@pytest.mark.parametrize("colorless, terminal", [("", True), ("1", True), ("", False)])
def test_verdicts_have_their_color_in_a_terminal_alone(monkeypatch, capsys, colorless, terminal):
    monkeypatch.setenv("NO_COLOR", colorless)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    output.say("RIGHT: 3 of 3 dumps; NOT CHECKED: the law order; 2 failed, WRONG")
    output.say_lines("  #1  sdpa   passed  3.8e-06\n  #2  eager  failed")
    shown = capsys.readouterr().out
    painted = re.findall(r"\x1b\[(\d+)m([\w ]+)\x1b\[0m", shown)
    good, part, bad = "32", "33", "31"
    expected = [(good, "RIGHT"), (part, "NOT CHECKED"), (bad, "WRONG"), (good, "passed"), (bad, "failed")]
    assert painted == (expected if terminal and not colorless else []) and "2 failed, " in shown
