"""`actordbg actor init`: build only the actor, and replay one synthetic input in a temporary store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import LaunchProblem
from actordbg.cli.options import option, require_good
from actordbg.cli.output import as_json, human_bytes, plural, say_fact
from actordbg.cli.setting_options import NONE, Given, takes_settings

if TYPE_CHECKING:
    from actordbg.records.replay_record import ReplaySpec
    from actordbg.store.layout import Store


VOCABULARY = 512
"""Token ids of the synthetic input are below this, so every model has them."""


@takes_settings("actor init")
def init(
    ctx: typer.Context,
    settings: Given = NONE,
    batch_size: int = option(2, "Rows of the synthetic input.", min=1),
    seq_len: int = option(128, "Length of the synthetic input, padding included.", min=4),
) -> None:
    """Build the actor alone and run one forward.

    The input is synthetic. Prints the settings that the built actor has, which may differ from those that were requested.

    Example: actordbg actor init --backend deepspeed --zero-stage 2 --packing --backward
    """
    from tempfile import TemporaryDirectory

    from actordbg.cli import replaying
    from actordbg.cli.replay_options import ChosenInputs
    from actordbg.dumps.create import create_dumps
    from actordbg.store.layout import Store

    config = replaying.asked_for(ctx, settings).config
    with TemporaryDirectory(prefix="actordbg-init-") as folder:
        store = Store(Path(folder) / "store")
        create_dumps(store, config.lanes, batch_size, seq_len, vocab_size=VOCABULARY, seed=config.seed or 0, run="init")
        spec = replaying.planned(store, config, ChosenInputs()).spec
        findings = replaying.require_runnable(store, spec, announce=False)
        replaying.say_findings(findings)
        answer = _tried(store, spec) | {"batch_size": batch_size, "seq_len": seq_len, "findings": findings}
    if not as_json(answer):
        for label, text in _lines(answer):
            say_fact(label, text, 12)
    require_good(answer["ok"])


def _tried(store: Store, spec: ReplaySpec) -> dict[str, Any]:
    """Build the actor, run the inputs, and return the built model's settings and the cost of one forward.

    `ok`: every rank ran. Times in seconds (the slowest rank's), memory in bytes (the largest rank's). Raises the worker's error
    if it is one of actordbg's, and LaunchProblem if a worker died without reporting an error.
    """
    from actordbg.actor.signatures import explain, signature_of
    from actordbg.records.journal import read_events
    from actordbg.records.replay_record import PASSED
    from actordbg.replay.replay_data import data_of
    from actordbg.replay.supervise import run_replay

    failed: dict[str, Any] | None = None
    try:
        run_replay(store, spec)
    except LaunchProblem:
        journals = sorted((store.replays / spec.replay_id).glob("rank*.jsonl"))
        failed = next((event for path in journals for event in read_events(path) if event["event"] == "broken"), None)
        if failed is None or failed["error_class"].endswith("ModuleNotFoundError"):
            raise
        failed["signature"] = signature_of(failed["error_class"], failed["error"], failed["trace"])
    data = data_of(store, spec)
    results = data.results
    failed = failed or next((vars(result) for result in results if result.status != PASSED), None)
    signature = failed and failed["signature"]
    explanation, ways_out = explain(signature or "") or (None, ())
    figures = {
        name: max((value for result in results if (value := getattr(result, name)) is not None), default=None)
        for name in ("forward_s", "backward_s", "peak_memory_bytes")
    }
    figures |= {name: getattr(results[0], name) if results else None for name in ("logprob_mean", "loss", "grad_norm", "graphs")}
    return {
        "ok": failed is None,
        "asked": spec.config.to_dict(),
        "resolved": data.resolved,
        **figures,
        "error": f"{failed['error_class']}: {failed['error']}" if failed else None,
        "signature": signature,
        "explanation": explanation,
        "ways_out": list(ways_out),
    }


def _lines(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from actordbg.config.as_ran import on_machine

    if built := answer["resolved"]:
        vocabulary = f"{plural(built['num_layers'], 'layer')}, vocabulary {built['vocab_size']:,}"
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
    if not answer["ok"]:
        yield "failed", str(answer["error"])
        yield "signature", str(answer["signature"])
        if answer["explanation"]:
            yield "why", answer["explanation"]
        yield from (("try", way) for way in answer["ways_out"])
