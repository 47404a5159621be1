"""Whose call a dump is: a store that holds the calls of several trainers, and a catalog from before they had columns."""

import json

import catalogcases as cases
import pytest
from commandline import run_here

from actordbg.catalog import query
from actordbg.catalog.indexer import refresh

OTHER = {"trainer": "trl", "adapter": "trl", "function": "trl.trainer.grpo_trainer:GRPOTrainer.f"}


@pytest.fixture
def mixed(store):
    """Three calls of the home trainer, two of another one, a made-up input, and an older dump by a fork that names no texts."""
    cases.fill(store, 3)
    for index in (3, 4):
        cases.publish(store, cases.record(index, actor={"actor_class": "x", **OTHER}, versions={"trl": "1.16.0"}))
    cases.publish(store, cases.record(5, source="create"))
    cases.publish(store, cases.record(6, source="import", actor={"trainer": ["odd"]}))
    return store


def said(store, *words):
    done = run_here(*words, "--store", store.root)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_calls_of_several_trainers_are_told_apart_everywhere(mixed):
    refresh(mixed)
    home = "trainer = 'openrlhf' and adapter is null and function = 'openrlhf.models.actor:Actor.forward'"
    assert query.count_dumps(mixed, home) == 4
    assert query.count_dumps(mixed, "trainer='trl' and adapter='trl' and function like '%GRPOTrainer.f'") == 2
    assert query.count_dumps(mixed, "trainer is null and function is null") == 1
    listed = said(mixed, "dump", "ls")
    assert listed.count("openrlhf") == 4 and listed.count(" trl ") == 2
    assert "trainer" not in said(mixed, "dump", "ls", "--where", "adapter='trl'")
    shown = said(mixed, "dump", "show", query.select_dumps(mixed, "trainer='trl'")[0].dump_id)
    assert "trl 1.16.0" in shown and "GRPOTrainer.f (adapter trl)" in shown
    assert "openrlhf 4, trl 2" in said(mixed, "status")
    assert json.loads(said(mixed, "status", "--json"))["holds"]["trainers"] == {"openrlhf": 4, "trl": 2}
