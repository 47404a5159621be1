"""A session without a model: a running inference server scores the recorded ids (`--backend endpoint`).

Its log-probs are those of each row *alone*, behind an empty prefix cache where the server can empty it. The same rows are then
scored again in other ways, which must not matter; the tensors `engine/<way>` have their log-probs:

| Way | What differs from alone | What a difference means |
|---|---|---|
| together | all rows in one request | the batch changes the numbers |
| twice | the same requests once more | not deterministic, or the cache is wrong |
| cached | the prompt's cache is read (SGLang), or the last action is sampled behind it (vLLM) | the cache is wrong |
| reset | after another reset of the cache | the server changed meanwhile |

Servers score raw logits, so the temperature is 1. The truth is that of `--model`, which has to be the checkpoint that is served.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.changes import attended_tokens, chosen_tokens
from actordbg.actor.engine_client import SGLANG, EngineClient
from actordbg.actor.forward_outcome import ForwardOutcome
from actordbg.actor.hub_model import find_model
from actordbg.actor.truth_session import Decided
from actordbg.base.errors import Unsupported
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.journal import ENGINE_WAYS
from actordbg.store.payload import Dump
from actordbg.trainers.captured_call import text_call


class EndpointSession(Decided):
    """A server as a session: see `actordbg.actor.session.ActorSession` for what each method promises."""

    is_collective = False
    tainted = False

    def __init__(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path) -> None:
        began = time.perf_counter()
        self.decide(config, defaults, model_cache)
        self._client = EngineClient(config.url or "", config.served_model, config.timeout_s)
        served = self._client.connect()
        architecture = find_model(config.model) or {}
        architecture = architecture.get("text_config") or architecture
        self.resolved: dict[str, Any] = {
            **served,
            "model": self.choices.model,
            "backend": config.backend,
            "dtype": self.choices.dtype,
            "vocab_size": int(architecture.get("vocab_size") or 2**31),
            "temperature": 1.0,
            "device_name": "a server",
            "rank": 0,
            "world_size": 1,
            "versions": dict(self._facts.versions),
            "load_s": time.perf_counter() - began,
        }

    def backward_for(self, record: DumpRecord) -> bool:
        """Return False: a server runs no backward."""
        return False

    def run(self, dump: Dump, *, backward: bool, keep: bool = False) -> ForwardOutcome:
        """Score a captured call's rows. With `keep`, `tensors` hold what is worth storing, every way of asking included."""
        call = text_call(dump, self.resolved["vocab_size"], torch.device("cpu"))
        if call.folded or "position_ids" in call.arguments:
            what = "has token ids outside the vocabulary" if call.folded else "has its own position_ids"
            raise Unsupported(f"this call {what}, which a server cannot score", hint="replay another dump, or name its --model")
        sequences, mask = call.arguments["sequences"], call.mask.cpu()
        attended = attended_tokens(call.arguments.get("attention_mask"), sequences)
        rows = [(row, mask[row].nonzero().squeeze(-1), places, sequences[row, attended[row]].tolist())
                for row, _, places in chosen_tokens(mask, attended)]  # fmt: skip

        def placed(scores: list[list[float]]) -> Tensor:
            values = torch.zeros(mask.shape)
            for (row, columns, places, _), of_row in zip(rows, scores, strict=True):
                values[row, columns] = torch.tensor(of_row)[places]
            return values

        def alone() -> Tensor:
            return placed([self._client.score([ids])[0] for *_, ids in rows])

        can_reset, began = self._client.reset(), time.perf_counter()
        log_probs = alone()
        outcome = ForwardOutcome(log_probs, mask, time.perf_counter() - began, temperature=1.0, notes=call.notes)
        if keep:
            ways = {"together": placed(self._client.score([ids for *_, ids in rows])), "twice": alone()}
            if self._client.kind == SGLANG:
                ways["cached"] = placed([self._client.score([ids], int(places.min()))[0] for *_, places, ids in rows])
            else:
                ways |= self._sampled(rows, log_probs)
            if can_reset and self._client.reset():
                ways["reset"] = alone()
            outcome.keep()
            outcome.tensors |= {ENGINE_WAYS + way: values for way, values in ways.items()}
        return outcome

    def _sampled(self, rows: list[Any], log_probs: Tensor) -> dict[str, Tensor]:
        """Return log-probs in which each row's last action is as vLLM samples it; {} if it returns processed log-probs."""
        values = log_probs.clone()
        for row, columns, places, ids in rows:
            last = self._client.score_next(ids[: int(places[-1]) + 2])
            if last is None:
                return {}
            values[row, columns[-1]] = last
        return {"cached": values}

    def close(self) -> None:
        """Do nothing: the server belongs to the user."""
