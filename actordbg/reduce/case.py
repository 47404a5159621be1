"""A case: all that a script needs to show a fault, as plain data; nothing in it is code.

    case = FaultCase("difference", rows=((5, 7), (9, 11)), config={"model_type": "llama", ...}, layout="packed")
    case.key                      # equal for equal cases: a trial of this case is not repeated

What is watched (`kind`):

    difference   log-probs of each row, held against the row alone in fp32 with eager attention; under an engine, against the
                 same call without it
    gradient     the parameters' gradients, held against those of the rows alone in fp32 with eager attention
    rerun        the same call twice
    error        an exception of this class, whose first two lines begin with `error` after numbers and paths were replaced
    crash        the process dies by the signal `error`
    hang         the processes do not finish in time
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from actordbg.actor.family_models import FAMILIES
from actordbg.base.errors import CorruptDump
from actordbg.base.units import listed, plural
from actordbg.config.replay_config import ATTENTIONS, COMPILE_BACKENDS, DTYPES
from actordbg.formats.nested_values import ROWS_LEAK
from actordbg.records.stored_record import StoredRecord

DIFFERENCE, GRADIENT, RERUN, ERROR, CRASH, HANG = KINDS = ("difference", "gradient", "rerun", "error", "crash", "hang")
SEVERAL = (CRASH, HANG)
"""Kinds that a script shows with several processes too: the others are about the rows of one process."""
ALONE, PADDED, PACKED = LAYOUTS = ("alone", "padded", "packed")
MODEL, TRAINER = THROUGH = ("model", "openrlhf")
ENGINES = ("", "deepspeed", "fsdp2")
LIMITS = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}
"""Differences of log-probs, in nats, and relative ones of gradients, that rounding does not reach in small random models."""
MOST_INLINE = 40
"""More token ids than these are drawn from a seed, where drawn ids show the fault too."""
PATHS = r"(?<=')/[^']*(?=')|~(?:/[\w.+@=~-]+)+|\b[A-Za-z]:(?:\\[\w.+@=~-]+)+|(?:/[\w.+@=~-]+){2,}"
"""Paths in the text of an error; a script has this pattern too."""
_ROPE = re.compile(
    r"type|factor|truncate|rope_(type|theta)|(original_)?max_position_embeddings|llama_4_scaling_beta|beta_(fast|slow)|mscale(_all_dim)?|mrope_(section|interleaved)"
    r"|(attention|low_freq|high_freq|long|short|partial_rotary)_factor|(full|sliding|chunked|linear)_attention"
)
"""Keys of the rope's parameters, alone or by type of layer."""
_OLDER = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Keys of the rope that a class takes without naming them."""
_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Texts that a configuration may have: a function, a type of layer."""


@dataclass(frozen=True)
class FaultCase(StoredRecord):
    """A case. rows: token ids of each row. left: padding in front of each row, for the layout "padded".

    config: of a model with seeded random weights; or checkpoint: a name on the hub or a folder, of which the first `layers`
    are loaded. cache: the model is called without `use_cache=False`. borders: packed rows come with `cu_seq_lens_q` and
    `seq_idx`. synthetic: `rows` are `drawn`. memory: the most bytes of address space (RLIMIT_AS). timeout_s: when `hang` counts
    as shown.
    """

    what: ClassVar[str] = "case"

    kind: str
    rows: tuple[tuple[int, ...], ...]
    left: tuple[int, ...] = ()
    config: dict[str, Any] | None = None
    checkpoint: str = ""
    layers: int | None = None
    layout: str = ALONE
    dtype: str = "fp32"
    attn: str = "sdpa"
    compile: str = ""
    cache: bool = False
    borders: bool = False
    temperature: float = 1.0
    backward: bool = False
    through: str = MODEL
    engine: str = ""
    zero: int = 0
    processes: int = 1
    synthetic: bool = False
    error_class: str = ""
    error: str = ""
    memory: int | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what a script could not say, or what would load code (CorruptDump)."""
        known = (
            (self.kind, KINDS), (self.layout, LAYOUTS), (self.through, THROUGH), (self.engine, ENGINES), (self.dtype, DTYPES),
            (self.attn, ATTENTIONS), (self.compile, ("", *COMPILE_BACKENDS)),
        )  # fmt: skip
        bad = [value for value, values in known if value not in values]
        config = self.config or {}
        if clean_config(config) != config:
            bad.append("a model's configuration with code or paths")
        if self.processes > 1 and self.kind not in SEVERAL:
            bad.append(f"{self.kind} in {self.processes} processes")
        if bad or not self.rows or bool(self.config) == bool(self.checkpoint) or not 0 < self.processes <= 64:
            why = listed(bad) or "no rows, or no model"
            raise CorruptDump(f"not a case: {why}", hint="reduce the replay again")

    @property
    def limit(self) -> float:
        """Return what rounding may cause: nats, or a share of a gradient's norm. An engine has to give the same bits."""
        return LIMITS["fp32" if self.engine else self.dtype]

    @property
    def fitted(self) -> FaultCase:
        """Return the case with ids that its vocabulary has: drawn again, or folded."""
        if self.synthetic:
            return replace(self, rows=drawn([len(row) for row in self.rows], self.vocabulary))
        return replace(self, rows=tuple(tuple(token % self.vocabulary for token in row) for row in self.rows))

    @property
    def packages(self) -> list[str]:
        """Packages that its script needs beside torch and transformers."""
        if self.through == TRAINER:
            return ["deepspeed", "openrlhf"]
        return ["deepspeed"] if self.engine == "deepspeed" else []

    @property
    def key(self) -> str:
        """A digest of all of it."""
        text = json.dumps(vars(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def tokens(self) -> int:
        """Number of tokens in all rows."""
        return sum(map(len, self.rows))

    @property
    def depth(self) -> int | None:
        """Number of layers; None if the checkpoint has all of its own."""
        return self.layers if self.config is None else self.config.get("num_hidden_layers")

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary that ids are drawn from."""
        return int((self.config or {}).get("vocab_size") or max(map(max, self.rows)) + 1)

    @property
    def words(self) -> str:
        """Describe its size: "2 rows of 3 and 4 tokens, 1 layer, hidden size 32"."""
        sizes = [*map(len, self.rows)]
        lengths = " and ".join(listed(sizes).rsplit(", ", 1)) if len(sizes) < 4 else f"up to {max(sizes)}"
        layers = "all layers" if self.depth is None else plural(self.depth, "layer")
        size = f", hidden size {self.config['hidden_size']}" if self.config and "hidden_size" in self.config else ""
        ranks = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{plural(len(sizes), 'row')} of {lengths} tokens, {layers}{size}{ranks}"


def clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a configuration changes the forward, of those inside it too; {} for a family that transformers lacks.

    Kept is what the family's class takes, and no text but a plain word: so nothing private leaves, and no key loads code.
    """
    model_type = config.get("model_type")
    keys = _keys_of(model_type) if isinstance(model_type, str) else ()
    kept = {key: _clean(value) for key, value in config.items() if key in keys}
    return {"model_type": model_type, **kept} if keys else {}


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        rope = {key: _clean(item) for key, item in value.items() if _ROPE.fullmatch(key)}
        return clean_config(value) if "model_type" in value else rope
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value if not isinstance(value, str) or _WORD.fullmatch(value) else None


@functools.cache
def _keys_of(model_type: str) -> frozenset[str]:
    """Return the keys that a family's class takes and not every class does, and those that the code of families looks for."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return frozenset()
    own = CONFIG_MAPPING[model_type]
    taken = {*inspect.signature(own.__init__).parameters, *own.attribute_map, *_OLDER}
    looked_for = {key for family in FAMILIES.values() for key in family.config}
    common = inspect.signature(PretrainedConfig.__init__).parameters
    return frozenset((taken - common.keys() | looked_for) - {"use_cache", "model_type"})


def drawn(lengths: Sequence[int], vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Draw rows of token ids. Those of row N come from a generator with the seed N: a shorter row begins a longer row."""
    return tuple(tuple(random.Random(row).choices(range(vocabulary), k=length)) for row, length in enumerate(lengths))


def without_paths(text: str) -> str:
    """Return the first two lines of an error's text with paths as PATH."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(PATHS, "PATH", " ".join(lines[:2]))


def normalized(text: str) -> str:
    """Return an error's text `without_paths` and with numbers as N, at most 120 characters."""
    return re.sub(r"\d+", "N", without_paths(text))[:120]


def leaks(record_arguments: Mapping[str, Any]) -> bool:
    """Return whether the recorded call passed packed rows that transformers keeps apart only without a cache."""
    return bool(record_arguments.get(ROWS_LEAK))
