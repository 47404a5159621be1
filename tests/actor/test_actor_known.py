"""Combinations that are known to fail or to be wrong: named before anything starts, with the workarounds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from actorcases import make_dump

from actordbg.actor.rules import RULES, check_config, refuse, refuse_hits
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


def here(**versions: str) -> Facts:
    return replace(LAPTOP, versions=NEW | versions)


OLD = replace(SERVER, versions={"transformers": "4.52.4"})
SMALL, BARE = replace(LAPTOP, cpus=2), replace(LAPTOP, compiler=False)
PACKED = ReplayConfig(packing=True, attn="sdpa")
SHARDED = deepspeed(zero_stage=1, deepcompile=True)
COMPILED = ReplayConfig(compile=True)

CASES: dict[str, tuple[ReplayConfig, Facts, str, list[Any]]] = {
    "endpoint-needs-the-model": (
        ReplayConfig(backend="endpoint", url="http://127.0.0.1:8000"), LAPTOP, "refuse", [{"model": "some/hub-model"}],
    ),
    "trainers-function-is-alone": (fsdp2(through="trainer"), LAPTOP, "refuse", [{"through": None}]),
    "trainer-cannot-be-called": (ReplayConfig(through="trainer"), LAPTOP, "refuse", [{}]),
    "packing-leaks": (
        PACKED, OLD, "refuse",
        [replace(SERVER, versions={"transformers": "4.53.0"}), {"attn": None}, {"packing": False, "attn": "eager"}],
    ),
    "recorded-rows-leaked": (ReplayConfig(), LAPTOP, "warn", []),
    "flash-attention-unavailable": (ReplayConfig(attn="flash_attention_2"), LAPTOP, "refuse", [{"attn": None}, SERVER]),
    "deepcompile-needs-cuda": (SHARDED, LAPTOP, "refuse", [SERVER]),
    "memory-snapshot-needs-cuda": (ReplayConfig(memory_snapshot=True), LAPTOP, "refuse", [SERVER]),
    "deepcompile-needs-zero": (deepspeed(deepcompile=True), SERVER, "refuse", [{"zero_stage": 3}]),
    "compiler-missing": (COMPILED, BARE, "refuse", [LAPTOP, {"compile": False}, {"compile_backend": "aot_eager"}]),
    "fp16-on-cpu": (deepspeed(dtype="fp16"), LAPTOP, "refuse", [SERVER, {"backend": "plain"}]),
    "too-few-gpus": (deepspeed(nproc=3), SERVER, "refuse", [{"nproc": 2}, LAPTOP]),
    "more-processes-than-cores": (ReplayConfig(nproc=200), SMALL, "warn", [{"nproc": 2}, LAPTOP, replace(SERVER, cpus=2)]),
    "plain-ranks-share-nothing": (
        replace(RING, backend="plain"), LAPTOP, "refuse", [{"ring": 1}, {"backend": "fsdp2"}, {"backend": "deepspeed"}],
    ),
    "fsdp2-needs-torch": (fsdp2(), here(torch="2.5.1+cpu"), "refuse", [LAPTOP, {"backend": "plain"}]),
    "autotp-needs-bf16": (replace(TP, backend="deepspeed"), LAPTOP, "refuse", [{"backend": "fsdp2"}]),
    "tp-does-not-divide-heads": (
        replace(TP, tp=4, nproc=4), LAPTOP, "refuse", [{"tp": 2, "nproc": 2}, {"model": "some/hub-model"}],
    ),
    "tp-under-compile": (
        replace(TP, compile=True), LAPTOP, "refuse", [{"compile": False}, {"compile_backend": "eager"}, {"tp": 1}],
    ),
    "ring-needs-packing": (replace(RING, packing=False), LAPTOP, "refuse", [{"packing": True}, {"ring": 1}]),
    "ring-on-the-rows": (replace(RING, through="rows"), LAPTOP, "refuse", [{"through": None}, {"ring": 1}]),
    "ring-attention-kernel": (replace(RING, attn="sdpa"), RING_SERVER, "refuse", [SERVER, {"attn": None}, LAPTOP]),
    "ring-flash-attn-missing": (RING, SERVER, "refuse", [RING_SERVER, LAPTOP]),
    "nccl-needs-cuda": (fsdp2(dist_backend="nccl"), LAPTOP, "refuse", [SERVER, {"dist_backend": "gloo"}]),
    "gloo-with-cuda": (fsdp2(dist_backend="gloo"), SERVER, "warn", [{"dist_backend": None}, LAPTOP]),
    "fsdp2-breaks-graphs": (fsdp2(compile=True), LAPTOP, "warn", [{"compile": False}, {"backend": "plain"}]),
    "ring-kernel-stands-in": (RING, LAPTOP, "info", [RING_SERVER, {"ring": 1}]),
    "varlen-flash-attention-under-compile": (
        replace(COMPILED, packing=True), SERVER, "warn", [{"compile": False}, {"packing": None}, LAPTOP],
    ),
    "zero3-bf16-rotary": (deepspeed(zero_stage=3, dtype="bf16"), LAPTOP, "warn", [{"dtype": "fp32"}, {"zero_stage": 2}]),
    "zero3-breaks-graphs": (deepspeed(zero_stage=3, compile=True), LAPTOP, "warn", [{"zero_stage": 2}]),
    "compile-takes-time": (replace(COMPILED, timeout_s=30), LAPTOP, "warn", [{"compile": False}, {"timeout_s": 600.0}]),
    "plain-ranks-are-independent": (ReplayConfig(nproc=2), LAPTOP, "info", [{"nproc": 1}, {"backend": "deepspeed"}]),
    "vocabulary-folded": (ReplayConfig(), LAPTOP, "info", [{"model": "gpt2"}]),
}  # fmt: skip
"""A configuration, a machine and the severity; and its neighbours: another machine, or what is otherwise in the configuration."""


def test_every_rule_has_a_case_here():
    assert sorted(rule.id for rule in RULES) == sorted(CASES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_finds_its_combination_says_how_to_get_out_and_leaves_its_neighbours_alone(rule: str):
    config, facts, severity, neighbours = CASES[rule]
    record = RECORDED.get(rule)
    (finding,) = [finding for finding in check_config(config, facts, record) if finding.id == rule]
    assert finding.severity == severity
    assert finding.ways_out and "{" not in finding.message + "".join(finding.ways_out)
    for beside in neighbours:
        changed = (replace(config, **beside), facts) if isinstance(beside, dict) else (config, beside)
        assert rule not in {finding.id for finding in check_config(*changed)}, changed
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


def test_heads_are_read_from_the_models_own_configuration(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 6, "num_key_value_heads": 3}}')
    finding = next(one for one in check_config(replace(TP, model=str(tmp_path)), LAPTOP) if one.severity == "refuse")
    assert finding.id == "tp-does-not-divide-heads" and "has 6 and 3" in finding.message
    assert finding.ways_out[0] == "--tp 1"
    assert not any(one.severity == "refuse" for one in check_config(replace(TP, tp=3, nproc=3, model=str(tmp_path)), LAPTOP))
