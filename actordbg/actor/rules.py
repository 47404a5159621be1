"""Combinations that are known to fail, or to give wrong numbers, before anything is started.

Each rule is a predicate over a case (the configuration and the environment) with an explanation and workarounds. Three
severities:

* refuse: it cannot run here, or it runs and the numbers are wrong. A replay that "passes" with wrong log-probs is worse than a
  failing replay, so it is not started (`Unsupported`, exit code 3).
* warn: it may fail, or differ for a known reason.
* info: a fact that a reader of the result should know.

Pure: no torch, so the desk checks a configuration before it starts a process, and the worker checks again with what its own
process sees.

Example:
    >>> [hit.id for hit in check_config(ReplayConfig(backend="deepspeed", deepcompile=True), laptop)]
    ['deepcompile-needs-cuda', 'vocabulary-folded']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from actordbg.actor.models import attention_heads
from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.base.imports import is_there
from actordbg.base.units import release
from actordbg.config.choices import Choices, Facts, adapter_of, are_elsewhere, choose, gather_facts, through_of
from actordbg.config.replay_config import ENDPOINT, TINY, ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.nested_values import FLASH_ROWS_LEAK, ROWS_LEAK
from actordbg.trainers.find_adapter import absent_trainer, callable_again, shards
from actordbg.trainers.trainer import TRAINER

FULLY_SHARD_SINCE = (2, 6)
"""The torch release from which `fully_shard` is public."""

REFUSE, WARN, INFO = "refuse", "warn", "info"


class Case(SimpleNamespace):
    """The input of a rule: each field of the decided configuration and of the environment by its name, and the `record` of the
    first dump. together: ranks compute together. ring_flash_attn: its kernel can run. function: the replay calls the function of
    a trainer with an adapter.
    """

    def __init__(self, config: ReplayConfig, choices: Choices, facts: Facts, record: DumpRecord | None = None) -> None:
        super().__init__(**vars(config) | vars(choices) | vars(facts), record=record)
        self.deepspeed, self.fsdp2 = self.backend == "deepspeed", self.backend == "fsdp2"
        self.zero3 = self.deepspeed and self.zero_stage == 3
        self.together, self.compiles = self.deepspeed or self.fsdp2, self.compile or self.deepcompile
        self.ring_flash_attn = self.cuda and "ring-flash-attn" in self.versions
        self.function = self.through == "trainer" and self.adapter is not None

    @property
    def heads(self) -> tuple[int, int]:
        """(attention heads, key/value heads); (0, 0), which everything divides, if they are unknown here."""
        return attention_heads(self.model) or (0, 0)

    def version(self, package: str) -> tuple[int, ...]:
        """Return a package's version, (4, 52, 4) for "4.52.4"; () if it is not installed."""
        return release(self.versions.get(package, ""))


@dataclass(frozen=True)
class KnownFailure:
    """A known combination, or what it says about a configuration: `id` is stable, `ways_out` are workarounds, best first."""

    id: str
    applies: Callable[[Case], bool]
    message: str
    ways_out: tuple[str, ...]
    severity: str = REFUSE

    def hit(self, case: Case) -> KnownFailure:
        """Return the rule with the placeholders of its texts filled in, from `_words(case)`."""
        words = _words(case)
        ways_out = tuple(way.format_map(words) for way in self.ways_out)
        return replace(self, message=self.message.format_map(words), ways_out=ways_out)


_warning, _remark = partial(KnownFailure, severity=WARN), partial(KnownFailure, severity=INFO)


def _words(case: Case) -> Mapping[str, object]:
    needed = {"there is no CUDA device": case.cuda, "flash-attn is not installed": case.flash_attn}
    heads, kv_heads = case.heads
    requested = {"--tp": case.tp > 1, "--ring": case.ring > 1, "--dist-backend": case.dist_backend is not None}
    alone = "only sdpa has a stand-in that reaches the others' tokens"
    return {
        **vars(case),
        "heads": heads,
        "kv_heads": kv_heads,
        "parallel": " and ".join(option for option, given in requested.items() if given),
        "ring_attn": "flash_attention_2" if case.ring_flash_attn else "sdpa",
        "ring_kernels": "ring_flash_attn replaces only flash_attention_2" if case.ring_flash_attn else alone,
        "trainer": TRAINER.name,
        "torch": case.versions.get("torch", "?"),
        "tp_fits": max(n for n in range(1, case.tp + 1) if not (heads % n or kv_heads % n)),
        "transformers": case.versions.get("transformers", "?"),
        "missing_for_flash": " and ".join(lack for lack, there in needed.items() if not there),
    }


PACKED_SINCE = (4, 53)
"""The transformers release from which sdpa and eager attention keep packed rows apart."""

LEAKED = (
    "the run's packed rows leaked into each other: transformers keeps rows apart by position_ids only without an attention mask "
    "and without a cache (use_cache=False); flash attention only in a batch of one row without padding"
)


def leaked(record: DumpRecord | None) -> bool:
    """Return whether the recorded call's packed rows leaked into each other."""
    if record is None or not record.packing_samples:
        return False
    flash = "flash" in str(record.actor.get("attn_implementation"))
    return bool(record.arguments.get(FLASH_ROWS_LEAK if flash else ROWS_LEAK))


RULES: tuple[KnownFailure, ...] = (
    KnownFailure(
        "endpoint-needs-the-model",
        lambda case: case.backend == ENDPOINT and case.model == TINY,
        "a server's log-probs are judged by the checkpoint that it serves, and `tiny` is another model",
        ("--model PATH of the served checkpoint",),
    ),
    KnownFailure(
        "trainer-cannot-be-called",
        lambda case: case.function and not callable_again(str(case.adapter)),
        "adapter {adapter} is not installed here, or has no `again`, so its trainer's function cannot be called on its own",
        ("--through rows, which needs no trainer", "announce the adapter as an entry point, with a seam that has `again`"),
    ),
    KnownFailure(
        "trainers-function-is-alone",
        lambda case: case.function and (case.compiles or (case.together and not (case.fsdp2 and shards(str(case.adapter))))),
        "the trainer's function is called with a plain model: nothing is sharded or compiled around it",
        ("--backend plain, without --compile", "--through rows"),
    ),
    KnownFailure(
        "plain-ranks-share-nothing",
        lambda case: not case.together and (case.tp > 1 or case.ring > 1 or case.dist_backend is not None),
        "{parallel} needs a distributed backend: plain ranks are independent of each other",
        ("--backend fsdp2", "drop {parallel}"),
    ),
    KnownFailure(
        "fsdp2-needs-torch",
        lambda case: case.fsdp2 and () < case.version("torch") < FULLY_SHARD_SINCE,
        "fsdp2 is torch's `fully_shard`, which became public in torch 2.6; this is torch {torch}",
        ("upgrade torch", "--backend deepspeed --zero-stage 3, which shards the same"),
    ),
    KnownFailure(
        "autotp-needs-bf16",
        lambda case: case.deepspeed and case.tp > 1,
        "tensor parallelism under DeepSpeed is its AutoTP, which {trainer} allows in bf16 only: its results could "
        "not be distinguished from rounding, and DeepSpeed cannot gather its single gradients",
        ("--backend fsdp2 --tp {tp}, by transformers' own plan", "drop --tp"),
    ),
    KnownFailure(
        "tp-does-not-divide-heads",
        lambda case: case.fsdp2 and any(count % case.tp for count in case.heads),
        "--tp {tp} gives every rank equally many attention heads and key/value heads, and {model} has {heads} and {kv_heads}",
        ("--tp {tp_fits}", "--ring, which divides tokens instead"),
    ),
    KnownFailure(
        "tp-under-compile",
        lambda case: case.fsdp2 and case.tp > 1 and case.compile and case.compile_backend != "eager",
        "torch.compile cannot trace the model of fsdp2 with tensor parallelism (BackendCompilerFailed, a "
        "RecursionError in autograd's tracing; torch 2.13)",
        ("--compile-backend eager, which traces no autograd", "drop --compile", "drop --tp"),
    ),
    KnownFailure(
        "ring-needs-packing",
        lambda case: case.together and case.ring > 1 and not case.packing,
        "ring attention divides a packed batch: {trainer} ignores the ring if rows are not packed, and every rank would "
        "compute the same",
        ("--packing",),
    ),
    KnownFailure(
        "ring-on-the-rows",
        lambda case: case.ring > 1 and case.through == "rows",
        "ring attention is part of {trainer}'s Actor: without it, each rank would compute the same",
        ("--through trainer", "drop --ring"),
    ),
    KnownFailure(
        "ring-attention-kernel",
        lambda case: case.ring > 1 and (case.attn == "eager" or (case.attn == "sdpa" and case.ring_flash_attn)),
        "with {attn} attention each rank of a ring would attend to its own tokens only: {ring_kernels}",
        ("--attn {ring_attn}",),
    ),
    KnownFailure(
        "ring-flash-attn-missing",
        lambda case: case.ring > 1 and case.attn == "flash_attention_2" and not case.ring_flash_attn,
        "a ring with flash_attention_2 needs ring_flash_attn, which is not installed (or there is no CUDA for it)",
        ("--attn sdpa, which gathers keys and values instead", "pip install ring-flash-attn"),
    ),
    KnownFailure(
        "nccl-needs-cuda",
        lambda case: case.dist_backend == "nccl" and not case.cuda,
        "nccl moves data between CUDA devices, and there is none",
        ("--dist-backend gloo", "drop --dist-backend"),
    ),
    _warning(
        "gloo-with-cuda",
        lambda case: case.together and case.dist_backend == "gloo" and case.cuda,
        "gloo moves CUDA tensors through host memory, and lacks some of the collectives that sharding uses for them",
        ("--dist-backend nccl",),
    ),
    _warning(
        "fsdp2-breaks-graphs",
        lambda case: case.fsdp2 and case.compile,
        "under fsdp2 the hooks that gather weights break the graph at every layer: a two-layer model compiles into 5 graphs with "
        "4 breaks instead of one graph (11 with 8 in a ring)",
        ("--backend deepspeed, at stages 0 to 2 one graph",),
    ),
    _remark(
        "ring-kernel-stands-in",
        lambda case: case.together and case.ring > 1 and case.attn == "sdpa",
        "keys and values are gathered in plain torch instead of ring_flash_attn: {trainer}'s slicing, gathering and "
        "reducing run as they do in training, the ring's kernel does not",
        ("--attn flash_attention_2, with CUDA and ring_flash_attn",),
    ),
    KnownFailure(
        "packing-leaks",
        lambda case: case.packing and case.attn in ("sdpa", "eager") and () < case.version("transformers") < PACKED_SINCE,
        "packing with {attn} attention is silently wrong with transformers {transformers}: packed rows attend to each other "
        "(log-probs off by several nats), because only transformers 4.53 and later find the borders of packed rows",
        ("upgrade transformers to 4.53 or later", "--no-packing", "--attn flash_attention_2 where flash-attn is installed"),
    ),
    _warning(
        "recorded-rows-leaked",
        lambda case: leaked(case.record),
        f"{LEAKED}; this replay keeps them apart, so its log-probs differ from the run's",
        ("train with model(..., use_cache=False), without attention_mask, and with flash attention in a batch of one row",),
    ),
    KnownFailure(
        "zero3-cannot-load",
        lambda case: (
            case.zero3
            and case.through != "rows"
            and (0, 10, 3) <= case.version(TRAINER.package) <= (0, 11, 2)
            and case.version("transformers") >= (5, 23)
        ),
        "{trainer} patches how transformers loads a model under ZeRO-3, and its patch expects a dictionary where transformers "
        "{transformers} yields one after the other: AttributeError, in training too",
        ("transformers 5.22 or earlier", "--backend fsdp2, which shards as much", "--through rows", "--zero-stage 2"),
    ),
    KnownFailure(
        "flash-attention-unavailable",
        lambda case: case.attn == "flash_attention_2" and not (case.cuda and case.flash_attn),
        "flash_attention_2 was requested, but {missing_for_flash}",
        ("--attn sdpa", "pip install flash-attn, on a machine with CUDA"),
    ),
    KnownFailure(
        "deepcompile-needs-cuda",
        lambda case: case.deepcompile and not case.cuda,
        "DeepCompile runs on CUDA only: elsewhere DeepSpeed cannot build its operators, and raises RuntimeError",
        ("--compile, which runs torch.compile through the DeepSpeed engine", "a machine with CUDA"),
    ),
    KnownFailure(
        "memory-snapshot-needs-cuda",
        lambda case: case.memory_snapshot and not case.cuda,
        "torch keeps a history of allocations on CUDA only, and there is none here",
        ("drop --memory-snapshot: the report has the peak memory of each input", "a machine with CUDA"),
    ),
    KnownFailure(
        "deepcompile-needs-zero",
        lambda case: case.deepcompile and case.zero_stage not in (1, 2, 3),
        "DeepCompile optimizes the communication of ZeRO 1 to 3; at stage {zero_stage} there is nothing for it to do, and "
        "DeepSpeed silently falls back to torch.compile",
        ("--zero-stage 1 or --zero-stage 3", "--compile"),
    ),
    KnownFailure(
        "compiler-missing",
        lambda case: case.compile and case.compile_backend in (None, "inductor") and not case.cuda and not case.compiler,
        "torch.compile's inductor needs a C++ compiler on a CPU, and none is on PATH",
        (
            "--compile-backend aot_eager, which traces graphs and autograd and generates no code",
            "install g++ or clang++, or name one in CXX",
            "drop --compile",
        ),
    ),
    KnownFailure(
        "fp16-on-cpu",
        lambda case: case.deepspeed and case.dtype == "fp16" and not case.cuda and not case.cpu_fp16,
        "DeepSpeed does not train in fp16 on a CPU without AVX512-FP16",
        ("--dtype fp32, which is also the fastest here", "--dtype bf16", "--backend plain"),
    ),
    KnownFailure(
        "too-few-gpus",
        lambda case: case.together and case.cuda and case.nproc > max(case.gpus, 1),
        "{nproc} processes were requested, and {gpus} GPUs are visible: NCCL refuses two ranks on one GPU",
        ("--nproc {gpus}", "--backend plain, whose ranks are independent and may share a GPU"),
    ),
    _warning(
        "more-processes-than-cores",
        lambda case: not case.cuda and 0 < case.cpus < case.nproc,
        "{nproc} processes were requested, and {cpus} CPU cores are usable: all that start take turns, and each holds the model",
        ("--nproc {cpus}",),
    ),
    _warning(
        "varlen-flash-attention-under-compile",
        lambda case: case.attn == "flash_attention_2" and case.packing and case.compiles,
        "packing calls flash-attn's variable-length kernel with max_seqlen_q, which under torch.compile is a FakeTensor "
        "where the kernel wants a number: many versions fail there",
        ("--attn sdpa", "--no-packing", "drop --compile and --deepcompile"),
    ),
    _warning(
        "zero3-bf16-rotary",
        lambda case: case.zero3 and case.dtype != "fp32",
        "under ZeRO-3 the rotary embedding's inv_freq is made in {dtype} (fp32 at stages 0 to 2), so log-probs differ in "
        "about the fourth digit from those of other stages with the same weights",
        ("--dtype fp32 to compare stages", "compare ZeRO-3 with ZeRO-3"),
    ),
    _warning(
        "zero3-breaks-graphs",
        lambda case: case.zero3 and case.compile,
        "under ZeRO-3, DeepSpeed's hooks gather weights around every module and break the graph there: a two-layer model "
        "compiles into 20 graphs with 80 breaks instead of one graph, and takes minutes",
        ("--zero-stage 0, 1 or 2", "--deepcompile, which puts the gathering into the graph (needs CUDA)"),
    ),
    _warning(
        "compile-takes-time",
        lambda case: case.compiles and case.timeout_s < 120,
        "the first input of a compiled replay includes the compilation (on a CPU 30 to 60 s even for a tiny model), and the "
        "timeout of {timeout_s:g} s counts it",
        ("--timeout 600",),
    ),
    _remark(
        "plain-ranks-are-independent",
        lambda case: case.backend == "plain" and case.nproc > 1,
        "{nproc} plain processes share the inputs and do not communicate: collectives and ZeRO are not part of this replay",
        ("--backend deepspeed",),
    ),
    _remark(
        "vocabulary-folded",
        lambda case: case.model == TINY,
        "the tiny model has random weights and a small vocabulary: larger token ids wrap around (id modulo size), so compare "
        "log-probs between replays, not with the run",
        ("--model NAME or PATH of the run's model",),
    ),
)


def check_config(config: ReplayConfig, facts: Facts | None = None, defaults: DumpRecord | None = None) -> list[KnownFailure]:
    """Return the hits of all rules here, worst first. defaults: the first dump's record. Raises UsageError for invalid values."""
    facts = facts or gather_facts()
    return _check(Case(config, choose(config, defaults, facts), facts, defaults))


def _check(case: Case) -> list[KnownFailure]:
    hits = [rule.hit(case) for rule in RULES if rule.applies(case)]
    return sorted(hits, key=lambda hit: (REFUSE, WARN, INFO).index(hit.severity))


def refuse(config: ReplayConfig, choices: Choices, facts: Facts) -> None:
    """Raise Unsupported if a rule refuses this configuration, with the reason and the workarounds."""
    refuse_hits(_check(Case(config, choices, facts)))


def refuse_hits(hits: Sequence[KnownFailure]) -> None:
    """Raise Unsupported if one of these is a refusal."""
    if stops := [hit for hit in hits if hit.severity == REFUSE]:
        workarounds = "; or ".join(stops[0].ways_out)
        raise Unsupported("; ".join(hit.message for hit in stops), hint=f"try: {workarounds}")


def refusal_of(config: ReplayConfig, defaults: DumpRecord | None) -> str | None:
    """Return why rules refuse this configuration here; None if they do not."""
    return next((hit.message for hit in check_config(config, defaults=defaults) if hit.severity == REFUSE), None)


def find_trainer(config: ReplayConfig, defaults: DumpRecord | None = None) -> None:
    """Raise EnvironmentProblem if torch, or the trainer whose code a configuration uses, is not installed."""
    require_torch()
    if problem := missing_trainer(config, defaults):
        raise problem


def missing_trainer(config: ReplayConfig, defaults: DumpRecord | None = None) -> EnvironmentProblem | None:
    """Return the error of a missing trainer; None if none is missing, for a truth, or if replays run on other machines."""
    adapter = adapter_of(defaults.actor) if defaults else None
    if config.truth or are_elsewhere() or through_of(config, adapter) == "rows":
        return None
    return TRAINER.absent() if adapter is None else absent_trainer(adapter)


def require_torch() -> None:
    """Raise EnvironmentProblem if torch or transformers is missing, unless replays run on other machines."""
    missing = [name for name in ("torch", "transformers") if not is_there(name)]
    if missing and not are_elsewhere():
        raise EnvironmentProblem(
            f"nothing can be replayed here: {' and '.join(missing)} not installed in {sys.executable}'s environment",
            hint=f"run it in the training environment; or {sys.executable} -m pip install 'actordbg[replay]'",
        )
