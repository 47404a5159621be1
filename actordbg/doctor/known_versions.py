"""The versions that are known to work together, in one place. `constraints.txt` pins the same; a test holds them equal.

Another version is a warning that says so, never an error. What is known about particular versions stands in `TRAPS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from actordbg.trainers.trainer import TRAINER

PYTHON = ((3, 10), (3, 12))
"""Oldest and newest Python that actordbg is tested with."""
KNOWN_PYTHON = "3.11"


class Need(str, Enum):
    """What does not work without a package."""

    CAPTURE = "capture"
    DESK = "the command line"
    REPLAY = "replay"
    TRAINING = f"training with {TRAINER.name}"


@dataclass(frozen=True)
class Package:
    """A distribution, the version that is known to be good (None: any), and what needs it."""

    name: str
    version: str | None
    need: Need


PACKAGES = (
    Package("zstandard", None, Need.CAPTURE),
    Package("safetensors", None, Need.CAPTURE),
    Package("typer", None, Need.DESK),
    Package("rich", None, Need.DESK),
    Package("sqlmodel", None, Need.DESK),
    Package("sqlglot", None, Need.DESK),
    Package("msgspec", None, Need.DESK),
    Package("numpy", None, Need.DESK),
    Package("bottle", None, Need.DESK),
    Package("torch", "2.13.0", Need.REPLAY),
    Package(TRAINER.package, TRAINER.known_version, Need.REPLAY),
    Package("deepspeed", "0.19.6", Need.REPLAY),
    Package("transformers", "5.15.0", Need.REPLAY),
    Package("peft", "0.21.2", Need.REPLAY),
    Package("einops", "0.8.2", Need.REPLAY),
    Package("pylatexenc", "2.11", Need.REPLAY),
    Package("torchdata", "0.11.0", Need.REPLAY),
    Package("accelerate", "1.15.0", Need.TRAINING),
    Package("ray", "2.55.0", Need.TRAINING),
    Package("datasets", "5.2.0", Need.TRAINING),
    Package("optree", "0.20.0", Need.TRAINING),
)

DEBUGPY = "debugpy>=1.8.22"
"""What the extra `ray` installs: older ones cannot show an editor the frames of an error that was caught."""

TRAPS: dict[str, tuple[tuple[int, ...], str]] = {
    "transformers": ((4, 53), "packing without flash-attn is silently wrong before 4.53: rows see each other"),
    TRAINER.package: (TRAINER.oldest, TRAINER.trap),
    "torch": ((2, 6), "older than any version that replays were tried with"),
    "deepspeed": ((0, 17), "older than any version that replays were tried with"),
}
"""For a package: the first version without the trap, and the trap."""

MODULE_OF = {"PIL": "pillow", "flash_attn": "flash-attn", "yaml": "pyyaml", "skimage": "scikit-image"}
"""Distributions whose module has another name."""


def requirement(module: str) -> str:
    """What to give pip for a missing module: the distribution, at its known-good version where there is one."""
    name = MODULE_OF.get(module, module)
    version = next((package.version for package in PACKAGES if package.name == name), None)
    return f"{name}=={version}" if version else name


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" as (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def same(version: str, known: str) -> bool:
    """Whether two versions are the same, local parts ("+cpu") aside."""
    return version.partition("+")[0] == known
