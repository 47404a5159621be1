"""The options that say where a command's groups run. No settings: what comes out is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import typer

from actordbg.base.errors import UsageError
from actordbg.cli.options import option_field, settings_of

if TYPE_CHECKING:
    from actordbg.config.replay_config import ReplayConfig
    from actordbg.replay.group_engine import GroupEngine


ENGINES = ("local", "ray")


@dataclass(frozen=True)
class EngineOptions:
    """Where groups run, as typed."""

    panel: ClassVar[str] = "The machines"

    engine: str = option_field("local", "This machine (default), or a Ray cluster.", metavar="local|ray")
    address: str | None = option_field(
        None,
        "The Ray cluster (default: RAY_ADDRESS, else the one that this machine belongs to).",
        metavar="auto|HOST:PORT|ray://...",
    )
    groups: str | None = option_field(
        None,
        "Groups of workers that share the inputs, the longest first (default: as many as the cluster holds).",
        metavar="N|auto",
    )
    per_node: int | None = option_field(
        None,
        "Ranks of a group on one node, so that it spans several (default: all).",
        "--gpus-per-node",
        "--procs-per-node",
        min=1,
        metavar="N",
    )
    max_failures: int | None = option_field(
        None,
        "Nodes that may die, and groups that may be lost outside of an input; -1 for any number (default 3).",
        min=-1,
        metavar="N",
    )
    runtime_env: list[str] | None = option_field(
        None,
        "A variable of the workers, or a YAML or JSON file with Ray's whole runtime environment; repeatable.",
        metavar="FILE|KEY=VALUE",
    )

    def spans_nodes(self, config: ReplayConfig) -> bool:
        """Whether a group has ranks on several nodes."""
        from actordbg.config.replay_config import TOGETHER

        return self.per_node is not None and config.backend in TOGETHER and self.per_node < config.nproc

    def run(self, ctx: typer.Context, title: str) -> GroupEngine:
        """From now to the end of the command its groups run there. `title`: what Ray's dashboard calls it."""
        return ctx.with_resource(self._running(ctx, title))

    @contextlib.contextmanager
    def _running(self, ctx: typer.Context, title: str) -> Iterator[GroupEngine]:
        """Inside the block the command's groups run there."""
        from actordbg.replay.group_engine import engine_in_use, using

        if self.engine not in ENGINES:
            raise UsageError(f"--engine {self.engine} is not known", hint=f"one of: {', '.join(ENGINES)}")
        if self.engine == "local":
            self._refuse_alone()
            yield engine_in_use()
            return
        from actordbg.cluster.node_store import StoreElsewhere
        from actordbg.cluster.order import DEFAULT_MAX_FAILURES, ClusterOrder
        from actordbg.cluster.ray_engine import connected
        from actordbg.store.staging import split_runs

        failures = DEFAULT_MAX_FAILURES if self.max_failures is None else self.max_failures
        settings = settings_of(ctx)
        there = None if settings.url is None else StoreElsewhere(split_runs(settings.url)[0], settings.store.absolute())
        order = ClusterOrder(self.address, self._groups(), self.per_node, failures, tuple(self.runtime_env or ()), there)
        if there is not None:
            from actordbg.cli.staged_store import push_now

            push_now(ctx)
        with connected(order, title) as engine, using(engine):
            yield engine

    def _groups(self) -> int | None:
        if self.groups in (None, "auto"):
            return None
        try:
            count = int(str(self.groups))
        except ValueError:
            count = 0
        if count < 1:
            raise UsageError(f"--groups {self.groups:.40} is no number of groups", hint="1 or more, or auto")
        return count

    def _refuse_alone(self) -> None:
        for one in fields(self):
            if one.name != "engine" and getattr(self, one.name) is not None:
                flag = "--gpus-per-node" if one.name == "per_node" else "--" + one.name.replace("_", "-")
                raise UsageError(f"{flag} belongs to a Ray cluster", hint="add --engine ray, or leave it out")
