"""The options of `replay` that stop in it, or watch it: no settings, since nothing that comes out depends on them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from actordbg.base.errors import Refused, Unsupported, UsageError, require_package
from actordbg.base.units import resolve
from actordbg.cli import output
from actordbg.cli.options import option_field

if TYPE_CHECKING:
    from actordbg.config.replay_config import ReplayConfig
    from actordbg.debug.replay_stops import StopOrder
    from actordbg.records.replay_record import ReplaySpec


_ATTACH = "or --break-wait 600, and then `actordbg attach` from another terminal; or --debugpy PORT, for an editor"


@dataclass(frozen=True)
class StopOptions:
    """Where to stop and what to tell, as typed."""

    panel: ClassVar[str] = "Stopping and watching"

    break_at: str | None = option_field(
        None,
        "Stop all ranks before the forward, after it, where it failed, or before a layer; one has a prompt.",
        "--break",
        metavar="before|after|error|LAYER",
    )
    break_rank: int | None = option_field(
        None,
        "Which rank has the prompt (default: 0; the one with --break-input; with error the one that failed).",
        min=0,
        metavar="N",
    )
    break_input: str | None = option_field(None, "Stop only at this input.", metavar="ID")
    break_wait: float | None = option_field(
        None,
        "At each stop wait so long for `actordbg attach`, instead of using this terminal; then go on.",
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
        False, "A line of each rank before and after each forward: shapes, dtype, device, mode, loss.", "--verbose", "-v"
    )
    log_level: str | None = option_field(
        None, "info is --verbose, debug has a line for each layer too (default: warning, no lines).", metavar="warning|info|debug"
    )
    expect_eval: bool = option_field(False, "Fail an input whose module is not in eval mode.")

    def on(self, engine: str, several_nodes: bool, apart: bool = False, yes: bool = False) -> StopOptions:
        """The same where groups run there; what cannot be there is refused. apart: nodes do not see the store's folder.

        yes: nodes may listen for an editor.
        """
        from actordbg.debug.replay_stops import ERROR, POST_MORTEM

        if engine != "ray":
            if self.ray_debug_error:
                raise UsageError("--ray-debug-error belongs to a Ray cluster", hint="add --engine ray; here it is --break error")
            return self
        wanted = self
        if self.ray_debug_error or os.environ.get(POST_MORTEM) == "1":
            if self.break_at not in (None, ERROR):
                raise UsageError(
                    f"--ray-debug-error and --break {self.break_at} stop at different places",
                    hint=f"one of them; --break {self.break_at} --debugpy 0 stops there for Ray's debugger",
                )
            wanted = replace(self, break_at=ERROR, debugpy=self.debugpy or 0)
        if wanted.debugpy:
            raise UsageError(
                f"--debugpy {wanted.debugpy} is a port of this machine, and ranks run on nodes, several on one",
                hint="--debugpy 0: each takes a free port, says which, and Ray's debugger lists it",
            )
        if several_nodes and (wanted.break_at is not None or wanted.debugpy is not None):
            raise Unsupported(
                "ranks that stop meet through sockets of one machine, and this group spans several nodes",
                hint="a group on one node (leave --gpus-per-node out); one rank of it can be a replay with --backend plain",
            )
        if apart and wanted.break_at is not None and wanted.debugpy is None:
            raise Unsupported(
                "a prompt is a socket in the replay's folder, and with a store behind a URL that folder is a node's own",
                hint="--debugpy 0 stops there for an editor; or a store on a file system that all nodes mount",
            )
        text = "debugpy listens on the addresses of the nodes, and whoever reaches them there can run code as you"
        if wanted.debugpy is not None and not (yes or output.agreed(text)):
            raise Refused(
                text, hint="in a network that you trust, --yes; or --break without --debugpy, whose prompt only you can open"
            )
        return wanted

    def order(self, spec: ReplaySpec) -> StopOrder:
        """What this asks of the workers of a replay; what cannot be is refused before they start."""
        from actordbg.debug.replay_stops import LEVELS, StopOrder

        terminal = sys.stdin.isatty() and sys.stderr.isatty()
        self._refuse(terminal, spec.config)
        return StopOrder(
            at=self.break_at or "",
            rank=self.break_rank,
            dump=self._dump(spec),
            wait_s=self.break_wait,
            terminal=terminal and self.break_wait is None,
            debugpy=self.debugpy,
            level=self.log_level or LEVELS[self.verbose],
            expect_eval=self.expect_eval,
        )

    def _refuse(self, terminal: bool, config: ReplayConfig) -> None:
        """What makes no sense here, or has no place in this configuration."""
        from actordbg.debug.replay_stops import AFTER, BEFORE, ERROR, LEVELS

        wanted = self.break_at or ""
        if wanted and not terminal and self.break_wait is None and self.debugpy is None:
            raise UsageError(
                "--break needs a terminal for its prompt, and this command has none", hint=f"run it in one; {_ATTACH}"
            )
        if self.break_input is not None and not wanted:
            raise UsageError("--break-input alone does not say where to stop", hint="add --break before, after, error or LAYER")
        if self.debugpy is not None:
            require_package("--debugpy", "debugpy")
        if self.log_level is not None and self.log_level not in LEVELS:
            raise UsageError(f"--log-level {self.log_level} is not known", hint=f"one of: {', '.join(LEVELS)}")
        if self.break_rank is not None and self.break_rank >= config.nproc:
            ranks = f"--break-rank {self.break_rank}: this replay has ranks 0 to {config.nproc - 1}"
            raise UsageError(ranks, hint="a rank of the replay")
        if wanted and config.truth is not None:
            raise UsageError("--break and --truth contradict each other: the truth has no Actor", hint="leave one of them out")
        if wanted not in ("", BEFORE, AFTER, ERROR) and (config.compile or config.deepcompile):
            raise Unsupported(
                f"--break {wanted}: compiled code has no layers to stop at",
                hint="--no-compile; or --break before, after or error",
            )

    def _dump(self, spec: ReplaySpec) -> str | None:
        """The only input to stop at; None for each."""
        if self.break_input is None:
            return None
        ids = [item.dump_id for item in spec.inputs]
        return resolve(self.break_input, ids, "input of this replay", made_by="dump ls", error=UsageError)
