"""The options of a Ray cluster, the runtime environment that they give, and the nodes that a group takes.

Nothing here imports Ray.

    order = ClusterOrder(address="auto", groups=None, per_node=8, runtime_env=("NCCL_SOCKET_IFNAME=eth1",))
    runtime_env_of(order)          # {"env_vars": {...}, "py_modules": [...]}

`--runtime-env` may be given several times: KEY=VALUE sets a variable of the workers, anything else is a YAML or JSON file with a
complete Ray runtime environment. It also ships actordbg and the trainer if they are checkouts, which a node cannot have installed
(`checkouts`).
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actordbg.base.errors import UsageError, reason_of
from actordbg.cluster.node_store import StoreElsewhere
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.debug.replay_stops import POST_MORTEM
from actordbg.formats.record_reading import strict_json
from actordbg.trainers.trainer import TRAINER

DEFAULT_MAX_FAILURES = 3
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ClusterOrder:
    """The requested cluster. groups: None for as many as fit. per_node: ranks of a group on one node, None for all.

    max_failures: how often a group may be lost without an input's fault, -1 for any number. store: set if it is behind a URL.
    """

    address: str | None = None
    groups: int | None = None
    per_node: int | None = None
    max_failures: int = DEFAULT_MAX_FAILURES
    runtime_env: tuple[str, ...] = ()
    store: StoreElsewhere | None = None


def runtime_env_of(order: ClusterOrder) -> dict[str, Any]:
    """Build the runtime environment of everything that we start on the cluster."""
    whole: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for text in order.runtime_env:
        match = _VARIABLE.fullmatch(text)
        if match[1] in variables if match else bool(whole):
            what = f"{match[1]} more than once" if match else f"a second file, {text}"
            raise UsageError(f"--runtime-env gives {what}", hint="give each variable once, and one file")
        if match is not None:
            variables[match[1]] = match[2]
        else:
            whole = _read(Path(text))
    env_vars = {str(name): str(value) for name, value in (whole.get("env_vars") or {}).items()} | variables
    if env_vars.get(POST_MORTEM, "0") not in ("", "0"):
        raise UsageError(
            f"{POST_MORTEM} in --runtime-env would stop the hosts of ranks, not the ranks",
            hint=f"use `replay --ray-debug-error`, or set {POST_MORTEM}=1 in the environment of `replay`",
        )
    modules = [*(whole.get("py_modules") or ()), *checkouts(("actordbg", TRAINER.package))]
    return whole | ({"env_vars": env_vars} if env_vars else {}) | ({"py_modules": modules} if modules else {})


def checkouts(packages: Iterable[str]) -> list[str]:
    """Return the folders of packages that are checkouts, not installed, so that no node needs to have them."""
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    specs = map(importlib.util.find_spec, packages)
    folders = [Path(spec.origin).resolve().parent for spec in specs if spec and spec.origin]
    return [str(folder) for folder in folders if folder.parent not in installed]


def _read(path: Path) -> dict[str, Any]:
    """Read a runtime environment from a JSON or YAML file; Ray brings the YAML parser."""
    hint = "pass KEY=VALUE, or a YAML or JSON file with one mapping, such as `env_vars: {A: b}`"
    try:
        text = path.read_text()
        if path.suffix == ".json":
            data = strict_json(text)
        else:
            import yaml

            data = yaml.safe_load(text)
    except Exception as error:  # noqa: BLE001 - two parsers with different errors; all mean that the file is invalid
        raise UsageError(f"--runtime-env {path}: cannot be read: {reason_of(error):.300}", hint=hint) from None
    if not isinstance(data, dict) or not isinstance(data.get("env_vars") or {}, dict):
        raise UsageError(f"--runtime-env {path} is not a runtime environment", hint=hint)
    return data


@dataclass(frozen=True)
class GroupShape:
    """The resources of a group: how many ranks on each of its nodes, and whether each needs a GPU."""

    counts: tuple[int, ...]
    gpu: bool

    @classmethod
    def of(cls, config: ReplayConfig, per_node: int | None, gpu: bool) -> GroupShape:
        ranks = 1 if LAUNCHERS[config.backend] == "python" else config.nproc
        each = min(per_node or ranks, ranks)
        return cls(tuple(min(each, ranks - first) for first in range(0, ranks, each)), gpu)

    @property
    def ranks(self) -> int:
        return sum(self.counts)

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [{"CPU": float(count)} | ({"GPU": float(count)} if self.gpu else {}) for count in self.counts]

    def words(self) -> str:
        """Describe the resources that a node needs, and how many such nodes."""
        most = max(self.counts)
        what = f"{most} CPU" + (f" and {most} GPU" if self.gpu else "")
        return what if len(self.counts) == 1 else f"{len(self.counts)} nodes with {what} each"

    def groups_on(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """Count how many such groups fit on the nodes, by their resources."""
        room = [min(int(node.get(name, 0) // amount) for name, amount in self.bundles[0].items()) for node in nodes]
        most = sum(room) // len(self.counts)
        while most and sum(min(groups, most) for groups in room) < most * len(self.counts):
            most -= 1
        return most
