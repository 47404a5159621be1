"""What a rule about configurations is: a predicate over a case, and words for the user who meets it. Pure: no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actordbg.actor.models import attention_heads
from actordbg.config.choices import Choices, Facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.trainers.find_adapter import callable_again
from actordbg.trainers.trainer import TRAINER

REFUSE, WARN, INFO = "refuse", "warn", "info"


@dataclass(frozen=True)
class RuleHit:
    """What a rule has to say about one configuration: `id` is stable, `ways_out` are things to do, best first."""

    id: str
    severity: str
    message: str
    ways_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """What a rule sees: the configuration as asked for, as decided, the environment, and the record of the first dump."""

    config: ReplayConfig
    choices: Choices
    facts: Facts
    record: DumpRecord | None = None

    @property
    def deepspeed(self) -> bool:
        return self.config.backend == "deepspeed"

    @property
    def together(self) -> bool:
        """Whether ranks compute together."""
        return self.config.backend in ("deepspeed", "fsdp2")

    @property
    def fsdp2(self) -> bool:
        return self.config.backend == "fsdp2"

    @property
    def ring(self) -> bool:
        return self.config.ring > 1

    @property
    def ring_flash_attn(self) -> bool:
        """Whether ring_flash_attn's kernel can run."""
        return self.facts.cuda and "ring-flash-attn" in self.facts.versions

    @property
    def heads(self) -> tuple[int, int]:
        """(attention heads, key/value heads); (0, 0), which everything divides, where they cannot be known here."""
        return attention_heads(self.choices.model) or (0, 0)

    @property
    def compiles(self) -> bool:
        return self.config.compile or self.config.deepcompile

    @property
    def uncallable(self) -> bool:
        """Whether the trainer's function is asked for, and its adapter cannot call it."""
        return self.function and not callable_again(str(self.choices.adapter))

    @property
    def function(self) -> bool:
        """Whether the function of a trainer with an adapter is asked for."""
        return self.choices.through == "trainer" and self.choices.adapter is not None

    def version(self, package: str) -> tuple[int, ...]:
        """(4, 52, 4) of "4.52.4"; () where the package is not installed."""
        match = re.match(r"\d+(\.\d+)*", self.facts.versions.get(package, ""))
        return tuple(int(part) for part in match.group().split(".")) if match else ()


@dataclass(frozen=True)
class Rule:
    """One known combination."""

    id: str
    severity: str
    applies: Callable[[Case], bool]
    message: str
    ways_out: tuple[str, ...] = ()

    def hit(self, case: Case) -> RuleHit:
        """What it says about this case; its texts may name whatever `_words` has, in braces."""
        words = _words(case)
        return RuleHit(self.id, self.severity, self.message.format_map(words), tuple(w.format_map(words) for w in self.ways_out))


def _words(case: Case) -> Mapping[str, object]:
    missing = ["there is no CUDA device"] * (not case.facts.cuda) + ["flash-attn is not installed"] * (not case.facts.flash_attn)
    heads, kv_heads = case.heads
    asked = {"--tp": case.config.tp > 1, "--ring": case.ring, "--dist-backend": case.config.dist_backend is not None}
    return {
        **vars(case.config),
        **vars(case.choices),
        "heads": heads,
        "kv_heads": kv_heads,
        "parallel": " and ".join(option for option, given in asked.items() if given),
        "ring_attn": "flash_attention_2" if case.ring_flash_attn else "sdpa",
        "ring_kernels": (
            "ring_flash_attn replaces flash_attention_2 alone"
            if case.ring_flash_attn
            else "only sdpa has a stand-in that reaches the others' tokens"
        ),
        "trainer": TRAINER.name,
        "torch": case.facts.versions.get("torch", "?"),
        "tp_fits": max(n for n in range(1, case.config.tp + 1) if not (heads % n or kv_heads % n)),
        "gpus": case.facts.gpus,
        "cpus": case.facts.cpus,
        "transformers": case.facts.versions.get("transformers", "?"),
        "missing_for_flash": " and ".join(missing),
    }
