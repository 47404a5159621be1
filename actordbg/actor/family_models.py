"""Small random models of the families that people train, each built from a configuration, without a network.

A family is what its code does: its attention, its positions, its state, its experts. None of that needs trained weights, so
a model of two layers and a vocabulary of 256 shows it in seconds. Its configuration is the family's own, with the sizes of
`SMALL` and what `families.toml` adds (experts, windows and states, equally small).

Weights are drawn wide (`initializer_range`), so that attention is not flat and a leaked token shows. Dropout is off, so that any
remaining difference comes from the code.

    build_families({Path("work/qwen3"): FAMILIES["qwen3"].config})
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from actordbg.actor.hub_model import read_json
from actordbg.actor.model_code import guard, own_code
from actordbg.actor.models import once
from actordbg.base.errors import Unsupported, UsageError
from actordbg.base.owners import NOT_FROM_HERE
from actordbg.config.sources import parse_toml

_TABLE = parse_toml(Path(__file__).with_name("families.toml").read_text())
SMALL: dict[str, Any] = _TABLE["small"]
VOCABULARY: int = SMALL["vocab_size"]


@dataclass(frozen=True)
class Family:
    """A family: transformers' `model_type`, the models that people know it by, and what its small configuration adds.

    without: names of SMALL that its configuration does not take.
    """

    model_type: str
    known_as: str
    adds: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """The small configuration."""
        small = {name: value for name, value in SMALL.items() if name not in self.without}
        return {"model_type": self.model_type, **small, **self.adds}


FAMILIES = {
    name: Family(
        entry.get("model_type", name),
        entry["known_as"],
        {key: value for group in entry.get("like", ()) for key, value in _TABLE["groups"][group].items()} | entry.get("adds", {}),
        tuple(entry.get("without", ())),
    )
    for name, entry in _TABLE["families"].items()
}
"""By the name on the command line, in the order of the page."""


def config_of_model(folder: Path) -> dict[str, Any]:
    """Shrink the configuration of a model's folder to the sizes of its family. UsageError without a config.json."""
    path = folder / "config.json"
    kind = (own := read_json(path)).get("model_type")
    if kind is None:
        raise UsageError(f"{path} is not a model's configuration", hint="name a folder with a config.json, or a family")
    if (code := next(own_code(str(folder)), None)) is not None:
        raise Unsupported(f"{folder} ships with code: {code}", hint="families are built from transformers' own code")
    family = next((candidate for candidate in FAMILIES.values() if candidate.model_type == kind), Family(kind, kind))
    small = {name: value for name, value in family.config.items() if name in own or name in family.adds or name in _ALWAYS}
    return {name: value for name, value in own.items() if name not in _OF_WEIGHTS} | small


_ALWAYS = ("model_type", "initializer_range", "vocab_size")
_OF_WEIGHTS = ("quantization_config", "torch_dtype", "dtype", "architectures")


def build_families(configs: Mapping[Path, dict[str, Any]]) -> dict[Path, str]:
    """Build a random fp32 model of each configuration in its folder; return the folders that failed, with the reason.

    Runs in another process: transformers writes to the terminal, and a configuration may need more memory than there is.
    """
    problems: dict[Path, str] = {}
    left = [path for path in configs if not (path / "config.json").is_file()]
    while left:
        orders = [[str(path), configs[path]] for path in left]
        command = [sys.executable, "-m", "actordbg.actor.family_models"]
        environment = os.environ | NOT_FROM_HERE
        ran = subprocess.run(command, input=json.dumps(orders), capture_output=True, text=True, check=False, env=environment)
        lines = ran.stdout.splitlines()
        results = {Path(name): why for name, why in (json.loads(line[len(_MARK) :]) for line in lines if line.startswith(_MARK))}
        problems |= {path: why for path, why in results.items() if why}
        left = [path for path in left if path not in results]
        if left:
            last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
            problems[left.pop(0)] = f"the process that built it ended with exit code {ran.returncode}: {last}"
    return problems


_MARK = "built: "


def _build(folder: Path, config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), trust_remote_code=False)
    model.save_pretrained(folder)


def _run_as_program() -> None:
    for name, config in json.loads(sys.stdin.read()):
        guard(name)  # a configuration may name a kernel of the hub
        why = ""
        try:
            once(Path(name), partial(_build, config=config))
        except Exception as error:  # noqa: BLE001 - a configuration may fail in any way, and the others are still built
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        sys.stdout.write(f"{_MARK}{json.dumps([name, why])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _run_as_program()
