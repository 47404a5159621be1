"""The work of `actordbg actor init`: the program that builds the actor, and its answer."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from actordbg.actor.signatures import explain
from actordbg.base.errors import EnvironmentProblem, LaunchProblem, error_named
from actordbg.base.processes import start_ticks
from actordbg.cli import output
from actordbg.config.as_ran import on_machine
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.init_program import InitOrder, InitResult
from actordbg.replay.launch import Launched, groups_of, launch
from actordbg.replay.supervise import interruptible, undisturbed

INIT_MODULE = "actordbg.replay.init_program"
_LOG_TAIL = 3000
_GRACE_S = 5.0


@dataclass
class InitAnswer:
    """What was built, as read off the built model on rank 0, and what one forward took; times in seconds, memory in bytes.

    `ok`: every rank ran. The slowest rank's times and the largest rank's memory are given. `findings` were known before.
    """

    ok: bool
    asked: dict[str, Any]
    resolved: dict[str, Any]
    batch_size: int
    seq_len: int
    forward_s: float | None
    backward_s: float | None
    peak_memory_bytes: int | None
    logprob_mean: float | None
    loss: float | None
    grad_norm: float | None
    graphs: int | None
    saved: str | None
    findings: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    signature: str | None = None
    explanation: str | None = None
    ways_out: list[str] = field(default_factory=list)


def run_init(config: ReplayConfig, order: InitOrder) -> list[InitResult]:
    """Start the workers with the launchers that a replay uses, wait for them, and return every rank's result.

    Raises LaunchProblem when one ends, or hangs past the configuration's timeout, without a result; KeyboardInterrupt after
    Ctrl-C, SIGTERM or SIGHUP. No worker is left in any case: if this process is killed outright, they notice and end.
    """
    me = os.getpid()
    order = replace(order, models=str(Path(order.models).absolute()), supervisor=(me, start_ticks(me)))
    started: list[Launched] = []
    with interruptible(), tempfile.TemporaryDirectory(prefix="actordbg-init-") as folder:
        work = Path(folder) / "order.json"
        work.write_text(json.dumps(asdict(order)))
        try:
            for group in groups_of(config):
                started.append(launch(config, group, work, INIT_MODULE))
            return _collect(Path(folder), config, started)
        finally:
            with undisturbed():
                for one in started:
                    one.end()


def _collect(folder: Path, config: ReplayConfig, started: list[Any]) -> list[InitResult]:
    """Every rank's result; when one failed, those that came within a moment (the others may wait for it for ever)."""
    deadline = time.monotonic() + config.timeout_s
    results: dict[int, InitResult] = {}
    while len(results) < config.nproc and time.monotonic() < deadline:
        ended = all(one.process.poll() is not None for one in started)
        paths = {rank: folder / f"rank{rank}.json" for rank in range(config.nproc) if rank not in results}
        new = {rank: InitResult(**json.loads(path.read_bytes())) for rank, path in paths.items() if path.is_file()}
        results |= new
        if any(result.error_class for result in new.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if ended:
            break
        time.sleep(0.05)
    if len(results) < config.nproc and not any(result.error_class for result in results.values()):
        raise _no_result(folder, sorted(set(range(config.nproc)) - results.keys()))
    return [results[rank] for rank in sorted(results)]


def _no_result(folder: Path, ranks: list[int]) -> LaunchProblem:
    tail = "\n".join(path.read_text(errors="replace")[-_LOG_TAIL:] for path in sorted(folder.glob("*.log")))
    return LaunchProblem(
        f"no result from rank {', '.join(map(str, ranks))}: it died, or took longer than the timeout:\n{tail}".rstrip(),
        hint="`actordbg doctor` checks this environment; --timeout gives it more time",
    )


def answer_of(order: InitOrder, results: list[InitResult], findings: list[dict[str, Any]]) -> InitAnswer:
    failed = next((one for one in results if one.error_class), None)
    if failed is not None and (ours := error_named(str(failed.error_class), str(failed.error), failed.hint or "")) is not None:
        raise ours  # an error of actordbg's own tree in the worker is the same error here, with its exit code
    if failed is not None and str(failed.error_class).endswith("ModuleNotFoundError"):
        hint = "`actordbg doctor` shows what is missing; pip install 'actordbg[replay]'"
        raise EnvironmentProblem(f"the actor cannot be built here: {failed.error}", hint=hint)
    explanation, ways_out = (failed and explain(failed.signature or "")) or (None, ())
    return InitAnswer(
        ok=failed is None,
        asked=order.config,
        batch_size=order.batch_size,
        seq_len=order.seq_len,
        saved=order.save if failed is None else None,
        findings=findings,
        error=f"rank {failed.rank}: {failed.error_class}: {failed.error}" if failed else None,
        signature=failed.signature if failed else None,
        explanation=explanation,
        ways_out=list(ways_out),
        **{name: _largest(results, name) for name in ("forward_s", "backward_s", "peak_memory_bytes")},
        **{name: getattr(results[0], name) for name in ("resolved", "logprob_mean", "loss", "grad_norm", "graphs")},
    )


def _largest(results: list[InitResult], name: str) -> Any:
    return max((value for one in results if (value := getattr(one, name)) is not None), default=None)


def render(answer: InitAnswer) -> None:
    if answer.resolved:
        for label, text in _lines(answer):
            output.say_fact(label, text, 12)
    if not answer.ok:
        output.say_fact("failed", str(answer.error), 12)
        output.say_fact("signature", str(answer.signature), 12)
        if answer.explanation:
            output.say_fact("why", answer.explanation, 12)
        for way in answer.ways_out:
            output.say_fact("way out", way, 12)


def _lines(answer: InitAnswer) -> list[tuple[str, str]]:
    seen = answer.resolved
    lines = [
        ("model", f"{seen['model']} ({seen['model_class']}, {seen['num_layers']} layers, vocabulary {seen['vocab_size']:,})"),
        ("parameters", f"{seen['parameters']:,} in {seen['dtype']}"),
        ("built", on_machine(answer.asked, seen)),
        ("load", f"{seen['load_s']:.2f} s"),
    ]
    if answer.forward_s is not None:
        compiled = f", {output.plural(answer.graphs, 'graph')} compiled" if answer.graphs else ""
        lines.append(("forward", f"{answer.forward_s:.3f} s on {answer.batch_size} x {answer.seq_len}{compiled}"))
    if answer.backward_s is not None:
        lines.append(("backward", f"{answer.backward_s:.3f} s, loss {answer.loss:.4f}, gradient norm {answer.grad_norm:.4f}"))
    lines.append(("peak memory", output.human_bytes(answer.peak_memory_bytes)))
    if answer.saved:
        lines.append(("saved", answer.saved))
    return lines
