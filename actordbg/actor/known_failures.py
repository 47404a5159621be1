"""Combinations that are known to fail, or to give wrong numbers, before anything is started.

Each rule is a predicate over the configuration and what the environment has, with its explanation and the ways out. Three
severities:

* refuse: it cannot run here, or it runs and the numbers are wrong. A replay that "passes" with wrong log-probs is worse than
  one that fails, so it is not started (`Unsupported`, exit code 3).
* warn: it may fail, or differ for a known reason.
* info: what a reader of the result should know.

Pure: no torch, so the desk checks a configuration before it starts a process, and the worker checks again with what its own
process sees.

Example:
    >>> [hit.id for hit in check_config(ReplayConfig(backend="deepspeed", deepcompile=True), laptop)]
    ['deepcompile-needs-cuda', 'vocabulary-folded']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from actordbg.actor.rules import INFO, PARALLEL_RULES, REFUSE, WARN, Case, Rule, RuleHit
from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.base.imports import is_there
from actordbg.config.choices import Choices, Facts, adapter_of, are_elsewhere, choose, gather_facts, through_of
from actordbg.config.replay_config import TINY, ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.nested_values import CONTEXT
from actordbg.trainers.find_adapter import absent_trainer
from actordbg.trainers.trainer import TRAINER

PACKED_SINCE = (4, 53)
"""The transformers release from which sdpa and eager attention keep packed rows apart."""

LEAKED = (
    "the run's packed rows saw each other: transformers keeps rows apart by position_ids only without an attention mask and "
    "without a cache (use_cache=False)"
)


def leaked(record: DumpRecord | None) -> bool:
    """Whether a call was recorded whose packed rows transformers did not keep apart; flash attention does so in any case."""
    if record is None or not record.packing_samples or not record.arguments.get(f"{CONTEXT}rows_leak"):
        return False
    return "flash" not in str(record.actor.get("attn_implementation"))


RULES: tuple[Rule, ...] = (
    *PARALLEL_RULES,
    Rule(
        "packing-leaks",
        lambda case: case.packing and case.attn in ("sdpa", "eager") and () < case.version("transformers") < PACKED_SINCE,
        "packing with {attn} attention is silently wrong with transformers {transformers}: packed rows attend to each other "
        "(log-probs off by several nats), because only transformers 4.53 and later find the borders of packed rows",
        ("upgrade transformers to 4.53 or later", "--no-packing", "--attn flash_attention_2 where flash-attn is installed"),
    ),
    Rule(
        "recorded-rows-leaked",
        lambda case: leaked(case.record),
        f"{LEAKED}; this replay keeps them apart, so its log-probs differ from the run's",
        ("train with model(..., use_cache=False), without attention_mask", "train with flash_attention_2"),
        severity=WARN,
    ),
    Rule(
        "flash-attention-unavailable",
        lambda case: case.attn == "flash_attention_2" and not (case.cuda and case.flash_attn),
        "flash_attention_2 was asked for, but {missing_for_flash}",
        ("--attn sdpa", "pip install flash-attn, on a machine with CUDA"),
    ),
    Rule(
        "deepcompile-needs-cuda",
        lambda case: case.deepcompile and not case.cuda,
        "DeepCompile runs on CUDA only: DeepSpeed builds its operators with the CUDA compiler and falls back in silence "
        "elsewhere",
        ("--compile, which runs torch.compile through the DeepSpeed engine", "a machine with CUDA"),
    ),
    Rule(
        "memory-snapshot-needs-cuda",
        lambda case: case.memory_snapshot and not case.cuda,
        "torch keeps a history of allocations on CUDA only, and there is none here",
        ("leave --memory-snapshot out, and watch the process: `actordbg memory watch --replay last`", "a machine with CUDA"),
    ),
    Rule(
        "deepcompile-needs-zero",
        lambda case: case.deepcompile and case.zero_stage not in (1, 2, 3),
        "DeepCompile optimises the communication of ZeRO 1 to 3; at stage {zero_stage} there is nothing for it to do, and "
        "DeepSpeed falls back to torch.compile in silence",
        ("--zero-stage 1 or --zero-stage 3", "--compile"),
    ),
    Rule(
        "compiler-missing",
        lambda case: case.compile and case.compile_backend in (None, "inductor") and not case.cuda and not case.compiler,
        "torch.compile's inductor needs a C++ compiler on a CPU, and none is on PATH",
        (
            "--compile-backend aot_eager, which traces graphs and autograd and generates no code",
            "install g++ or clang++, or name one in CXX",
            "leave --compile out",
        ),
    ),
    Rule(
        "fp16-on-cpu",
        lambda case: case.deepspeed and case.dtype == "fp16" and not case.cuda,
        "DeepSpeed does not train in fp16 on a CPU",
        ("--dtype fp32, which is also the fastest here", "--dtype bf16", "--backend plain"),
    ),
    Rule(
        "too-few-gpus",
        lambda case: case.together and case.cuda and case.nproc > max(case.gpus, 1),
        "{nproc} processes were asked for, and {gpus} GPUs are visible: NCCL refuses two ranks on one GPU",
        ("--nproc {gpus}", "--backend plain, whose ranks are independent and may share a GPU"),
    ),
    Rule(
        "more-processes-than-cores",
        lambda case: not case.cuda and 0 < case.cpus < case.nproc,
        "{nproc} processes were asked for, and {cpus} CPU cores are usable: all that start take turns, and each holds the model",
        ("--nproc {cpus}",),
        severity=WARN,
    ),
    Rule(
        "varlen-flash-attention-under-compile",
        lambda case: case.attn == "flash_attention_2" and case.packing and case.compiles,
        "packing calls flash-attn's variable-length kernel with max_seqlen_q, which under torch.compile is a FakeTensor "
        "where the kernel wants a number: many versions fail there",
        ("--attn sdpa", "--no-packing", "leave --compile and --deepcompile out"),
        severity=WARN,
    ),
    Rule(
        "zero3-bf16-rotary",
        lambda case: case.deepspeed and case.zero_stage == 3 and case.dtype != "fp32",
        "under ZeRO-3 the rotary embedding's inv_freq is made in {dtype} (fp32 at stages 0 to 2), so log-probs differ in "
        "about the fourth digit from those of other stages with the same weights",
        ("--dtype fp32 to compare stages", "compare ZeRO-3 with ZeRO-3"),
        severity=WARN,
    ),
    Rule(
        "zero3-breaks-graphs",
        lambda case: case.deepspeed and case.zero_stage == 3 and case.compile,
        "under ZeRO-3, DeepSpeed's hooks gather weights around every module and break the graph there: a two-layer model "
        "compiles into 20 graphs with 80 breaks instead of one graph, and takes minutes",
        ("--zero-stage 0, 1 or 2", "--deepcompile, which puts the gathering into the graph (needs CUDA)"),
        severity=WARN,
    ),
    Rule(
        "compile-takes-time",
        lambda case: case.compiles and case.timeout_s < 120,
        "the first input of a compiled replay includes the compilation (on a CPU 30 to 60 s even for a tiny model), and the "
        "timeout of {timeout_s:g} s counts it",
        ("--timeout 600",),
        severity=WARN,
    ),
    Rule(
        "plain-ranks-are-independent",
        lambda case: case.backend == "plain" and case.nproc > 1,
        "{nproc} plain processes share the inputs and do not communicate: collectives and ZeRO are not part of this replay",
        ("--backend deepspeed",),
        severity=INFO,
    ),
    Rule(
        "vocabulary-folded",
        lambda case: case.model == TINY,
        "the tiny model has random weights and a small vocabulary: larger token ids are folded into it (id modulo size), so "
        "log-probs compare between replays, not with the run",
        ("--model NAME or PATH of the run's model",),
        severity=INFO,
    ),
)


def check_config(config: ReplayConfig, facts: Facts | None = None, defaults: DumpRecord | None = None) -> list[RuleHit]:
    """Return every known thing about this configuration here, worst first. UsageError for values that mean nothing anywhere.

    defaults: the record of the first dump.
    """
    facts = facts or gather_facts()
    return _check(Case(config, choose(config, defaults, facts), facts, defaults))


def _check(case: Case) -> list[RuleHit]:
    hits = [rule.hit(case) for rule in RULES if rule.applies(case)]
    return sorted(hits, key=lambda hit: (REFUSE, WARN, INFO).index(hit.severity))


def refuse(config: ReplayConfig, choices: Choices, facts: Facts) -> None:
    """Raise Unsupported if a rule refuses this configuration, with the reason and the ways out."""
    refuse_hits(_check(Case(config, choices, facts)))


def refuse_hits(hits: Sequence[RuleHit]) -> None:
    """Raise Unsupported if one of these is a refusal."""
    if stops := [hit for hit in hits if hit.severity == REFUSE]:
        raise Unsupported("; ".join(hit.message for hit in stops), hint="; or ".join(stops[0].ways_out))


def find_trainer(config: ReplayConfig, defaults: DumpRecord | None = None) -> None:
    """EnvironmentProblem where torch, or the trainer whose code a configuration asks for, is not installed."""
    require_torch()
    if problem := missing_trainer(config, defaults):
        raise problem


def missing_trainer(config: ReplayConfig, defaults: DumpRecord | None = None) -> EnvironmentProblem | None:
    """Returns the same as a value; None where nothing is missing, the truth is asked for, or replays run on other machines."""
    if config.truth or are_elsewhere():
        return None
    adapter = adapter_of(defaults.actor) if defaults else None
    if through_of(config, adapter) == "rows":
        return None
    return TRAINER.absent() if adapter is None else absent_trainer(adapter)


def require_torch() -> None:
    """EnvironmentProblem where nothing can be computed, unless replays run on other machines."""
    missing = [name for name in ("torch", "transformers") if not is_there(name)]
    if missing and not are_elsewhere():
        raise EnvironmentProblem(
            f"nothing can be replayed here: {' and '.join(missing)} not installed in {sys.executable}'s environment",
            hint=f"run it in the training environment; or {sys.executable} -m pip install 'actordbg[replay]'",
        )
