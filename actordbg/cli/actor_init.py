"""`actordbg actor init`: build only the actor, try it once, and say what it is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import EnvironmentProblem, LaunchProblem, error_named
from actordbg.cli.options import option, require_good, settings_of
from actordbg.cli.output import emit, human_bytes, plural, say_fact
from actordbg.cli.setting_options import NONE, Given, takes_settings

if TYPE_CHECKING:
    from actordbg.config.replay_config import ReplayConfig
    from actordbg.replay.init_program import InitOrder, InitResult

INIT_MODULE = "actordbg.replay.init_program"
_LOG_TAIL = 3000
_GRACE_S = 5.0


@takes_settings("actor init")
def init(
    ctx: typer.Context,
    settings: Given = NONE,
    batch_size: int = option(2, "Rows of the dummy input.", min=1),
    seq_len: int = option(128, "Positions of the dummy input, padding included.", min=4),
    save: Path | None = option(None, "Write the model there with save_pretrained.", metavar="DIR"),
) -> None:
    """Build the actor alone and run one forward.

    The input is a dummy. Prints the settings that the built actor has, which may differ from those that were asked for.

    Example: actordbg actor init --backend deepspeed --zero-stage 2 --packing --backward
    """
    from actordbg.actor.hub_model import find_model
    from actordbg.actor.known_failures import check_config, find_trainer, refuse_hits
    from actordbg.base.owners import own_cache
    from actordbg.cli.replaying import asked_for, say_findings
    from actordbg.replay.init_program import InitOrder

    config = asked_for(ctx, settings).config
    findings = check_config(config)
    refuse_hits(findings)
    find_trainer(config)
    find_model(config.model)
    say_findings(findings)
    target = None if save is None else str(save.absolute())
    store = settings_of(ctx).store
    models = own_cache("models") if store.is_dir() and not os.access(store, os.W_OK | os.X_OK) else store / "models"
    order = InitOrder(config.to_dict(), str(models), batch_size, seq_len, target)
    answer = answer_of(order, run_init(config, order)) | {"findings": findings}
    emit(answer, render)
    require_good(answer["ok"])


def run_init(config: ReplayConfig, order: InitOrder) -> list[InitResult]:
    """Start the workers with the launchers that a replay uses, wait for them, and return every rank's result.

    Raises LaunchProblem when one ends, or hangs past the configuration's timeout, without a result; KeyboardInterrupt after
    Ctrl-C, SIGTERM or SIGHUP. No worker is left in any case: if this process is killed outright, they notice and end.
    """
    from tempfile import TemporaryDirectory

    from actordbg.base.processes import start_ticks
    from actordbg.replay.launch import Launched, groups_of, launch
    from actordbg.replay.supervise import interruptible, undisturbed

    me = os.getpid()
    order = replace(order, models=str(Path(order.models).absolute()), supervisor=(me, start_ticks(me)))
    started: list[Launched] = []
    with interruptible(), TemporaryDirectory(prefix="actordbg-init-") as folder:
        work = Path(folder) / "order.json"
        work.write_text(json.dumps(asdict(order)))
        try:
            for group in groups_of(config):
                started.append(launch(config, group, work, INIT_MODULE))
            return _collect(Path(folder), config, started)
        finally:
            with undisturbed():
                for worker in started:
                    worker.end()


def _collect(folder: Path, config: ReplayConfig, started: list[Any]) -> list[InitResult]:
    """Every rank's result; when one failed, those that came within a moment (the others may wait for it for ever)."""
    from actordbg.replay.init_program import InitResult

    deadline = time.monotonic() + config.timeout_s
    results: dict[int, InitResult] = {}
    while len(results) < config.nproc and time.monotonic() < deadline:
        ended = all(worker.process.poll() is not None for worker in started)
        paths = {rank: folder / f"rank{rank}.json" for rank in range(config.nproc) if rank not in results}
        new = {rank: InitResult(**json.loads(path.read_bytes())) for rank, path in paths.items() if path.is_file()}
        results |= new
        if any(result.error_class for result in new.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if ended:
            break
        time.sleep(0.05)
    if len(results) < config.nproc and not any(result.error_class for result in results.values()):
        tail = "\n".join(path.read_text(errors="replace")[-_LOG_TAIL:] for path in sorted(folder.glob("*.log")))
        ranks = ", ".join(str(rank) for rank in range(config.nproc) if rank not in results)
        raise LaunchProblem(
            f"no result from rank {ranks}: it died, or took longer than the timeout:\n{tail}".rstrip(),
            hint="`actordbg doctor` checks this environment; --timeout gives it more time",
        )
    return [results[rank] for rank in sorted(results)]


def answer_of(order: InitOrder, results: list[InitResult]) -> dict[str, Any]:
    """What was built, as read off the built model on rank 0, and what one forward took; times in seconds, memory in bytes.

    `ok`: every rank ran. The slowest rank's times and the largest rank's memory are given.
    """
    from actordbg.actor.signatures import explain

    failed = next((result for result in results if result.error_class), None)
    if failed is not None and (ours := error_named(str(failed.error_class), str(failed.error), failed.hint or "")) is not None:
        raise ours  # an error of actordbg's own tree in the worker is the same error here, with its exit code
    if failed is not None and str(failed.error_class).endswith("ModuleNotFoundError"):
        hint = "`actordbg doctor` shows what is missing; pip install 'actordbg[replay]'"
        raise EnvironmentProblem(f"the actor cannot be built here: {failed.error}", hint=hint)
    explanation, ways_out = (failed and explain(failed.signature or "")) or (None, ())
    largest = {
        name: max((value for result in results if (value := getattr(result, name)) is not None), default=None)
        for name in ("forward_s", "backward_s", "peak_memory_bytes")
    }
    return {
        "ok": failed is None,
        "asked": order.config,
        "batch_size": order.batch_size,
        "seq_len": order.seq_len,
        **largest,
        **{name: getattr(results[0], name) for name in ("resolved", "logprob_mean", "loss", "grad_norm", "graphs")},
        "saved": order.save if failed is None else None,
        "error": f"rank {failed.rank}: {failed.error_class}: {failed.error}" if failed else None,
        "signature": failed.signature if failed else None,
        "explanation": explanation,
        "ways_out": list(ways_out),
    }


def render(answer: dict[str, Any]) -> None:
    for label, text in _lines(answer):
        say_fact(label, text, 12)


def _lines(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from actordbg.config.as_ran import on_machine

    if built := answer["resolved"]:
        vocabulary = f"{built['num_layers']} layers, vocabulary {built['vocab_size']:,}"
        yield "model", f"{built['model']} ({built['model_class']}, {vocabulary})"
        yield "parameters", f"{built['parameters']:,} in {built['dtype']}"
        yield "built", on_machine(answer["asked"], built)
        yield "load", f"{built['load_s']:.2f} s"
        if answer["forward_s"] is not None:
            compiled = f", {plural(answer['graphs'], 'graph')} compiled" if answer["graphs"] else ""
            yield "forward", f"{answer['forward_s']:.3f} s on {answer['batch_size']} x {answer['seq_len']}{compiled}"
        if answer["backward_s"] is not None:
            figures = f"loss {answer['loss']:.4f}, gradient norm {answer['grad_norm']:.4f}"
            yield "backward", f"{answer['backward_s']:.3f} s, {figures}"
        yield "peak memory", human_bytes(answer["peak_memory_bytes"])
        if answer["saved"]:
            yield "saved", answer["saved"]
    if not answer["ok"]:
        yield "failed", str(answer["error"])
        yield "signature", str(answer["signature"])
        if answer["explanation"]:
            yield "why", answer["explanation"]
        yield from (("way out", way) for way in answer["ways_out"])
