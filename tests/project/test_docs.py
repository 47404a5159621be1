"""Documentation cannot lie: references are up to date, names exist, links lead somewhere, examples run."""

import hashlib
import importlib
import json
import os
import re
import sys
from dataclasses import fields
from functools import partial
from itertools import groupby

import docpages
import packcases
import pytest
from amounts import WHOLE
from commandline import run_here
from docpages import ROOT, page_id
from replaycallers import callers
from replaycases import old_pickle
from roots import SUPPORT, run_program

from actordbg.base import errors
from actordbg.base.errors import ActordbgError
from actordbg.catalog.where import compile_where
from actordbg.cli.app import CONTENTS
from actordbg.cli.lazy import every_command
from actordbg.config.replay_config import SETTINGS
from actordbg.config.sources import build_config, load_settings
from actordbg.dumps.packing import pack_dumps
from actordbg.formats.dump_record import DumpRecord
from actordbg.replay import supervise
from actordbg.replay.launch import launch
from actordbg.store.places import read_record

BLOCKS = [block for page in docpages.pages() for block in docpages.blocks(page)]
CONSOLE = [block for block in BLOCKS if block.language == "console"]
RUNNABLE = [
    block for block in BLOCKS if block.mode == "run" and block.page.parent.name != "examples"
]  # test_examples makes their store


def error_classes(root=ActordbgError):
    """The tree that this package defines. Ray derives a class of its own from an actor's error, in whatever process gets it."""
    ours = [child for child in root.__subclasses__() if child.__module__.partition(".")[0] == "actordbg"]
    return [root, *(found for child in ours for found in error_classes(child))]


def environment_variables():
    """Every ACTORDBG_... that the package's code names, and those of the table of settings."""
    text = "".join(path.read_text() for path in (ROOT / "actordbg").rglob("*.py"))
    of_settings = {one.variable for one in SETTINGS.values() if not one.flag_only}
    return set(re.findall(r"\bACTORDBG_[A-Z][A-Z_]*[A-Z]\b", text)) | of_settings


def command_names():
    return [name for name, _ in every_command(CONTENTS)]


# ---- references ----


def test_the_generated_reference_is_up_to_date_in_a_narrow_terminal():
    environment = os.environ | {"COLUMNS": "40", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = run_program(command, env=environment)
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


def test_the_check_notices_a_stale_page(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    generate = importlib.import_module("generate")
    (tmp_path / "page.md").write_text("old text")
    monkeypatch.setattr(generate, "pages", lambda: {tmp_path / "page.md": "new text"})
    assert generate.main(["--check"]) == 1 and "+new text" in capsys.readouterr().out
    assert (tmp_path / "page.md").read_text() == "old text"


def test_every_command_has_an_example_in_its_help():
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    sections = re.split(r"^## (?=actordbg )", text, flags=re.MULTILINE)[1:]
    assert len(sections) == len(command_names())
    assert [section.splitlines()[0] for section in sections if section.count("```text") < 2] == []


# ---- names ----


def test_every_command_appears_in_the_prose():
    text = docpages.prose()
    shown = [name for name in command_names() if re.search(rf"(actordbg[^\n`]*\s|`){name.replace(' ', ' +')}\b", text)]
    assert shown == command_names(), "a command that no page shows"


def test_every_error_code_has_its_section_with_its_exit_code_and_the_docstring_names_it():
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    known, tree = error_classes(), (errors.__doc__ or "").partition("Each carries")[0]
    assert sections.keys() == {error.code for error in known}
    assert [error for error in known if f"Exit code {error.exit_code}." not in sections[error.code]] == []
    assert [error for error in known[1:] if not re.search(rf"\b{error.__name__}\b\s+{re.escape(error.code)}\b", tree)] == []


def test_every_environment_variable_is_documented_and_no_page_names_another():
    pages = (ROOT / "docs" / "reference" / page for page in ("settings.md", "replay-settings.md"))
    text = "".join(page.read_text() for page in pages)
    assert [name for name in environment_variables() if name not in text] == []
    assert set(re.findall(r"\bACTORDBG_[A-Z][A-Z_]*[A-Z]\b", docpages.prose())) <= environment_variables()


# ---- links ----


@pytest.mark.parametrize("page", [page for page in docpages.pages() if ROOT / "docs" not in page.parents], ids=page_id)
def test_every_link_of_a_page_outside_docs_leads_somewhere(page):
    """Those of the pages in docs/, and their anchors, are looked at by `make site`."""
    for path, _, heading in (link.partition("#") for link in docpages.links(page) if not re.match(r"[a-z]+:", link)):
        assert (page.parent / path).exists(), path
        assert re.search(rf"(?im)^#+ {heading.replace('-', ' ')}$", (page.parent / path).read_text()) if heading else path


# ---- examples ----


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: f"{page_id(block.page)}:{block.text.splitlines()[0][:50]}")
def test_every_command_line_on_a_page_exists(block):
    assert block.commands, "a console block shows what to type after `$ `"
    for command in block.commands:
        for arguments in docpages.invocations(command.text.replace("ID", "x")):
            docpages.parse(arguments)


OLD_SCRIPTS = ROOT / "docs" / "how-to" / "from-the-old-scripts.md"
PLANNED = ("matrix", "train-check", "ray", "ccl")
"""Words of the rows that are planned (`--dry-run`): they would start eight processes, Ray or a truth, or need a vendor's module."""
NOT_RUN = ("doctor", "patch", "unpatch", "memory", "attach")
"""Commands of the page whose command lines are parsed: they need a training installation, or processes to watch."""


def counterparts():
    """The command lines of the right column of the page's tables."""
    rows = [line for line in OLD_SCRIPTS.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    cells = [line.strip().strip("|").split(" | ")[-1] for line in rows]
    return [command for cell in cells for command in re.findall(r"`([^`]*\bactordbg [^`]+)`", cell)]


def scripted(config, group, work):
    """Start workers with the real loop and journal, whose engine does nothing (`fake_worker`)."""
    (work.parent / "script.json").write_text("{}")
    return launch(config, group, work, "fake_worker")


@pytest.mark.forked
def test_each_old_command_has_a_counterpart_that_runs_on_twenty_pickles_or_is_refused_for_want_of_a_gpu(tmp_path, monkeypatch):
    """Replays run with workers whose engine does nothing, or with WHOLE=1 with real ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    if not WHOLE:
        run_scripted = partial(supervise.run_replay, launcher=scripted)
        for module in (supervise, *callers()):
            monkeypatch.setattr(module, "run_replay", run_scripted)
    old_pickle(tmp_path, name="x.pkl")
    for number in range(20):
        old_pickle(tmp_path / "input_dumps", rank=number % 4, stamp=f"20250619_0526{number:02d}_430740")
    (tmp_path / "fsdp2.yaml").write_text('{"distributed_type": "FSDP", "num_processes": 2}')
    for name in "AB":
        (tmp_path / name).write_text("".join(f"Global step {step}: {{'gpt_loss': {6 - step / 10}}}\n" for step in range(1, 9)))
    commands = counterparts()
    commands.sort(key=lambda command: [" import " not in command, " prune " in command])  # its dumps are used by the others
    ended = {}
    for command in commands:
        arguments = docpages.invocations(command)[0]
        docpages.parse(arguments)
        if arguments[0] in NOT_RUN:
            continue
        assignments, _, line = command.rpartition("actordbg ")
        extra = ["--dry-run"] * any(word in PLANNED for word in arguments) + ["--json"] * (arguments[:2] == ["actor", "init"])
        with pytest.MonkeyPatch.context() as names:
            for name, value in (assignment.split("=") for assignment in assignments.split()):
                names.setenv(name, value)
            done = run_here("--store", "store", *line.split()[: len(arguments)], *extra)
        ended[command] = done.exit_code if isinstance(done.exception, SystemExit | None) else done.exception
    refused = {command: error for command, error in ended.items() if isinstance(error, ActordbgError)}
    assert {command for command, code in ended.items() if code != 0} == set(refused), ended
    assert all(isinstance(error, errors.Unsupported) and error.hint for error in refused.values()), refused
    assert all("--flash-attn" in command or "--deepcompile" in command for command in refused), list(refused)
    assert len(ended) >= 61 and len(list((tmp_path / "store" / "replays").glob("*/rank0.jsonl"))) >= 17


def test_a_command_line_that_does_not_exist_is_noticed():
    assert docpages.invocations("A=1 actordbg --store s dump ls | wc && pdsh 'actordbg status'") == [
        ["--store", "s", "dump", "ls"], ["status"]
    ]  # fmt: skip
    with pytest.raises(Exception, match=r"(?i)no such option"):
        docpages.parse(["dump", "ls", "--no-such-option"])
    with pytest.raises(Exception, match=r"(?i)no such command"):
        docpages.parse(["dump", "nothing"])


@pytest.mark.forked
@pytest.mark.parametrize(
    "blocks", [list(found) for _, found in groupby(RUNNABLE, key=lambda block: (block.page, block.name))],
    ids=lambda blocks: f"{page_id(blocks[0].page)}:{blocks[0].name}",
)  # fmt: skip
def test_examples_do_what_their_page_shows(blocks, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "shared").symlink_to(ROOT.parent / "shared")
    docpages.run_blocks(blocks, work)


# ---- the pages' own code ----


def test_the_store_format_page_reads_a_real_dump_and_a_real_pack(store, capsys):
    page = ROOT / "docs" / "reference" / "store-format.md"
    code = {block.name: block.text for block in docpages.blocks(page) if block.mode == "run-python"}
    assert list(code) == ["header", "payload", "pack"]
    packcases.fill_ppo(store, calls=3)
    expected = packcases.contents(store)
    dump = {"path": next(iter(store.iter_dumps()))}
    record = read_record(dump["path"])
    for name in ("header", "payload"):
        exec(code[name], dump)  # the page's own code, nothing else
    printed = [record.run, record.rank, record.batch_size, record.seq_len, record.tokens]
    assert capsys.readouterr().out.split() == list(map(str, printed))
    assert any(key.startswith("sequences") for key in dump["stored"])
    magic = dump["path"].read_bytes()[:4]
    pack_dumps(store)
    packed = {"pack": next(store.iter_packs())}
    exec(code["pack"], packed)
    found = {dump_id: hashlib.sha256(payload).hexdigest() for dump_id, payload in packed["payloads"].items()}
    assert found == {dump_id: sha256 for dump_id, (_, sha256) in expected.items()}
    for before, start in (("| 4 | `", magic), ("skippable zstd frame, magic `", packed["data"][:4])):
        assert bytes.fromhex(page.read_text().partition(before)[2][:11]) == start


def test_what_reference_pages_show_as_json_toml_conditions_and_fields_is_that(tmp_path, monkeypatch):
    reference = ROOT / "docs" / "reference"
    text = (reference / "store-format.md").read_text()
    assert [field.name for field in fields(DumpRecord) if f"`{field.name}`" not in text] == []
    (shown,) = [block.text for block in docpages.blocks(reference / "catalog.md") if block.language == "text"]
    assert len([compile_where(line) for line in shown.splitlines()]) >= 3
    for block in BLOCKS:
        if block.language == "json":
            json.loads(block.text)
    (block,) = [block for block in docpages.blocks(reference / "settings.md") if block.language == "toml"]
    (tmp_path / "actordbg.toml").write_text(block.text)
    for name in ("ACTORDBG_STORE", "ACTORDBG_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert str(settings.store) == "/shared/actordbg" and build_config(settings, {}).config.zero_stage == 3
