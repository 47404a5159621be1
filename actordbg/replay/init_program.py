"""The process behind `actordbg actor init`: build the actor, run one forward on a dummy input, say what came of it.

    python -m actordbg.replay.init_program --work ORDER.json

A launcher starts one for each rank. Each writes `rank<N>.json` beside the order: an InitResult. It is a process of its own, since
building an actor changes the process (CPU support, DeepSpeed's process group, compiled kernels) and may crash it. If the terminal
is killed, nobody is left to end the workers. So each looks once a second whether its supervisor lives.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actordbg.actor.signatures import signature_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.debug import stops
from actordbg.debug.replay_stops import ReplayStops, StopOrder


@dataclass(frozen=True)
class InitOrder:
    """What to build and to try. `models` is the folder for built models, `save` where to write the model, if anywhere.

    supervisor: (pid, start ticks) of the process that waits for the results; a worker ends with it. None: it does not.
    """

    config: dict[str, Any]
    models: str
    batch_size: int
    seq_len: int
    save: str | None = None
    supervisor: tuple[int, int] | None = None


@dataclass
class InitResult:
    """What one rank found. `resolved` as ActorSession has it; seconds and bytes; the error fields only where it failed."""

    rank: int
    resolved: dict[str, Any] = field(default_factory=dict)
    forward_s: float | None = None
    backward_s: float | None = None
    peak_memory_bytes: int | None = None
    logprob_mean: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    graphs: int | None = None
    error_class: str | None = None
    error: str | None = None
    hint: str | None = None
    signature: str | None = None
    trace: str | None = None


def try_actor(order: InitOrder, result: InitResult, folder: Path) -> None:
    """Build, run and save; fills `result` as far as it comes. The dummy input is made in a store in `folder`."""
    from actordbg.actor.session import open_actor
    from actordbg.dumps.create import create_dumps
    from actordbg.store import payload
    from actordbg.store.layout import Store

    with open_actor(ReplayConfig.from_dict(order.config), model_cache=Path(order.models)) as session:
        result.resolved = session.resolved
        vocabulary, seed = session.resolved["vocab_size"], session.choices.seed
        (path,) = create_dumps(Store(folder), 1, order.batch_size, order.seq_len, vocab_size=vocabulary, seed=seed)
        outcome = session.run(payload.load(path), backward=session.choices.backward)
        for name in ("forward_s", "backward_s", "peak_memory_bytes", "loss", "grad_norm", "graphs"):
            setattr(result, name, getattr(outcome, name))
        result.logprob_mean = float(outcome.log_probs[outcome.mask].double().mean())
        if order.save is not None:
            session.save(Path(order.save))


def main() -> int:
    """Run the order; the result says what happened, the exit code only whether it was written."""
    from actordbg.replay.worker import end_with, guarded, parsed

    options = parsed(argparse.ArgumentParser(prog="actordbg.replay.init_program"))
    order = InitOrder(**json.loads(options.work.read_text()))
    if order.supervisor is not None:
        pid, ticks = order.supervisor  # a list, as JSON has it
        end_with((pid, ticks))
    stops.in_replay = ReplayStops(options.work.parent, 0, StopOrder(), lambda *_, **__: None)  # nobody is at a prompt here
    result = InitResult(rank=int(os.environ.get("RANK", "0")))
    failure = guarded(lambda: try_actor(order, result, options.work.parent / f"input{result.rank}"))
    if failure is not None:
        result.error_class, result.error = failure.error_class, failure.error
        result.hint, result.trace = failure.hint or None, failure.trace
        result.signature = signature_of(failure.error_class, failure.error, failure.trace)
        sys.stderr.write(failure.trace)
    target = options.work.parent / f"rank{result.rank}.json"
    temporary = target.with_suffix(".part")
    temporary.write_text(json.dumps(asdict(result)))
    temporary.rename(target)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what torch and gloo do at interpreter exit can hang or crash, and the result is on disk
