"""Combinations that are known to fail or to be wrong: named before anything starts, with the workarounds."""

import json
from dataclasses import replace

import pytest
from actorcases import make_dump
from casefiles import cases_of

from actordbg.actor.rules import RULES, check_config, refuse, refuse_hits
from actordbg.base.errors import Unsupported
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import ReplayConfig

NEW = {"transformers": "5.15.0", "torch": "2.13.0"}
LAPTOP = Facts(cuda=False, gpus=0, flash_attn=False, compiler=True, versions=NEW)
SERVER = Facts(cuda=True, gpus=2, flash_attn=True, compiler=True, versions=NEW)
TP = ReplayConfig(backend="fsdp2", tp=2, nproc=2)

RECORDED = {
    "recorded-rows-leaked": make_dump(arguments={"context.rows_leak": True}, packing_samples=True).record,
    "trainer-cannot-be-called": make_dump(actor={"adapter": "nobody"}).record,
    "trainers-function-is-alone": make_dump(actor={"adapter": "trl"}).record,
}
"""The dump that a rule is about, where it is about one."""


MACHINES = {
    "laptop": LAPTOP,
    "server": SERVER,
    "ring-server": replace(SERVER, versions=NEW | {"ring-flash-attn": "0.1.8"}),
    "small": replace(LAPTOP, cpus=2),
    "bare": replace(LAPTOP, compiler=False),
    "new-laptop": replace(LAPTOP, cpu_fp16=True),
}
CASES = cases_of("rules")


def machine(words):
    """A machine by its name, with other versions or another number of cores."""
    name, *others = words.removeprefix("on ").split()
    named = dict(other.split("=") for other in others)
    cpus = int(named.pop("cpus", MACHINES[name].cpus))
    return replace(MACHINES[name], cpus=cpus, versions=NEW | MACHINES[name].versions | named)


def settings(words):
    return {name: json.loads(value) for name, value in (word.split("=", 1) for word in words.split())}


def test_every_rule_has_a_case_here():
    assert sorted(rule.id for rule in RULES) == sorted(CASES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_finds_its_combination_says_how_to_get_out_and_leaves_its_neighbours_alone(rule):
    (words, where), (severity, *neighbours) = CASES[rule]
    config, facts = ReplayConfig(**settings(words)), machine(where)
    record = RECORDED.get(rule)
    (finding,) = [finding for finding in check_config(config, facts, record) if finding.id == rule]
    assert finding.severity == severity
    assert finding.ways_out and "{" not in finding.message + "".join(finding.ways_out)
    for beside in neighbours:
        changed = (config, machine(beside)) if beside.startswith("on ") else (replace(config, **settings(beside)), facts)
        assert rule not in {finding.id for finding in check_config(*changed)}, changed
    if severity == "refuse":
        with pytest.raises(Unsupported) as refused:
            refuse(config, choose(config, record, facts), facts)
        assert refused.value.message and refused.value.hint.startswith(f"try: {finding.ways_out[0]}")


def test_warnings_stop_nothing_and_the_worst_comes_first():
    config = ReplayConfig(backend="deepspeed", zero_stage=3, dtype="bf16")
    findings = check_config(config, LAPTOP)
    refuse_hits(findings)
    assert [finding.severity for finding in findings] == ["warn", "info"]
    worse = check_config(replace(config, attn="flash_attention_2"), LAPTOP)
    assert [finding.severity for finding in worse] == ["refuse", "warn", "info"]


def test_heads_are_read_from_the_models_own_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 6, "num_key_value_heads": 3}}')
    finding = next(one for one in check_config(replace(TP, model=str(tmp_path)), LAPTOP) if one.severity == "refuse")
    assert finding.id == "tp-does-not-divide-heads" and "has 6 and 3" in finding.message
    assert finding.ways_out[0] == "--tp 1"
    assert not any(one.severity == "refuse" for one in check_config(replace(TP, tp=3, nproc=3, model=str(tmp_path)), LAPTOP))
