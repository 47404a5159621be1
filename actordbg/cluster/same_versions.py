"""Every node has the versions that this command has, or nothing starts: other versions would give other numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.cluster.node_host import versions_here

ANSWER_S = 300.0
"""Longest wait for a node's answer: it may first have to get the code and install what a runtime environment names."""


def require_same_versions(ray: Any, needed: Sequence[str] = ()) -> None:
    """Ask each node; Unsupported with the list where one differs, EnvironmentProblem where one does not answer.

    needed: packages that must be there, in any version.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = ray.remote(versions_here)
    nodes = {one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}
    answers = {
        node: asked.options(
            name="actordbg versions", num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(needed)
        for node in nodes
    }
    found: dict[str, dict[str, str]] = {}
    for node, answer in answers.items():
        name = f"{node[:8]} ({nodes[node]})"
        try:
            found[name] = ray.get(answer, timeout=ANSWER_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            if node not in {one["NodeID"] for one in ray.nodes() if one["Alive"]}:
                continue  # it died since
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise EnvironmentProblem(
                f"node {name} cannot run actordbg: {words[-1].strip()[:400]}",
                hint="--runtime-env says what a node needs; its log is in /tmp/ray on the node",
            ) from None
    if different := differing_versions(versions_here(needed), found, needed):
        raise Unsupported(
            "nodes have other versions than this command:\n" + "\n".join(different),
            hint="the same environment on every node, or what Ray's runtime environment makes of it (--runtime-env FILE)",
        )


def differing_versions(ours: Mapping[str, str], found: Mapping[str, Mapping[str, str]], needed: Sequence[str] = ()) -> list[str]:
    """A line for each node that differs, with each package that does. A needed one only has to be there."""
    lines = []
    for node, theirs in sorted(found.items()):
        alike = {name for name in ours if theirs.get(name) == ours[name] or (name in needed and theirs.get(name) != "none")}
        other = [f"{name} {theirs.get(name, 'none')} (here {ours[name]})" for name in ours if name not in alike]
        if other:
            lines.append(f"  node {node}: {', '.join(other)}")
    return lines
