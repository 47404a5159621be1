"""A trainer that is not installed is named before any worker is started, in the words of the worker that would need it."""

import os
import sys
from dataclasses import replace

import pytest
from actorcases import make_dump
from roots import ROOT, run_program

from actordbg.actor.rules import find_trainer, missing_trainer
from actordbg.base.errors import EnvironmentProblem
from actordbg.base.imports import is_there
from actordbg.config.choices import Facts, facts_elsewhere
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.create import create_dumps
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER

OURS, ANOTHER, OF_SOMEBODY = (make_dump(actor=actor).record for actor in ({}, {"adapter": "trl"}, {"adapter": "mine"}))
THROUGH = ReplayConfig(through="trainer")
NOT_INSTALLED = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nowhere())
"""


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr("actordbg.base.imports.is_there", lambda package: False)


@pytest.mark.usefixtures("nothing_installed")
def test_a_trainer_whose_code_is_asked_for_and_is_missing_is_named_with_the_way_without_it():
    for config, record in ((ReplayConfig(), None), (ReplayConfig(), OURS), (THROUGH, OURS)):
        with pytest.raises(EnvironmentProblem, match="cannot be imported here: No module named") as caught:
            find_trainer(config, record)
        assert TRAINER.package in caught.value.message and "--through rows" in caught.value.hint
    with pytest.raises(EnvironmentProblem, match="No module named 'trl'; --through trainer needs the trainer installed"):
        find_trainer(THROUGH, ANOTHER)


@pytest.mark.usefixtures("nothing_installed")
def test_what_needs_no_trainer_or_runs_elsewhere_is_not_asked():
    rows = replace(THROUGH, through="rows")
    needless = (
        (ReplayConfig(truth="fp32"), OURS),
        (rows, OURS),
        (rows, ANOTHER),
        (ReplayConfig(), ANOTHER),
        (THROUGH, OF_SOMEBODY),
    )
    assert {missing_trainer(*case) for case in needless} == {None}
    with facts_elsewhere(Facts(cuda=False, gpus=0, flash_attn=False)):
        assert missing_trainer(ReplayConfig(), OURS) is None


def test_a_trainer_in_the_working_folder_is_there_as_for_the_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert not is_there("a_trainer_of_one_file")
    (tmp_path / "a_trainer_of_one_file.py").write_text("raise SystemExit('it was imported')")
    assert is_there("a_trainer_of_one_file") and is_there("json")


def without(tmp_path, *missing):
    """A store, and `actordbg` on it in an environment without these packages."""
    store = Store(tmp_path / "store")
    create_dumps(store, 2, batch_size=1, seq_len=8)
    (tmp_path / "sitecustomize.py").write_text(f"MISSING = {missing}\n{NOT_INSTALLED}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}

    def run(*words):
        command = [sys.executable, "-m", "actordbg", "--store", str(store.root), *words]
        return run_program(command, env=environment)

    return store, run


@pytest.mark.slow
def test_without_torch_that_is_what_is_missing_and_how_it_is_installed(tmp_path):
    store, run = without(tmp_path, "torch", "transformers")
    for words in (["check"], ["train-check", "--through", "rows"]):
        done = run(*words)
        assert done.returncode == 4 and not done.stdout, done.stdout + done.stderr
        error, hint = done.stderr.splitlines()[-2:]
        assert error.startswith("error[environment]: nothing can be replayed here: torch and transformers not installed in")
        assert f"{sys.executable} -m pip install 'actordbg[replay]'" in hint and "openrlhf" not in done.stderr
    assert not any(folder.exists() for folder in (store.replays, store.root / "matrices", store.root / "trainchecks"))


def test_no_replay_is_begun_without_its_trainer(tmp_path):
    store, run = without(tmp_path, "openrlhf")
    for words in (["replay"], ["actor", "init"]):
        done = run(*words)
        assert done.returncode == 4, done.stdout + done.stderr
        assert "error[environment]: OpenRLHF cannot be imported here: No module named 'openrlhf'" in done.stderr
    assert not store.replays.exists()
    done = run("matrix", "--through", "rows,trainer", "--dry-run")
    assert "on the rows: to be run" in done.stdout and "through the trainer: unavailable (OpenRLHF cannot be imp" in done.stdout
