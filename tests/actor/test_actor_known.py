"""Combinations that are known to fail or to be wrong: named before anything starts, with the ways out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from actorcases import make_dump

from actordbg.actor.known_failures import RULES, check_config, refuse, refuse_hits
from actordbg.base.errors import Unsupported
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import ReplayConfig

NEW = {"transformers": "5.15.0", "torch": "2.13.0"}
LAPTOP = Facts(cuda=False, gpus=0, flash_attn=False, compiler=True, versions=NEW)
SERVER = Facts(cuda=True, gpus=2, flash_attn=True, compiler=True, versions=NEW)

RING_SERVER = replace(SERVER, versions=NEW | {"ring-flash-attn": "0.1.8"})
deepspeed, fsdp2 = partial(ReplayConfig, backend="deepspeed"), partial(ReplayConfig, backend="fsdp2")
TP = fsdp2(tp=2, nproc=2)
RING = fsdp2(ring=2, nproc=2, packing=True)

RECORDED = {
    "recorded-rows-leaked": make_dump(arguments={"context.rows_leak": True}, packing_samples=True).record,
    "trainer-cannot-be-called": make_dump(actor={"adapter": "nobody"}).record,
    "trainers-function-is-alone": make_dump(actor={"adapter": "trl"}).record,
}
"""The dump that a rule is about, where it is about one."""

CASES = {
    "trainers-function-is-alone": (
        fsdp2(through="trainer"), LAPTOP, "refuse", [(fsdp2(), LAPTOP)],
    ),
    "trainer-cannot-be-called": (ReplayConfig(through="trainer"), LAPTOP, "refuse", [(ReplayConfig(through="trainer"), LAPTOP)]),
    "packing-leaks": (
        ReplayConfig(packing=True, attn="sdpa"), replace(SERVER, versions={"transformers": "4.52.4"}), "refuse",
        [(ReplayConfig(packing=True, attn="sdpa"), replace(SERVER, versions={"transformers": "4.53.0"})),
         (ReplayConfig(packing=True), replace(SERVER, versions={"transformers": "4.52.4"})),
         (ReplayConfig(packing=False, attn="eager"), replace(SERVER, versions={"transformers": "4.52.4"}))],
    ),
    "recorded-rows-leaked": (ReplayConfig(), LAPTOP, "warn", []),
    "flash-attention-unavailable": (
        ReplayConfig(attn="flash_attention_2"), LAPTOP, "refuse",
        [(ReplayConfig(), LAPTOP), (ReplayConfig(attn="flash_attention_2"), SERVER)],
    ),
    "deepcompile-needs-cuda": (
        deepspeed(zero_stage=1, deepcompile=True), LAPTOP, "refuse",
        [(deepspeed(zero_stage=1, deepcompile=True), SERVER)],
    ),
    "memory-snapshot-needs-cuda": (
        ReplayConfig(memory_snapshot=True), LAPTOP, "refuse", [(ReplayConfig(memory_snapshot=True), SERVER)],
    ),
    "deepcompile-needs-zero": (
        deepspeed(deepcompile=True), SERVER, "refuse",
        [(deepspeed(zero_stage=3, deepcompile=True), SERVER)],
    ),
    "compiler-missing": (
        ReplayConfig(compile=True), replace(LAPTOP, compiler=False), "refuse",
        [
            (ReplayConfig(compile=True), LAPTOP), (ReplayConfig(), replace(LAPTOP, compiler=False)),
            (ReplayConfig(compile=True, compile_backend="aot_eager"), replace(LAPTOP, compiler=False)),
        ],
    ),
    "fp16-on-cpu": (
        deepspeed(dtype="fp16"), LAPTOP, "refuse",
        [(deepspeed(dtype="fp16"), SERVER), (ReplayConfig(dtype="fp16"), LAPTOP)],
    ),
    "too-few-gpus": (
        deepspeed(nproc=3), SERVER, "refuse",
        [(deepspeed(nproc=2), SERVER), (deepspeed(nproc=3), LAPTOP)],
    ),
    "more-processes-than-cores": (
        ReplayConfig(nproc=200), replace(LAPTOP, cpus=2), "warn",
        [(ReplayConfig(nproc=2), replace(LAPTOP, cpus=2)), (ReplayConfig(nproc=200), LAPTOP), (ReplayConfig(nproc=200), replace(SERVER, cpus=2))],
    ),
    "plain-ranks-share-nothing": (
        ReplayConfig(ring=2, nproc=2, packing=True), LAPTOP, "refuse",
        [(ReplayConfig(nproc=2), LAPTOP), (TP, LAPTOP), (replace(RING, backend="deepspeed"), LAPTOP)],
    ),
    "fsdp2-needs-torch": (
        fsdp2(), replace(LAPTOP, versions=NEW | {"torch": "2.5.1+cpu"}), "refuse",
        [(fsdp2(), LAPTOP), (ReplayConfig(), replace(LAPTOP, versions=NEW | {"torch": "2.5.1"}))],
    ),
    "autotp-needs-bf16": (replace(TP, backend="deepspeed"), LAPTOP, "refuse", [(TP, LAPTOP)]),
    "tp-does-not-divide-heads": (
        replace(TP, tp=4, nproc=4), LAPTOP, "refuse", [(TP, LAPTOP), (replace(TP, tp=4, nproc=4, model="some/hub-model"), LAPTOP)],
    ),
    "tp-under-compile": (
        replace(TP, compile=True), LAPTOP, "refuse",
        [(TP, LAPTOP), (replace(TP, compile=True, compile_backend="eager"), LAPTOP), (ReplayConfig(compile=True), LAPTOP)],
    ),
    "ring-needs-packing": (
        replace(RING, packing=False), LAPTOP, "refuse", [(RING, LAPTOP), (fsdp2(), LAPTOP)],
    ),
    "ring-on-the-rows": (
        replace(RING, through="rows"), LAPTOP, "refuse", [(RING, LAPTOP), (ReplayConfig(through="rows"), LAPTOP)],
    ),
    "ring-attention-kernel": (
        replace(RING, attn="sdpa"), RING_SERVER, "refuse",
        [(replace(RING, attn="sdpa"), SERVER), (RING, RING_SERVER), (replace(RING, attn="sdpa"), LAPTOP)],
    ),
    "ring-flash-attn-missing": (RING, SERVER, "refuse", [(RING, RING_SERVER), (RING, LAPTOP)]),
    "nccl-needs-cuda": (
        fsdp2(dist_backend="nccl"), LAPTOP, "refuse",
        [(fsdp2(dist_backend="nccl"), SERVER), (fsdp2(dist_backend="gloo"), LAPTOP)],
    ),
    "gloo-with-cuda": (
        fsdp2(dist_backend="gloo"), SERVER, "warn",
        [(fsdp2(), SERVER), (fsdp2(dist_backend="gloo"), LAPTOP)],
    ),
    "fsdp2-breaks-graphs": (
        fsdp2(compile=True), LAPTOP, "warn",
        [(fsdp2(), LAPTOP), (ReplayConfig(compile=True), LAPTOP)],
    ),
    "ring-kernel-stands-in": (RING, LAPTOP, "info", [(RING, RING_SERVER), (fsdp2(), LAPTOP)]),
    "varlen-flash-attention-under-compile": (
        ReplayConfig(packing=True, compile=True), SERVER, "warn",
        [(ReplayConfig(packing=True), SERVER), (ReplayConfig(compile=True), SERVER), (ReplayConfig(packing=True, compile=True), LAPTOP)],
    ),
    "zero3-bf16-rotary": (
        deepspeed(zero_stage=3, dtype="bf16"), LAPTOP, "warn",
        [(deepspeed(zero_stage=3, dtype="fp32"), LAPTOP),
         (deepspeed(zero_stage=2, dtype="bf16"), LAPTOP)],
    ),
    "zero3-breaks-graphs": (
        deepspeed(zero_stage=3, compile=True), LAPTOP, "warn",
        [(deepspeed(zero_stage=2, compile=True), LAPTOP)],
    ),
    "compile-takes-time": (
        ReplayConfig(compile=True, timeout_s=30), LAPTOP, "warn",
        [(ReplayConfig(timeout_s=30), LAPTOP), (ReplayConfig(compile=True), LAPTOP)],
    ),
    "plain-ranks-are-independent": (
        ReplayConfig(nproc=2), LAPTOP, "info",
        [(ReplayConfig(), LAPTOP), (deepspeed(nproc=2), LAPTOP)],
    ),
    "vocabulary-folded": (ReplayConfig(), LAPTOP, "info", [(ReplayConfig(model="gpt2"), LAPTOP)]),
}  # fmt: skip


def test_every_rule_has_a_case_here():
    assert sorted(rule.id for rule in RULES) == sorted(CASES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_finds_its_combination_says_how_to_get_out_and_leaves_its_neighbours_alone(rule: str):
    config, facts, severity, neighbours = CASES[rule]
    record = RECORDED.get(rule)
    (finding,) = [finding for finding in check_config(config, facts, record) if finding.id == rule]
    assert finding.severity == severity
    assert finding.ways_out and "{" not in finding.message + "".join(finding.ways_out)
    for config_beside, facts_beside in neighbours:
        assert rule not in {finding.id for finding in check_config(config_beside, facts_beside)}, (config_beside, facts_beside)
    if severity == "refuse":
        with pytest.raises(Unsupported) as refused:
            refuse(config, choose(config, record, facts), facts)
        assert refused.value.message and refused.value.hint


def test_warnings_stop_nothing_and_the_worst_comes_first():
    config = ReplayConfig(backend="deepspeed", zero_stage=3, dtype="bf16")
    findings = check_config(config, LAPTOP)
    refuse_hits(findings)
    assert [finding.severity for finding in findings] == ["warn", "info"]
    worse = check_config(replace(config, attn="flash_attention_2"), LAPTOP)
    assert [finding.severity for finding in worse] == ["refuse", "warn", "info"]


def test_flash_attention_says_which_part_is_missing():
    message = check_config(ReplayConfig(attn="flash_attention_2"), replace(SERVER, flash_attn=False))[0].message
    assert "flash-attn is not installed" in message and "CUDA" not in message


def test_heads_are_read_from_the_models_own_configuration(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 6, "num_key_value_heads": 3}}')
    finding = next(one for one in check_config(replace(TP, model=str(tmp_path)), LAPTOP) if one.severity == "refuse")
    assert finding.id == "tp-does-not-divide-heads" and "has 6 and 3" in finding.message
    assert finding.ways_out[0] == "--tp 1"
    assert not any(one.severity == "refuse" for one in check_config(replace(TP, tp=3, nproc=3, model=str(tmp_path)), LAPTOP))


def test_an_eager_ring_is_refused_with_the_attention_that_has_one():
    findings = {one.id: one for one in check_config(replace(RING, attn="eager"), LAPTOP)}
    assert findings["ring-attention-kernel"].ways_out == ("--attn sdpa",)
