"""Small random models of the families that people train, each built from a configuration, without a network.

A family is what its code does: its attention, its positions, its state, its experts. None of that needs trained weights, so
a model of two layers and a vocabulary of 256 shows it in seconds. Its configuration is the family's own, with the sizes of
`SMALL` and what `families.toml` adds (experts, windows and states, equally small).

Weights are drawn wide (`initializer_range`), so that attention is not flat and a leaked token shows. Dropout is off, so that any
remaining difference comes from the code.

    python -m benchmarks.families qwen3     # runs one; `make families` runs all
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.actor.hub_model import read_json
from actordbg.actor.model_code import own_code
from actordbg.base.errors import Unsupported, UsageError
from actordbg.config.sources import parse_toml

_TABLE = parse_toml(Path(__file__).with_name("families.toml").read_text())
Config = dict[str, Any]
"""What a config.json has."""
SMALL: Config = _TABLE["small"]
VOCABULARY: int = SMALL["vocab_size"]


@dataclass(frozen=True)
class Family:
    """A family: transformers' `model_type`, the models that people know it by, and what its small configuration adds.

    without: names of SMALL that its configuration does not take.
    """

    model_type: str
    known_as: str
    adds: Config = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        """The small configuration."""
        small = {name: value for name, value in SMALL.items() if name not in self.without}
        return {"model_type": self.model_type, **small, **self.adds}


def _families(section: str) -> dict[str, Family]:
    return {
        name: Family(
            entry.get("model_type", name),
            entry["known_as"],
            {key: value for group in entry.get("like", ()) for key, value in _TABLE["groups"][group].items()}
            | entry.get("adds", {}),
            entry.get("without", ()),
        )
        for name, entry in _TABLE[section].items()
    }


FAMILIES, NEWER = _families("families"), _families("newer")
"""By the name on the command line, in the order of the page; and those that transformers 5.24 added."""


def config_of_model(folder: Path) -> Config:
    """Shrink the configuration of a model's folder to the sizes of its family. UsageError without a config.json."""
    path = folder / "config.json"
    kind = (own := read_json(path)).get("model_type")
    if kind is None:
        raise UsageError(f"{path} is not a model's configuration", hint="name a folder with a config.json, or a family")
    if (code := next(own_code(str(folder)), None)) is not None:
        raise Unsupported(f"{folder} ships with code: {code}", hint="families are built from transformers' own code")
    family = next((candidate for candidate in (FAMILIES | NEWER).values() if candidate.model_type == kind), Family(kind, kind))
    small = {name: value for name, value in family.config.items() if name in own or name in family.adds or name in _ALWAYS}
    return {name: value for name, value in _fewer_layers(own, small).items() if name not in _OF_WEIGHTS} | small


def _fewer_layers(own: Config, small: Config) -> Config:
    """Cut what a configuration says of each layer (lists as `layer_types`, tables by number) to as many layers as `small` has.

    The layers that are kept are, where they fit, one of each kind, in their order.
    """
    layers, fewer = own.get("num_hidden_layers"), small.get("num_hidden_layers")
    if not isinstance(layers, int) or not isinstance(fewer, int) or fewer >= layers:
        return own
    lists = {name: value for name, value in own.items() if isinstance(value, list) and len(value) == layers}
    tables = {name: value for name, value in own.items() if isinstance(value, dict) and value and all(map(str.isdigit, value))}
    kinds = [str([value[layer] for value in lists.values()]) for layer in range(layers)]
    first_of_kind = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept = sorted(list(dict.fromkeys([*first_of_kind, *range(layers)]))[:fewer])
    cut: Config = {name: [value[layer] for layer in kept] for name, value in lists.items()}
    for name, table in tables.items():
        cut[name] = {str(new): table[str(layer)] for new, layer in enumerate(kept) if str(layer) in table}
    return own | cut


_ALWAYS = ("model_type", "initializer_range", "vocab_size")
_OF_WEIGHTS = ("quantization_config", "torch_dtype", "dtype", "architectures")
