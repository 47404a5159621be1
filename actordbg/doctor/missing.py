"""Packages that are not installed, out of a list of checks: together, by what needs them, with one command for all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from actordbg.doctor.check import Check

_ABSENT = re.compile(r"not installed(?: there)?[;:] (.*)")
_PIP = re.compile(r"(.* -m pip install) ((?:--no-deps )?)(\S+)")


@dataclass(frozen=True)
class MissingPackages:
    """Packages that the same things need. level: bad or warn. pip: the command without requirements; alone: with --no-deps."""

    level: str
    why: str
    names: tuple[str, ...]
    pip: str
    requirements: tuple[str, ...]
    alone: tuple[str, ...]


def missing_packages(checks: Sequence[Check]) -> tuple[list[MissingPackages], list[Check]]:
    """What is missing, in the order of the checks, and the other checks."""
    groups: dict[tuple[str, str], list[tuple[str, re.Match[str]]]] = {}
    others: list[Check] = []
    for check in checks:
        absent, command = _ABSENT.match(check.detail), _PIP.match(check.remedy or "")
        if check.status.value == "ok" or absent is None or command is None:
            others.append(check)
        else:
            groups.setdefault((check.status.value, absent[1]), []).append((check.name, command))
    found = []
    for (level, why), members in groups.items():
        with_others = tuple(command[3] for _, command in members if not command[2])
        alone = tuple(command[3] for _, command in members if command[2])
        names = tuple(name for name, _ in members)
        found.append(MissingPackages(level, why, names, members[0][1][1], with_others, alone))
    return found, others


def install_command(missing: Sequence[MissingPackages]) -> str:
    """One line that installs all of them. What must not bring its own requirements comes behind the others."""
    pip = missing[0].pip
    together = [name for group in missing for name in group.requirements]
    alone = [name for group in missing for name in group.alone]
    parts = [f"{pip} {' '.join(together)}"] if together else []
    return " && ".join(parts + ([f"{pip} --no-deps {' '.join(alone)}"] if alone else []))
