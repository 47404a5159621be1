"""What libraries do that a good engineer would not guess, from `findings.toml`: `doctor` holds it against what is installed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.units import release
from actordbg.config.sources import parse_toml


@dataclass(frozen=True)
class KnownFinding:
    """A finding, as `findings.toml` explains its fields. versions: (first, last) of each package that it was run with."""

    name: str
    guess: str
    outcome: str
    versions: Mapping[str, tuple[str, str]]
    seen_as: str
    short: str = ""
    remedy: str = ""

    @property
    def ran_with(self) -> str:
        """Return the packages and versions in words: "deepspeed 0.19.6 to 0.19.8"."""
        ranges = {package: " to ".join(dict.fromkeys(ends)) for package, ends in self.versions.items()}
        return ", ".join(f"{package} {words}" for package, words in ranges.items())

    def is_in(self, installed: Mapping[str, str | None]) -> bool:
        """Return whether each of its packages is installed in a version from the first to the last that it was run with.

        A newer version says nothing: nobody ran it.
        """
        for package, (first, last) in self.versions.items():
            version = installed.get(package)
            if version is None or not release(first) <= release(version) <= release(last):
                return False
        return True


@functools.cache
def known_findings() -> tuple[KnownFinding, ...]:
    """Return the findings in the table's order."""
    table = parse_toml(Path(__file__).with_name("findings.toml").read_text())
    return tuple(KnownFinding(name, **entry) for name, entry in table.items())
