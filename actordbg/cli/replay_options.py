"""Options of the commands that replay: which inputs, where their groups run, where to stop. None of them is a setting."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import typer

from actordbg.base.errors import Refused, Unsupported, UsageError, require_package
from actordbg.base.units import MOST_NAMED, resolve
from actordbg.cli import output
from actordbg.cli.options import Where, option_field, settings_of
from actordbg.config.replay_config import TOGETHER, ReplayConfig

if TYPE_CHECKING:
    from actordbg.debug.replay_stops import StopOrder
    from actordbg.records.replay_record import ReplaySpec
    from actordbg.replay.group_engine import GroupEngine

MOST_UNASKED = 50
"""Inputs that are replayed without a question where nothing selects them."""


@dataclass(frozen=True)
class ChosenInputs:
    """Which dumps to replay, as typed."""

    panel: ClassVar[str] = "The inputs"

    where: Where = None
    max_inputs: int | None = option_field(None, "At most N inputs over all workers.", min=1, metavar="N")
    input_file: list[Path] | None = option_field(
        None, "Replay this dump file, pack, PACK#ID or old pickle (imported first); repeatable.", metavar="FILE"
    )
    order: Literal["time", "length", "shuffle"] | None = option_field(
        None, "Input order (default: time).", metavar="time|length|shuffle"
    )
    shuffle_inputs: bool = option_field(False, "Alias of --order shuffle: one order per worker.", "--shuffle-inputs")
    failed: bool = option_field(False, "Only dumps that did not pass last time.", "--failed", "--lf")
    longest: int | None = option_field(None, "The N longest.", min=1, max=MOST_NAMED, metavar="N")
    slowest: int | None = option_field(None, "N slowest by last forward.", min=1, max=MOST_NAMED, metavar="N")
    diverse: int | None = option_field(None, "N most diverse.", min=1, max=MOST_NAMED, metavar="N")
    random_seed: int = option_field(42, "Seed of the shuffle.")

    @property
    def ordered(self) -> str:
        """The order that --order and --shuffle-inputs come to; UsageError where they conflict."""
        if self.shuffle_inputs and self.order not in (None, "shuffle"):
            raise UsageError(f"--shuffle-inputs conflicts with --order {self.order}", hint="use only one")
        return "shuffle" if self.shuffle_inputs else self.order or "time"


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
        "Worker groups that share the inputs, longest first (default: as many as fit).",
        metavar="N|auto",
    )
    per_node: int | None = option_field(
        None,
        "Ranks per node, to spread a group over nodes (default: all).",
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
        "An environment variable, or a YAML or JSON Ray runtime environment; repeatable.",
        metavar="FILE|KEY=VALUE",
    )

    def spans_nodes(self, config: ReplayConfig) -> bool:
        """Whether a group has ranks on several nodes."""
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
            for field in fields(self)[1:]:
                if getattr(self, field.name) is not None:
                    flag = field.metadata["option"].param_decls[0]
                    raise UsageError(f"{flag} belongs to a Ray cluster", hint="add --engine ray, or leave it out")
            yield engine_in_use()
            return
        from actordbg.cluster.node_store import StoreElsewhere
        from actordbg.cluster.order import DEFAULT_MAX_FAILURES, ClusterOrder
        from actordbg.cluster.ray_engine import connected
        from actordbg.store.staging import split_runs

        groups = None if self.groups in (None, "auto") else self.groups
        if groups is not None and not (groups.isdecimal() and int(groups)):
            raise UsageError(f"--groups {groups:.40} is not a number of groups", hint="1 or more, or auto")
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
    """Where to stop and what to tell, as typed."""

    panel: ClassVar[str] = "Stopping and watching"

    break_at: str | None = option_field(
        None,
        "Pause all ranks before or after the forward, on error, or before a layer; one gets a prompt.",
        "--break",
        metavar="before|after|error|LAYER",
    )
    break_rank: int | None = option_field(
        None,
        "Rank that gets the prompt (default: 0, the one with --break-input, or the one that failed).",
        min=0,
        metavar="N",
    )
    break_input: str | None = option_field(None, "Stop only at this input.", metavar="ID")
    break_wait: float | None = option_field(
        None,
        "Wait this long at each stop for `actordbg attach`, not this terminal; then continue.",
        min=0,
        metavar="SECONDS",
    )
    debugpy: int | None = option_field(
        None,
        (
            "Stop for an editor of yours, at 127.0.0.1:PORT; 0 takes a free port. With --engine ray give 0, and --yes: "
            "whoever reaches a node's port runs code as you."
        ),
        min=0,
        metavar="PORT",
    )
    ray_debug_error: bool = option_field(
        False, "With --engine ray: hold an input that fails for Ray's distributed debugger (as RAY_DEBUG_POST_MORTEM=1 does)."
    )
    verbose: bool = option_field(
        False, "Log shapes, dtype, device, mode and loss around each forward, per rank.", "--verbose", "-v"
    )
    log_level: Literal["warning", "info", "debug"] | None = option_field(
        None, "info is --verbose, debug has a line for each layer too (default: warning, no lines).", metavar="warning|info|debug"
    )
    expect_eval: bool = option_field(False, "Fail inputs that run outside eval mode.")

    def on(self, engine: str, several_nodes: bool, apart: bool = False, yes: bool = False) -> StopOptions:
        """Return these options as groups of this engine take them; refuse what cannot be there.

        apart: nodes do not see the store's folder. yes: nodes may listen for an editor.
        """
        from actordbg.debug.replay_stops import ERROR, POST_MORTEM

        if engine != "ray":
            if self.ray_debug_error:
                raise UsageError("--ray-debug-error belongs to a Ray cluster", hint="add --engine ray; here it is --break error")
            return self
        chosen = self
        if self.ray_debug_error or os.environ.get(POST_MORTEM) == "1":
            if self.break_at not in (None, ERROR):
                raise UsageError(
                    f"--ray-debug-error and --break {self.break_at} stop at different places",
                    hint=f"one of them; --break {self.break_at} --debugpy 0 stops there for Ray's debugger",
                )
            chosen = replace(self, break_at=ERROR, debugpy=self.debugpy or 0)
        if chosen.debugpy:
            raise UsageError(
                f"--debugpy {chosen.debugpy} is a port of this machine, and ranks run on nodes, several on one",
                hint="--debugpy 0: each takes a free port, says which, and Ray's debugger lists it",
            )
        editor = chosen.debugpy is not None
        if several_nodes and (editor or chosen.break_at is not None):
            raise Unsupported(
                "breakpoints need all ranks of a group on one node, and this group spans several",
                hint="a group on one node (leave --gpus-per-node out); one rank of it can be a replay with --backend plain",
            )
        if apart and chosen.break_at is not None and not editor:
            raise Unsupported(
                "a prompt is a socket in the replay's folder, and with a store behind a URL that folder is a node's own",
                hint="--debugpy 0 stops there for an editor; or a store on a file system that all nodes mount",
            )
        text = "debugpy listens on the addresses of the nodes, and whoever reaches them there can run code as you"
        if editor and not (yes or output.agreed(text)):
            raise Refused(
                text, hint="in a network that you trust, --yes; or --break without --debugpy, whose prompt only you can open"
            )
        return chosen

    def order(self, spec: ReplaySpec) -> StopOrder:
        """What this asks of the workers of a replay; what cannot be is refused before they start."""
        from actordbg.debug.replay_stops import AFTER, BEFORE, ERROR, LEVELS, StopOrder

        terminal, config, at = sys.stdin.isatty() and sys.stderr.isatty(), spec.config, self.break_at or ""
        if at and not terminal and self.break_wait is None and self.debugpy is None:
            ways = "or --break-wait 600, and then `actordbg attach` from another terminal; or --debugpy PORT, for an editor"
            raise UsageError("--break needs a terminal for its prompt, and this command has none", hint=f"run it in one; {ways}")
        if self.break_input is not None and not at:
            raise UsageError("--break-input alone does not say where to stop", hint="add --break before, after, error or LAYER")
        if self.debugpy is not None:
            require_package("--debugpy", "debugpy")
        if self.break_rank is not None and self.break_rank >= config.nproc:
            ranks = f"--break-rank {self.break_rank}: this replay has ranks 0 to {config.nproc - 1}"
            raise UsageError(ranks, hint="a rank of the replay")
        if at and config.truth is not None:
            raise UsageError("--break and --truth conflict: the truth has no Actor", hint="leave one of them out")
        if at not in ("", BEFORE, AFTER, ERROR) and (config.compile or config.deepcompile):
            hint = "--no-compile; or --break before, after or error"
            raise Unsupported(f"--break {at}: compiled code has no layers to stop at", hint=hint)
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


@dataclass(frozen=True)
class HowToTrain:
    """The optimizer's numbers, and what else is trained, as typed."""

    panel: ClassVar[str] = "The training"

    steps: int = option_field(10, "Optimizer steps (default 10).", min=1)
    lr: float = option_field(5e-6, "Learning rate, constant (default 5e-6, the test suite's).")
    gradient_accumulation: int = option_field(
        1, "Micro-batches in each step of the configuration with most lanes; others take as many in all (default 1).", min=1
    )
    max_norm: float = option_field(1.0, "Clip gradients to this norm; 0: never (default 1).", min=0)
    weight_decay: float = option_field(0.0, "AdamW's (default 0).", min=0)
    gradient_checkpointing: bool = option_field(False, "Compute layers again in the backward (not in the baseline).")
    threshold: float = option_field(0.05, "Limit for first, mean and last loss (default 0.05).", metavar="X")
    log_dir: Path | None = option_field(None, "Where each configuration's log goes (default: in the store).", metavar="DIR")
    trainer: Literal["sft"] | None = option_field(
        None, "Run the trainer's own train_sft as well, over rows of text.", metavar="sft"
    )
    dataset: Path | None = option_field(None, "Rows for --trainer sft, JSONL (default: made-up ones).", metavar="FILE")
    storage: str | None = option_field(None, "Checkpoint folder, to resume from after a crash.", metavar="DIR")
    checkpoint_every: int | None = option_field(
        None, "Steps between checkpoints (default: a tenth of --steps).", min=1, metavar="N"
    )
