"""`actordbg matrix` as typed; and a real one: shared cells give, bit for bit, what fresh processes give."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from amounts import first_or_all
from click.testing import Result
from replaycases import publish
from roots import ROOT
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from actordbg.base.errors import ActordbgError, NothingToDo, UsageError
from actordbg.base.units import new_replay_id
from actordbg.campaign import run_matrix as matrices
from actordbg.campaign.cell_outcomes import regressions
from actordbg.cli.app import app
from actordbg.records.journal import read_events, read_results
from actordbg.records.matrix_record import MatrixRecord
from actordbg.records.replay_record import ReplaySpec, ResultRecord
from actordbg.replay.supervise import load_spec, run_replay
from actordbg.store.layout import Store


@pytest.fixture(autouse=True)
def no_surrounding_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def invoke(store: Store, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["--store", str(store.root), "matrix", *arguments])
    if isinstance(result.exception, ActordbgError):
        raise result.exception
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def test_the_plan_says_what_is_unavailable_and_what_shares_a_load(store: Store) -> None:
    publish(store, 2)
    asked = ("--dry-run", "--attn", "flash_attention_2,sdpa", "--packing", "both")
    said = invoke(store, *asked).stdout
    assert "4 cells on 2 dumps" in said and "#0 flash, not packed: unavailable (flash_attention_2 was asked for" in said
    assert "#3 sdpa, packed: to be run" in said and "load 1: #2, #3" in said
    plan = json.loads(invoke(store, *asked, "--json").stdout)
    assert (plan["dumps"], len(plan["cells"]), plan["loads"]) == (2, 4, [[2, 3]])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--attn flash", "--attn flash is not known"),
        ("--slower 2", "--slower has nothing to measure against"),
        ("--baseline nonsense", "no matrix"),
        ("--oracle bf16", "--truth bf16"),
        ("--where seq_len>9000", "no dump matches seq_len>9000"),
        ("--resume last --attn sdpa --max-inputs 2", "--max-inputs, --attn cannot be given"),
        ("--show last --attn sdpa", "--attn cannot be given"),
        ("--show last", "no matrix"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_starts(store: Store, typed: str, said: str) -> None:
    publish(store, 1)
    with pytest.raises((UsageError, NothingToDo), match=said):
        invoke(store, *typed.split())
    assert not store.matrices.exists() and not store.replays.exists()


def test_below_a_launcher_one_process_runs_it_with_as_many_workers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can run: the exit code is 1, the table says why; and it cannot go on when its dump is gone."""
    publish(store, 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert invoke(store, "--dry-run").stdout == ""
    monkeypatch.setenv("RANK", "0")
    done = invoke(store, "--attn", "flash_attention_2", "--packing", "off", "--compile", "off", "--quiet")
    assert done.exit_code == 1 and not store.replays.exists()
    assert "1 cell on 1 dump: 1 unavailable" in done.stdout and "way out: --attn sdpa" in done.stdout
    assert [cell.config["nproc"] for cell in matrices.load(store, "last").cells] == [2]
    again = invoke(store, "--show", "last", "--format", "md")
    assert again.exit_code == 0 and "| # | combination | result |" in again.stdout
    for path in store.iter_dumps():
        path.unlink()
    with pytest.raises(ActordbgError, match=r"no dump|gone"):
        invoke(store, "--resume", "last")


def command(store: Store, *arguments: str, code: int = 0) -> str:
    """The command in a process of its own."""
    line = [sys.executable, "-m", "actordbg", "--store", str(store.root), "matrix", "--quiet", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def figures(record: ResultRecord) -> tuple[Any, ...]:
    return record.status, record.output_digest, record.loss, record.grad_norm, record.entropy_mean


@pytest.mark.slow
class TestARealOne:
    """Four cells on one loaded Actor: sdpa and eager, compiled or not, packed, with backward."""

    GIVEN = ("--attn", "sdpa,eager", "--compile", "off,on", "--compile-backend", "eager", "--packing", "on", "--backward")

    @pytest.fixture(scope="class")
    def store(self, tmp_path_factory: pytest.TempPathFactory) -> Store:
        store = Store(tmp_path_factory.mktemp("real") / "store").create()
        publish(store, 2, length=64, arguments={"return_output": True, "return_entropy": True})
        return store

    @pytest.fixture(scope="class")
    def record(self, store: Store) -> MatrixRecord:
        answer = json.loads(command(store, *self.GIVEN, "--json"))
        record = matrices.load(store, "last")
        assert answer["good"] is True and answer["matrix"]["matrix_id"] == record.matrix_id
        return record

    def test_every_cell_is_right_the_actor_was_built_once_and_each_ran_what_it_was_asked_for(
        self, store: Store, record: MatrixRecord
    ) -> None:
        assert [(cell.status, cell.verdict) for cell in record.cells] == [("passed", "match")] * 4
        assert all(cell.max_abs is not None and cell.max_abs < 1e-4 for cell in record.cells)
        assert record.loads == 1 and [cell.shared_with for cell in record.cells] == [None, 0, 0, 0]
        assert record.cells[0].load_s and record.truth_id
        for cell in record.cells:
            events = read_events(store.replays / str(cell.replay_id) / "supervisor.jsonl")
            resolved = next(event["resolved"] for event in events if event["event"] == "resolved")
            asked = ("attn", "compile", "packing")
            assert [resolved[name] for name in asked] == [cell.settings[name] for name in asked]
            graphs = [one.graphs for one in read_results(store.replays / str(cell.replay_id)).values()]
            assert graphs == [None, None] if not cell.settings["compile"] else sum(graphs) >= 1

    @pytest.mark.parametrize("index", first_or_all([2, 1]))
    def test_a_shared_cell_gives_what_a_fresh_process_gives(self, store: Store, record: MatrixRecord, index: int) -> None:
        """2: the attention was changed after a compiled cell or before; 1: compiled after two that were not."""
        shared = record.cells[index]
        spec: ReplaySpec = replace(load_spec(store, str(shared.replay_id)), replay_id=new_replay_id())
        fresh = run_replay(store, spec)
        assert "load_shared_with" not in fresh.resolved and fresh.resolved["load_s"] > 0
        there = read_results(store.replays / str(shared.replay_id))
        assert {one: figures(result) for one, result in there.items()} == {
            one: figures(result) for one, result in fresh.results.items()
        }
        assert [there[one].graphs for one in there] == [fresh.results[one].graphs for one in there]

    def test_against_a_baseline_with_other_numbers_a_cell_has_regressed(self, store: Store, record: MatrixRecord) -> None:
        cell = record.cells[3]

        def against(replay_id: str) -> tuple[str, ...]:
            return regressions(store, cell, replace(record, cells=(replace(cell, replay_id=replay_id),)))

        first = str(record.cells[0].replay_id)
        assert regressions(store, cell, record) == () and against(first) == (), "within what compare allows"
        (found,) = against(shifted(store, first))
        assert found.startswith("other numbers than in the baseline: 20250619T0526")
        (found,) = against(shifted(store, first, temperature=0.5))
        assert found.startswith("its numbers cannot be compared with the baseline's: ") and "temperature" in found


def shifted(store: Store, replay_id: str, temperature: float = 1.0) -> str:
    """A copy of a replay whose log-probs are 0.5 nats higher, and were computed at another temperature, as it says."""
    spec = load_spec(store, replay_id)
    copy = replace(spec, replay_id=new_replay_id())
    shutil.copytree(store.replays / replay_id, store.replays / copy.replay_id)
    folder = store.replays / copy.replay_id
    (folder / "spec.json").write_text(copy.to_json())
    journal = folder / "rank0.jsonl"
    text = journal.read_text().replace(replay_id, copy.replay_id)
    text = re.sub(r'"output_digest":"..', '"output_digest":"__', text)
    journal.write_text(text.replace('"temperature":1.0', f'"temperature":{temperature}'))
    for path in (folder / "tensors").iterdir():
        tensors = load_file(path)
        save_file(tensors | {"log_probs": tensors["log_probs"] + 0.5}, path)
    return copy.replay_id
