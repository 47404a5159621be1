"""What a rule about configurations is, and those about ranks that compute one model, or one input, together. Pure: no torch.

A rule is a predicate over a case, and words for the user who meets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

from actordbg.actor.models import attention_heads
from actordbg.config.choices import Choices, Facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.trainers.find_adapter import callable_again
from actordbg.trainers.trainer import TRAINER

FULLY_SHARD_SINCE = (2, 6)
"""The torch release from which `fully_shard` is public."""

REFUSE, WARN, INFO = "refuse", "warn", "info"


@dataclass(frozen=True)
class RuleHit:
    """What a rule has to say about one configuration: `id` is stable, `ways_out` are things to do, best first."""

    id: str
    severity: str
    message: str
    ways_out: tuple[str, ...]


class Case(SimpleNamespace):
    """What a rule sees: each field of the configuration as decided and of the environment by its name, and the `record` of the
    first dump. together: ranks compute together. ring_flash_attn: its kernel can run. function: the function of a trainer with an
    adapter is asked for.
    """

    def __init__(self, config: ReplayConfig, choices: Choices, facts: Facts, record: DumpRecord | None = None) -> None:
        super().__init__(**vars(config) | vars(choices) | vars(facts), record=record)
        self.deepspeed, self.fsdp2 = self.backend == "deepspeed", self.backend == "fsdp2"
        self.together, self.compiles = self.deepspeed or self.fsdp2, self.compile or self.deepcompile
        self.ring_flash_attn = self.cuda and "ring-flash-attn" in self.versions
        self.function = self.through == "trainer" and self.adapter is not None

    @property
    def heads(self) -> tuple[int, int]:
        """(attention heads, key/value heads); (0, 0), which everything divides, where they cannot be known here."""
        return attention_heads(self.model) or (0, 0)

    def version(self, package: str) -> tuple[int, ...]:
        """(4, 52, 4) of "4.52.4"; () where the package is not installed."""
        match = re.match(r"\d+(\.\d+)*", self.versions.get(package, ""))
        return tuple(int(part) for part in match.group().split(".")) if match else ()


@dataclass(frozen=True)
class Rule:
    """One known combination."""

    id: str
    applies: Callable[[Case], bool]
    message: str
    ways_out: tuple[str, ...]
    severity: str = REFUSE

    def hit(self, case: Case) -> RuleHit:
        """Fill in what its texts name in braces, which is whatever `_words` has of the case."""
        words = _words(case)
        ways_out = tuple(way.format_map(words) for way in self.ways_out)
        return RuleHit(self.id, self.severity, self.message.format_map(words), ways_out)


def _words(case: Case) -> Mapping[str, object]:
    missing = ["there is no CUDA device"] * (not case.cuda) + ["flash-attn is not installed"] * (not case.flash_attn)
    heads, kv_heads = case.heads
    asked = {"--tp": case.tp > 1, "--ring": case.ring > 1, "--dist-backend": case.dist_backend is not None}
    alone = "only sdpa has a stand-in that reaches the others' tokens"
    return {
        **vars(case),
        "heads": heads,
        "kv_heads": kv_heads,
        "parallel": " and ".join(option for option, given in asked.items() if given),
        "ring_attn": "flash_attention_2" if case.ring_flash_attn else "sdpa",
        "ring_kernels": "ring_flash_attn replaces flash_attention_2 alone" if case.ring_flash_attn else alone,
        "trainer": TRAINER.name,
        "torch": case.versions.get("torch", "?"),
        "tp_fits": max(n for n in range(1, case.tp + 1) if not (heads % n or kv_heads % n)),
        "transformers": case.versions.get("transformers", "?"),
        "missing_for_flash": " and ".join(missing),
    }


PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "trainer-cannot-be-called",
        lambda case: case.function and not callable_again(str(case.adapter)),
        "adapter {adapter} is not installed here, or has no `again`, so its trainer's function cannot be called by itself",
        ("--through rows, which needs no trainer", "announce the adapter as an entry point, with a seam that has `again`"),
    ),
    Rule(
        "trainers-function-is-alone",
        lambda case: case.function and (case.together or case.compiles),
        "the trainer's function is called with a plain model: nothing is sharded or compiled around it",
        ("--backend plain, without --compile", "--through rows"),
    ),
    Rule(
        "plain-ranks-share-nothing",
        lambda case: not case.together and (case.tp > 1 or case.ring > 1 or case.dist_backend is not None),
        "{parallel}: that is for ranks that compute together, and those of the plain backend are independent of each other",
        ("--backend fsdp2", "leave {parallel} out"),
    ),
    Rule(
        "fsdp2-needs-torch",
        lambda case: case.fsdp2 and () < case.version("torch") < FULLY_SHARD_SINCE,
        "fsdp2 is torch's `fully_shard`, which is public from torch 2.6 on; here is torch {torch}",
        ("upgrade torch", "--backend deepspeed --zero-stage 3, which shards the same"),
    ),
    Rule(
        "autotp-needs-bf16",
        lambda case: case.deepspeed and case.tp > 1,
        "tensor parallelism under DeepSpeed is its AutoTP, which {trainer} allows in bf16 only: its results could "
        "not be told from rounding, and DeepSpeed gathers no single gradients of it",
        ("--backend fsdp2 --tp {tp}, by transformers' own plan", "leave --tp out"),
    ),
    Rule(
        "tp-does-not-divide-heads",
        lambda case: case.fsdp2 and any(count % case.tp for count in case.heads),
        "--tp {tp} gives every rank equally many attention heads and key/value heads, and {model} has {heads} and {kv_heads}",
        ("--tp {tp_fits}", "--ring, which divides tokens instead"),
    ),
    Rule(
        "tp-under-compile",
        lambda case: case.fsdp2 and case.tp > 1 and case.compile and case.compile_backend != "eager",
        "torch.compile cannot trace the model of fsdp2 with tensor parallelism (BackendCompilerFailed, a "
        "RecursionError in autograd's tracing; torch 2.13)",
        ("--compile-backend eager, which traces no autograd", "leave --compile out", "leave --tp out"),
    ),
    Rule(
        "ring-needs-packing",
        lambda case: case.together and case.ring > 1 and not case.packing,
        "ring attention divides a packed batch: {trainer} ignores the ring where rows are not packed, and every rank would "
        "compute the same",
        ("--packing",),
    ),
    Rule(
        "ring-on-the-rows",
        lambda case: case.ring > 1 and case.through == "rows",
        "ring attention is {trainer}'s own: on the rows, each rank would compute the same",
        ("--through trainer", "leave --ring out"),
    ),
    Rule(
        "ring-attention-kernel",
        lambda case: case.ring > 1 and (case.attn == "eager" or (case.attn == "sdpa" and case.ring_flash_attn)),
        "with {attn} attention each rank of a ring would attend to its own tokens only: {ring_kernels}",
        ("--attn {ring_attn}",),
    ),
    Rule(
        "ring-flash-attn-missing",
        lambda case: case.ring > 1 and case.attn == "flash_attention_2" and not case.ring_flash_attn,
        "a ring with flash_attention_2 needs ring_flash_attn, which is not installed (or there is no CUDA for it)",
        ("--attn sdpa, with keys and values gathered in its place", "pip install ring-flash-attn"),
    ),
    Rule(
        "nccl-needs-cuda",
        lambda case: case.dist_backend == "nccl" and not case.cuda,
        "nccl moves data between CUDA devices, and there is none",
        ("--dist-backend gloo", "leave --dist-backend out"),
    ),
    Rule(
        "gloo-with-cuda",
        lambda case: case.together and case.dist_backend == "gloo" and case.cuda,
        "gloo moves CUDA tensors through host memory, and has not all of the collectives that sharding uses for them",
        ("--dist-backend nccl",),
        severity=WARN,
    ),
    Rule(
        "fsdp2-breaks-graphs",
        lambda case: case.fsdp2 and case.compile,
        "under fsdp2 the hooks that gather weights break the graph at every layer: a two-layer model compiles into 5 graphs with "
        "4 breaks instead of one graph (11 with 8 in a ring)",
        ("--backend deepspeed, at stages 0 to 2 one graph",),
        severity=WARN,
    ),
    Rule(
        "ring-kernel-stands-in",
        lambda case: case.together and case.ring > 1 and case.attn == "sdpa",
        "keys and values are gathered in plain torch, in the place of ring_flash_attn: {trainer}'s slicing, gathering and "
        "reducing run as they do in training, the ring's kernel does not",
        ("--attn flash_attention_2 where CUDA and ring_flash_attn are",),
        severity=INFO,
    ),
)
