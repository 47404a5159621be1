"""`run --turns`: the token ids of each turn of a rollout, as the engine got and sampled them. OpenRLHF's agents.

A process imports this module only on request, when it has imported `openrlhf.utils.agent`: an engine's process, not a training
one. Each `execute` of an agent then gets its engine through a stand-in that notes what `generate` gets and returns. At its end a
small file is published. A failure is printed once, and the rollout continues unrecorded, as it does for an agent that calls
`generate.remote`. At most `MOST` trajectories of a process are recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
import os
import socket
from collections.abc import Callable
from types import ModuleType
from typing import Any

from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import StoreFiles, atomic_write
from actordbg.formats.turn_record import TURNS, SampledTurn, Trajectory
from actordbg.trainers.openrlhf.told import told

MOST = 1024
_FAILED = "the turns of a rollout are not recorded"
_numbers = itertools.count()


def attach(module: ModuleType) -> None:
    """Wrap `execute` of each agent in `openrlhf.utils.agent`, and of those that are defined later."""
    base = module.AgentExecutorBase

    def init_subclass(cls: type, /, **more: Any) -> None:
        super(base, cls).__init_subclass__(**more)
        _wrap(cls)

    base.__init_subclass__ = classmethod(init_subclass)
    for kind in base.__subclasses__():
        _wrap(kind)


def _wrap(kind: type) -> None:
    original = vars(kind).get("execute")
    if original is not None and not hasattr(original, "__wrapped__"):
        kind.execute = _recording(original)  # type: ignore[attr-defined]


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    async def execute(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        number = next(_numbers)
        if number >= MOST or "llm_engine" not in given.arguments:
            return await original(*args, **kwargs)
        engine = given.arguments["llm_engine"] = _NotingEngine(given.arguments["llm_engine"])
        result = await original(*given.args, **given.kwargs)
        with told(_FAILED):
            await asyncio.to_thread(_publish, number, given.arguments.get("hf_tokenizer"), engine.turns, result)
        return result

    return execute


class _NotingEngine:
    """Stands in for the engine: notes the ids that `generate` gets and returns. turns: None marks an unreadable turn."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.turns: list[SampledTurn | None] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)
        return _Generate(method, self.turns) if name == "generate" else method


class _Generate:
    """Stands in for the engine's `generate`. Its other forms, such as `remote`, are the engine's own."""

    def __init__(self, method: Any, turns: list[SampledTurn | None]) -> None:
        self._method, self._turns = method, turns

    def __getattr__(self, name: str) -> Any:
        self._turns.append(None)
        return getattr(self._method, name)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, and note the turn."""
        output, turn = await self._method(*args, **kwargs), None
        with told(_FAILED):
            (sampled, *_), prompt = output.outputs, args[0] if args else kwargs["prompt_token_ids"]
            turn = SampledTurn(tuple(map(int, prompt)), tuple(map(int, sampled.token_ids)), str(sampled.text))
        self._turns.append(turn)
        return output


def _publish(number: int, tokenizer: Any, noted: list[SampledTurn | None], result: Any) -> None:
    turns = tuple(turn for turn in noted if turn is not None)
    if len(turns) < len(noted):
        raise ValueError(f"{len(noted) - len(turns)} of {len(noted)} turns could not be read")
    trained = tuple(map(int, result["observation_tokens"]))
    ranges = tuple((int(start), int(end)) for start, end in result["action_ranges"])
    bos, eos = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
    root, run = os.environ["ACTORDBG_STORE"], os.environ.get("ACTORDBG_RUN", "run")
    who = (run, socket.gethostname(), os.getpid(), number, now_timestamp())
    trajectory = Trajectory(
        *who, bos=bos, eos=eos, turns=turns, trained=trained, ranges=ranges, reward=_number(result.get("reward"))
    )
    atomic_write(StoreFiles(root).root / TURNS / run / trajectory.name, trajectory.to_json())


def _number(value: Any) -> float | None:
    """Return one finite number as a float; None for anything else, as the turns are recorded without it."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return number if math.isfinite(number := float(value)) else None
    return None
