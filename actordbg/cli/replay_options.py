"""Options of the commands that replay: inputs, Ray cluster, breakpoints. None of them is a setting."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from actordbg.base.errors import Refused, Unsupported, UsageError, require_package
from actordbg.base.option import Option
from actordbg.base.units import MOST_NAMED, listed, resolve
from actordbg.cli import output
from actordbg.cli.options import Where, settings_of
from actordbg.config.replay_config import TOGETHER, ReplayConfig

if TYPE_CHECKING:
    from actordbg.api.desk import DumpSelection
    from actordbg.debug.replay_stops import StopOrder
    from actordbg.records.replay_record import ReplaySpec
    from actordbg.replay.group_engine import GroupEngine

MOST_UNASKED = 50
"""Number of inputs that are replayed without asking if no option selects them."""


@dataclass(frozen=True)
class ChosenInputs:
    """Which dumps to replay, as typed.

    Args:
        max_inputs: At most N inputs over all workers.
        input_file: Replay this dump file, pack, PACK#ID or old pickle (imported first); repeatable.
        order: Input order (default: time).
        shuffle_inputs: Alias of --order shuffle: one order per worker.
        failed: Only dumps whose last verdict is WRONG or FAILED.
        longest: N longest.
        diverse: N most diverse.
        random_seed: Seed of the shuffle.
    """

    panel: ClassVar[str] = "Inputs"

    where: Where = None
    max_inputs: Annotated[int | None, Option(min=1, rank=1)] = None
    input_file: Annotated[list[Path] | None, Option(rank=19)] = None
    order: Annotated[Literal["time", "length", "shuffle"] | None, Option(rank=30)] = None
    shuffle_inputs: Annotated[bool, Option(hidden=True)] = False
    failed: Annotated[bool, Option("--failed", "--lf", rank=2)] = False
    longest: Annotated[int | None, Option(min=1, max=MOST_NAMED, rank=30)] = None
    diverse: Annotated[int | None, Option(min=1, max=MOST_NAMED, rank=18)] = None
    random_seed: Annotated[int, Option(rank=30)] = 42

    @property
    def ordered(self) -> str:
        """Return the order that --order and --shuffle-inputs select. Raises UsageError if they conflict."""
        if self.shuffle_inputs and self.order not in (None, "shuffle"):
            raise UsageError(f"--shuffle-inputs conflicts with --order {self.order}", hint="use only one")
        return "shuffle" if self.shuffle_inputs else self.order or "time"

    @property
    def selection(self) -> DumpSelection:
        """The selection."""
        from actordbg.api.desk import DumpSelection

        presets = {name: getattr(self, name) for name in ("failed", "longest", "diverse")}
        return DumpSelection(self.where, tuple(self.input_file or ()), self.ordered, self.max_inputs, self.random_seed, **presets)


@dataclass(frozen=True)
class ComparisonLimits:
    """Limits for a comparison, as typed.

    Args:
        max_abs: Limit for the largest log-prob difference, nats.
        p99_abs: Limit for the 99th percentile of log-prob differences, nats.
        mean_abs: Limit for the mean log-prob difference, nats.
        clip_share: Limit for the share of tokens whose ratio is outside 0.8 to 1.2 (PPO's clip fraction).
        entropy_max_abs: Limit for the largest entropy difference, nats.
        loss_abs: Limit for the difference of the losses.
        grad_norm_rel: Limit for the relative difference of the gradient norms.
        gradient_distance: Limit for |a - b| / |b| over all kept gradients.
        parameter_distance: Limit for |a - b| / |b| of the worst single parameter.
    """

    panel: ClassVar[str] = "Thresholds (inf: not checked)"
    rank: ClassVar[int] = 30

    max_abs: float | None = None
    p99_abs: float | None = None
    mean_abs: float | None = None
    clip_share: float | None = None
    entropy_max_abs: float | None = None
    loss_abs: float | None = None
    grad_norm_rel: float | None = None
    gradient_distance: float | None = None
    parameter_distance: float | None = None


ENGINES = ("local", "ray")


@dataclass(frozen=True)
class EngineOptions:
    """Where worker groups run, as typed.

    Args:
        engine (local|ray): This machine, or a Ray cluster.
        address (auto|HOST:PORT|ray://...): Ray cluster (default: RAY_ADDRESS, else the cluster of this machine).
        groups (N|auto): Worker groups that share the inputs, longest first (default: as many as fit).
        per_node: Ranks per node, to spread a group over nodes (default: all).
        max_failures: Nodes that may die, and groups that may be lost outside an input; -1: unlimited (default 3).
        runtime_env (FILE|KEY=VALUE): An environment variable, or a YAML or JSON Ray runtime environment; repeatable.
    """

    panel: ClassVar[str] = "Ray cluster"
    rank: ClassVar[int] = 35

    engine: str = "local"
    address: str | None = None
    groups: str | None = None
    per_node: Annotated[int | None, Option("--gpus-per-node", "--procs-per-node", min=1)] = None
    max_failures: Annotated[int | None, Option(min=-1)] = None
    runtime_env: list[str] | None = None

    def spans_nodes(self, config: ReplayConfig) -> bool:
        """Check whether a group has ranks on several nodes."""
        return self.per_node is not None and config.backend in TOGETHER and self.per_node < config.nproc

    def run(self, ctx: typer.Context, title: str) -> GroupEngine:
        """Run the command's groups there from now on, until it ends. `title`: its name in Ray's dashboard."""
        return ctx.with_resource(self._running(ctx, title))

    @contextlib.contextmanager
    def _running(self, ctx: typer.Context, title: str) -> Iterator[GroupEngine]:
        """Run the command's groups there inside the block."""
        from actordbg.replay.group_engine import engine_in_use, using

        if self.engine not in ENGINES:
            raise UsageError(f"--engine {self.engine} is not known", hint=f"one of: {listed(ENGINES)}")
        if self.engine == "local":
            for field in fields(self)[1:]:
                if getattr(self, field.name) is not None:
                    flag = "--gpus-per-node" if field.name == "per_node" else f"--{field.name.replace('_', '-')}"
                    raise UsageError(f"{flag} needs --engine ray", hint=f"add --engine ray, or drop {flag}")
            yield engine_in_use()
            return
        from actordbg.cluster.node_store import StoreElsewhere
        from actordbg.cluster.order import DEFAULT_MAX_FAILURES, ClusterOrder
        from actordbg.cluster.ray_engine import connected
        from actordbg.store.staging import split_runs

        groups = None if self.groups in (None, "auto") else self.groups
        if groups is not None and not (groups.isdecimal() and int(groups)):
            raise UsageError(f"--groups {groups:.40} is not a number of groups", hint="pass 1 or more, or auto")
        failures = DEFAULT_MAX_FAILURES if self.max_failures is None else self.max_failures
        settings, there = settings_of(ctx), None
        if settings.url is not None:
            from actordbg.cli.remote_store import push_now

            push_now(ctx)
            there = StoreElsewhere(split_runs(settings.url)[0], settings.store.absolute())
        count = None if groups is None else int(groups)
        order = ClusterOrder(self.address, count, self.per_node, failures, tuple(self.runtime_env or ()), there)
        with connected(order, title) as engine, using(engine):
            yield engine


@dataclass(frozen=True)
class StopOptions:
    """Breakpoints and logging, as typed.

    Args:
        break_at (before|after|error|LAYER): Pause all ranks before or after the forward, on error, or before a layer;
            one gets a prompt.
        break_rank: Rank that gets the prompt (default: 0, the rank with --break-input, or the rank that failed).
        break_input (ID): Pause only at this input.
        break_wait (SECONDS): Wait this long at each breakpoint for `actordbg attach`, not this terminal; then continue.
        debugpy (PORT): Wait for an editor at 127.0.0.1:PORT; 0 picks a free port. With --engine ray, pass 0 and --yes:
            anyone who can reach a node's port can run code as you.
        ray_debug_error: With --engine ray: pause failing inputs for Ray's distributed debugger (like
            RAY_DEBUG_POST_MORTEM=1).
        verbose: Log shapes, dtype, device, mode and loss around each forward, per rank.
        log_level: info: like --verbose; debug: also a line per layer (default: warning, no lines).
        expect_eval: Fail inputs that run outside eval mode.
    """

    panel: ClassVar[str] = "Breakpoints and logging"
    rank: ClassVar[int] = 35

    break_at: Annotated[str | None, Option("--break")] = None
    break_rank: Annotated[int | None, Option(min=0)] = None
    break_input: str | None = None
    break_wait: Annotated[float | None, Option(min=0)] = None
    debugpy: Annotated[int | None, Option(min=0)] = None
    ray_debug_error: bool = False
    verbose: Annotated[bool, Option("-v")] = False
    log_level: Literal["warning", "info", "debug"] | None = None
    expect_eval: bool = False

    def on(self, engine: str, several_nodes: bool, apart: bool = False, yes: bool = False) -> StopOptions:
        """Return these options adapted to the engine; refuse what it cannot do.

        apart: nodes do not see the store's folder. yes: nodes may listen for an editor.
        """
        from actordbg.debug.replay_stops import ERROR, POST_MORTEM

        if engine != "ray":
            if self.ray_debug_error:
                raise UsageError("--ray-debug-error needs --engine ray", hint="add --engine ray, or use --break error")
            return self
        chosen = self
        if self.ray_debug_error or os.environ.get(POST_MORTEM) == "1":
            if self.break_at not in (None, ERROR):
                raise UsageError(
                    f"--ray-debug-error conflicts with --break {self.break_at}",
                    hint=f"use only one; --break {self.break_at} --debugpy 0 pauses there for Ray's debugger",
                )
            chosen = replace(self, break_at=ERROR, debugpy=self.debugpy or 0)
        if chosen.debugpy:
            raise UsageError(
                f"--debugpy {chosen.debugpy} is a port of this machine, but ranks run on nodes, several per node",
                hint="pass --debugpy 0: each rank picks a free port and prints it, and Ray's debugger lists it",
            )
        editor = chosen.debugpy is not None
        if several_nodes and (editor or chosen.break_at is not None):
            raise Unsupported(
                "breakpoints need all ranks of a group on one node, and this group spans several",
                hint="drop --gpus-per-node to keep a group on one node, or replay with --backend plain",
            )
        if apart and chosen.break_at is not None and not editor:
            raise Unsupported(
                "breakpoint prompts need a shared store folder, and with a store behind a URL each node has its own",
                hint="pass --debugpy 0 to use an editor, or use a store on a file system that all nodes mount",
            )
        text = "debugpy listens on the nodes' addresses, and anyone who can reach them can run code as you"
        if editor and not (yes or output.agreed(text)):
            raise Refused(
                text, hint="in a trusted network, pass --yes; or drop --debugpy: only you can open the prompt of --break"
            )
        return chosen

    def order(self, spec: ReplaySpec) -> StopOrder:
        """Build the order for a replay's workers; refuse impossible options before they start."""
        from actordbg.debug.replay_stops import AFTER, BEFORE, ERROR, LEVELS, StopOrder

        terminal, config, at = sys.stdin.isatty() and sys.stderr.isatty(), spec.config, self.break_at or ""
        if at and not terminal and self.break_wait is None and self.debugpy is None:
            ways = "pass --break-wait 600 and run `actordbg attach` in another terminal; or pass --debugpy PORT for an editor"
            raise UsageError("--break needs a terminal for its prompt, and this command has none", hint=ways)
        if self.break_input is not None and not at:
            raise UsageError("--break-input needs --break", hint="add --break before, after, error or LAYER")
        if self.debugpy is not None:
            require_package("--debugpy", "debugpy")
        if self.break_rank is not None and self.break_rank >= config.nproc:
            ranks = f"--break-rank {self.break_rank} is out of range: this replay has ranks 0 to {config.nproc - 1}"
            raise UsageError(ranks, hint=f"pass a rank from 0 to {config.nproc - 1}")
        if at and config.truth is not None:
            raise UsageError("--break and --truth conflict: the truth has no Actor", hint="drop --break or --truth")
        if at not in ("", BEFORE, AFTER, ERROR) and (config.compile or config.deepcompile):
            hint = "pass --no-compile; or --break before, after or error"
            raise Unsupported(f"--break {at}: compiled code has no layers to break at", hint=hint)
        only, ids = self.break_input, [item.dump_id for item in spec.inputs]
        return StopOrder(
            at=at,
            rank=self.break_rank,
            dump=None if only is None else resolve(only, ids, "input of this replay", made_by="dump ls", error=UsageError),
            wait_s=self.break_wait,
            terminal=terminal and self.break_wait is None,
            debugpy=self.debugpy,
            level=self.log_level or LEVELS[self.verbose],
            expect_eval=self.expect_eval,
        )
