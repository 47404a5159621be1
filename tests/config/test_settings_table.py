"""A setting has one home: a field added to the table, in one place, is found in everything that derives from it."""

import os
import shutil
import sqlite3
import sys

import catalogcases as cases
import pytest
from roots import ROOT, SUPPORT, json_of, run_program

from actordbg.catalog.indexer import refresh
from actordbg.store.layout import Store

FIELD = """
    head_share: int = setting(
        2,
        help="Heads that share one key.",
        metavar="N", column="heads that share one key",
        least=1, words="shares {}", quiet=(2,), axis="for every cell", numbers=True, cost=True,
    )  # fmt: skip
"""
PROBE = """
import json, sys
from pathlib import Path
from actordbg.actor.sharing import host_key
from actordbg.catalog.indexer import refresh
from actordbg.config.as_ran import apart, as_ran, differing, label, repeat_options
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import ReplayConfig
from actordbg.config.sources import Settings, build_config
from actordbg.campaign.cells import combinations, parse_axes
from actordbg.judge.exports import COLUMNS
from actordbg.store.layout import Store

store = Store(Path(sys.argv[1]))
refresh(store)
usual, three = ReplayConfig(), ReplayConfig(head_share=3)
facts = Facts(cuda=False, gpus=0, flash_attn=False)
settings = Settings(store.root, {"head-share": 4})
print(json.dumps({
    "file": build_config(settings, {}).config.head_share,
    "flag": build_config(settings, {"head_share": 5}).config.head_share,
    "label": label(as_ran(three)), "quiet label": label(as_ran(usual)),
    "apart": apart(as_ran(three), as_ran(usual)), "differing": differing(as_ran(three), as_ran(usual)),
    "repeat": repeat_options(as_ran(three)),
    "stored": ReplayConfig.from_dict(three.to_dict()).head_share,
    "axis": [one.name for one in combinations(usual, parse_axes({"head_share": "2,3"}))],
    "csv": COLUMNS[-3:],
    "own actor": host_key(three, choose(three, None, facts)) != host_key(usual, choose(usual, None, facts)),
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the package with one more setting in its table, and nothing else changed."""
    folder = tmp_path_factory.mktemp("settings") / "checkout"
    for name in ("actordbg", "migrations", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("store", "__pycache__"))
    table = folder / "actordbg" / "config" / "replay_config.py"
    text = table.read_text()
    place = text.index("    @property\n    def lane_width")
    table.write_text(f"{text[:place].rstrip()}\n{FIELD}\n{text[place:]}")
    made = run(folder, str(folder / "docs" / "generate.py"))  # `make docs`, as the recipe says
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def old_store(tmp_path_factory):
    """A store with a replay, indexed before the setting came."""
    store = Store(tmp_path_factory.mktemp("store") / "store").create()
    cases.write_spec(store, cases.spec("r1", cases.fill(store, 2)))
    refresh(store)
    return store


def run(copy, *arguments, **variables):
    """A program in the copy. It runs where no actordbg.toml lies."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(copy), str(copy / "docs"), str(SUPPORT)]), "COLUMNS": "100", **variables}
    return run_program([sys.executable, *arguments], env=environment, cwd=copy.parent, timeout=120)


@pytest.fixture(scope="module")
def found(copy, old_store):
    """What the copy makes of the new setting."""
    done = run(copy, "-c", PROBE, str(old_store.root))
    assert done.returncode == 0, done.stderr
    answer = json_of(done)
    return answer


def test_the_other_command_has_its_option(copy):
    done = run(copy, "-m", "actordbg", "matrix", "--help-all")
    assert done.returncode == 0 and "--head-share" in done.stdout and "LIST" in done.stdout, done.stderr


def test_flag_variable_and_file_give_it(copy, found, old_store):
    assert (found["file"], found["flag"]) == (4, 5)
    told = run(copy, "-m", "actordbg", "--store", str(old_store.root), "replay", "--dry-run", ACTORDBG_REPLAY_HEAD_SHARE="3")
    assert "not from the command line: head-share 3 (ACTORDBG_REPLAY_HEAD_SHARE)" in told.stderr, told.stderr


def test_a_value_that_means_nothing_is_refused(copy, old_store):
    done = run(copy, "-m", "actordbg", "--store", str(old_store.root), "replay", "--dry-run", "--head-share", "0")
    assert done.returncode == 2 and "--head-share 0 is too small" in done.stderr


def test_labels_differences_repeat_command_files_matrix_shared_actors_and_csv_have_it(found):
    assert found["label"].endswith("shares 3") and "shares" not in found["quiet label"]
    assert found["differing"] == ["head_share"] and found["apart"] == ["shares 3", "shares 2"]
    assert found["repeat"][-2:] == ["--head-share", "3"] and found["axis"] == ["shares 2", "shares 3"]
    assert found["stored"] == 3 and found["own actor"] and "head_share" in found["csv"]


@pytest.mark.usefixtures("found")
def test_the_catalog_has_its_column_without_a_migration(old_store):
    with sqlite3.connect(old_store.catalog_path) as catalog:
        assert catalog.execute("SELECT replay_id, head_share FROM replay").fetchall() == [("r1", 2)]


def test_the_reference_pages_have_it(copy):
    for page in ("replay-settings.md", "cli.md", "catalog.md"):
        text = (copy / "docs" / "reference" / page).read_text()
        assert "head-share" in text or "head_share" in text, page
    assert "`ACTORDBG_REPLAY_HEAD_SHARE`" in (copy / "docs" / "reference" / "replay-settings.md").read_text()
