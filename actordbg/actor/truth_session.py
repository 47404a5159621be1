"""The truth: each row alone, unpadded, eager attention, fp32 or fp64, plain PyTorch, the same weights.

A padded batch, a packed one, a fused kernel, a sharded model: all are ways to compute the log-probs that *this* computes without
any of them. So a configuration is judged by its distance from the truth, not from another configuration that may share its
fault. The trainer's Actor is not used: what it does around the model (rolling, slicing, unpadding, masking) is implemented
here again, in its simplest form:

    log_prob[row, t] = log softmax(logits(ids that the mask attends to, up to t) / temperature)[id at t + 1]

for every t that the summaries' mask selects, at the place in [B, A] or [B, S-1] where the Actor returns it; 0 elsewhere.
Padding may be on either side and in the middle of a row; positions count the attended tokens, from 0, as the Actor counts
them, unless the call brought its own. A row gets its own images, found by their placeholder tokens, and with images the model's
own code counts positions, whatever the call brought. The loss is the mean of -log_prob over the mask of the whole batch; its
gradient is summed row by row. What has no truth is refused with the reason: an action whose predecessor is not attended, masks
with other values than 0 and 1, videos.

In bf16 or fp16 this is not a truth, but the same computation in that dtype. Its distance from the truth is the cost of the dtype
alone (`actordbg noise`).

A worker runs a `TruthSession` as it runs an `ActorSession`.
"""

from __future__ import annotations

import gc
import inspect
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actordbg.actor import forward_outcome as measure, routing, rules as known, truth_model
from actordbg.actor.backends.backend import Place, set_seed
from actordbg.actor.changes import attended_tokens, chosen_tokens, next_first_ids
from actordbg.actor.forward_outcome import ForwardOutcome, GradientKeeper
from actordbg.actor.from_papers import against_formulas
from actordbg.actor.model_code import guard, require_consent
from actordbg.actor.models import locate
from actordbg.actor.other_log_probs import Chosen, Closed, Laid
from actordbg.actor.truth_model import PREFIX, planted, sizes_of
from actordbg.base.errors import Unsupported
from actordbg.config import consent
from actordbg.config.choices import Choices, choose, first_of, gather_facts
from actordbg.config.replay_config import DTYPES, ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.locate_record import FormulaCheck
from actordbg.store.payload import Dump
from actordbg.trainers import images
from actordbg.trainers.captured_call import ReplayedCall, text_call
from actordbg.trainers.rows_actor import describe, drawn_share, follow_adapters, has_experts


class Decided:
    """The settings that a session of either kind decides from a configuration, the record of the first dump, and this machine."""

    config: ReplayConfig
    choices: Choices
    model_cache: Path

    def decide(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path) -> None:
        """Decide all settings. No session loads a model before this: here a model's own code meets both of its walls.

        Raises, before anything changed, UnsafeInput for a model with code and without consent, Unsupported for a configuration
        that is known to fail here.
        """
        os.environ["ACTORDBG_DISABLE"] = "1"  # a replay in a patched environment must not record itself
        require_consent(config.model, model_cache)
        guard(config.model)
        torch.ones(8).cos()  # a process's first cosine is inexact if threads share it: findings/the-first-cosine.sh
        facts = gather_facts(cuda=torch.cuda.is_available(), gpus=torch.cuda.device_count())
        choices = choose(config, defaults, facts)
        known.refuse(config, choices, facts)
        self.config, self.choices, self._facts, self.model_cache = config, choices, facts, model_cache

    def backward_for(self, record: DumpRecord) -> bool:
        """Return whether to replay this dump with a backward: as configured, else (plain backend) as it was recorded.

        A DeepSpeed engine is built with or without an optimizer, and its ranks act together, so there it is decided once.
        """
        if self.config.backward is not None or self.config.backend != "plain" or record.grad_enabled is None:
            return self.choices.backward
        return record.grad_enabled

    def takes(self, config: ReplayConfig, defaults: DumpRecord | None) -> bool:
        """Return whether `switch` can change what is loaded to this configuration."""
        return False

    def switch(self, config: ReplayConfig, defaults: DumpRecord | None) -> None:
        """Continue under another configuration. Unsupported, before anything changed, if what is loaded cannot `take` it."""
        raise Unsupported("this process cannot take the configuration", hint="start another process for it")


class TruthSession(Decided):
    """The truth's model, built once: see `actordbg.actor.session.ActorSession` for what each method promises."""

    is_collective = False
    tainted = False
    keeper = GradientKeeper

    def __init__(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path) -> None:
        self._load(config, defaults, model_cache)

    def _load(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path) -> None:
        began = time.perf_counter()
        self.decide(config, defaults, model_cache)
        set_seed(self.choices.seed)
        self._place = Place.from_environment()
        self._device = self._place.device()
        self._dtype = getattr(torch, {"fp64": "float64", **DTYPES}[config.truth or "fp32"])
        self._wide = torch.promote_types(self._dtype, torch.float32)  # of what is computed from the logits, as the Actor does
        path = locate(self.choices.model, model_cache, num_layers=self.choices.num_layers)
        trust = consent.is_given(config.model)
        self.model = truth_model.load(
            path, weights=DTYPES[self.choices.dtype], dtype=self._dtype, device=self._device, trust=trust
        )
        self._dropout = drawn_share(self.model)
        self._compared = False
        self.resolved: dict[str, Any] = self._describe() | {"load_s": time.perf_counter() - began}

    def run(self, dump: Dump, *, backward: bool, keep: bool = False) -> ForwardOutcome:
        """Compute the truth of a captured call, one row at a time. With `keep`, `tensors` hold what is worth storing."""
        call, record = self._call(dump), dump.record
        training = bool(first_of(record.training, backward)) and not self._dropout
        self.model.train(training)
        follow_adapters(self.model, record.actor)
        measure.reset_peak(self._device)
        try:
            with measure.keeping_memory():
                outcome = self._rows(call, dump, backward)
            if backward:
                self._take_gradients(outcome, keep=keep and self.config.keep_gradients)
        finally:
            self.model.zero_grad(set_to_none=True)
        outcome.training = training
        if record.training and self._dropout:
            note = f"the run was in training mode with dropout {self._dropout:g}: the truth drops nothing"
            outcome.notes = (*outcome.notes, note)
        outcome.peak_memory_bytes = measure.peak_bytes(self._device)
        if not self._compared:
            outcome.formulas, self._compared = self._against_formulas(call), True
        if keep:
            outcome.keep()
        if keep and self.config.planted:
            for fault, sizes in sizes_of(self.model, self._dtype).items():
                for size in sizes:
                    with planted(self.model, fault, size):
                        outcome.tensors[f"{PREFIX}{fault}/{size:g}"] = self._rows(call, dump, False, {}).log_probs
        return outcome

    def takes(self, config: ReplayConfig, defaults: DumpRecord | None) -> bool:
        return config.truth is not None and config.model == self.config.model

    def switch(self, config: ReplayConfig, defaults: DumpRecord | None) -> None:
        """Reload the model, perhaps in another dtype: this process has already imported everything."""
        if not self.takes(config, defaults):
            return super().switch(config, defaults)
        self.close()
        return self._load(config, defaults, self.model_cache)

    def close(self) -> None:
        """Free the model."""
        del self.model
        gc.collect()

    def _rows(
        self,
        call: ReplayedCall,
        dump: Dump,
        backward: bool,
        closed: Mapping[str, Closed] | None = None,
        objective: Callable[[int, Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> ForwardOutcome:
        """Compute the rows. closed: for causes, other log-probs to compute from the same logits, by their names in `tensors`.
        With them, or with {}, no operation is looked at for a narrower dtype, which takes as long as the forward.

        objective: a row's part of another loss, of its number, its actions' columns, log-probs [n] and logits [n, V].
        """
        device, given, mask = self._device, call.arguments, call.mask
        sequences, own = given["sequences"], given.get("position_ids")
        pictures = images.images_of(self.model.config, given)
        attended = attended_tokens(given.get("attention_mask"), sequences)
        temperature = self._temperature(dump)
        weight = first_of(given.get("action_mask"), mask).to(device, self._wide)  # the Actor multiplies by it
        experts = self._experts(dump)
        log_probs = torch.zeros(mask.shape)
        entropy = torch.zeros(mask.shape) if dump.record.arguments.get("return_entropy") else None
        count = max(int(mask.sum()), 1)
        forward_s = backward_s = loss = 0.0
        narrowed = truth_model.Narrowed(self._dtype)
        beside = {name: torch.zeros(mask.shape) for name in closed or ()}
        next_row = next_first_ids(sequences, attended)
        for row, columns, chosen in chosen_tokens(mask.cpu(), attended.cpu()):
            began = measure.now(device)
            ids, places = sequences[row, attended[row]], mask[row].nonzero().squeeze(-1).cpu()
            labels = sequences[row, (columns + 1).to(device)]
            forced = self._forced(experts, (row, attended[row].cpu()))
            with torch.set_grad_enabled(backward), forced, narrowed if closed is None else nullcontext():
                own_places = None if own is None else own[row, attended[row]]
                logits = self._logits(ids, chosen.to(device), own_places, shown=self._shown(given, pictures, row, ids))
                whole = bool(closed or objective)
                scores, spread, wide = self._scored(logits, labels, temperature, whole=whole, entropy=entropy is not None)
                scores = scores * weight[row, places.to(device)]
                del logits  # before those of the next row
            if entropy is not None:
                entropy[row, places] = spread.float().cpu()
            log_probs[row, places] = scores.detach().float().cpu()
            with torch.no_grad():
                first = torch.arange(len(labels), device=device) == 0
                following = labels.where(attended[row, (columns + 1).to(device)], next_row[row])
                for name, function in (closed or {}).items():
                    beside[name][row, places] = function(wide, Chosen(labels, first, following)).float().cpu()
            forward_s += measure.now(device) - began
            if backward:
                began = measure.now(device)
                part = -scores.sum() / count if objective is None else objective(row, places, scores, wide)
                loss += float(part.detach())
                part.backward()  # type: ignore[no-untyped-call]
                backward_s += measure.now(device) - began
        notes = call.notes
        if narrowed.counts:
            worst = ", ".join(f"{name} ({times}x)" for name, times in narrowed.counts.most_common(3))
            notes += (f"not all of the truth was computed in {str(self._dtype).removeprefix('torch.')}: {worst}",)
        return ForwardOutcome(
            log_probs=log_probs,
            mask=mask.cpu(),
            forward_s=forward_s,
            backward_s=backward_s if backward else None,
            entropy=entropy,
            loss=loss if backward else None,
            folded=call.folded,
            temperature=temperature,
            notes=notes,
            tensors=beside,
        )

    def _scored(
        self, logits: Tensor, labels: Tensor, temperature: float, *, whole: bool = False, entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs [n] of `labels`, entropies [n] if asked for, and the last logits / T that are wide: all if `whole`."""
        scores, entropies = [], [logits.new_zeros(0)]
        at_once = len(labels) if whole else max(1, _MOST_AT_ONCE // logits.shape[-1])
        for part, wanted in zip(torch.split(logits, at_once), torch.split(labels, at_once), strict=True):
            wide = part.to(self._wide) / temperature
            normalizer = torch.logsumexp(wide, dim=-1)
            chosen = wide.gather(-1, wanted.unsqueeze(-1))
            scores.append(chosen.squeeze(-1) - normalizer)
            if entropy:
                flat = wide.detach()
                terms = torch.softmax(flat, dim=-1) * flat
                entropies.append(normalizer.detach() - terms.sum(-1))
        return torch.cat(scores), torch.cat(entropies), wide

    def closed(self, dump: Dump, closed: Mapping[str, Closed]) -> dict[str, Tensor]:
        """Return other log-probs in closed form from the logits of a call, by their names, and "": the call's own."""
        ran = self._rows(self._call(dump), dump, False, closed)
        return {"": ran.log_probs, **ran.tensors}

    @torch.no_grad()
    def arranged(self, dump: Dump, lay: Callable[[Tensor, Tensor, float], Laid], size: float) -> Tensor:
        """Return the log-probs of rows that are arranged in another way, in the mask's shape. NaN where a token is in no forward,
        its predecessor sees nothing, or the forward would have more than `MOST_TOGETHER` tokens.
        """
        call, temperature, experts = self._call(dump), self._temperature(dump), self._experts(dump)
        if images.PIXELS in call.arguments:
            raise Unsupported("rows with images are not arranged in another way", hint="judge the same rows without images")
        sequences, mask = call.arguments["sequences"], call.mask
        attended = attended_tokens(call.arguments.get("attention_mask"), sequences)
        sampled = torch.nn.functional.pad(mask, (sequences.shape[1] - mask.shape[1], 0))
        log_probs = torch.full(mask.shape, torch.nan)
        rows, labels = sampled.nonzero().unbind(1)
        for tokens, positions, seen in lay(attended, sampled, size):
            if int(tokens.sum()) > MOST_TOGETHER:
                continue
            at = (tokens.flatten().cumsum(0).view_as(sequences) - 1)[rows, labels - 1]
            here = tokens[rows, labels - 1] & (labels > 0)
            with self._forced(experts, tokens.cpu()):
                logits = self._logits(sequences[tokens], at[here], positions[tokens], seen[tokens])
            scores = self._scored(logits, sequences[rows, labels][here], temperature)[0]
            scores = scores.where(seen[tokens].cumsum(0)[at[here]] > 0, torch.nan)
            log_probs[rows[here].cpu(), (labels - sequences.shape[1] + mask.shape[1])[here].cpu()] = scores.float().cpu()
        return log_probs

    def _experts(self, dump: Dump) -> Tensor | None:
        """Return the recorded experts [B, S, L, K] that the truth routes by; None if its router chooses."""
        experts = None if self.config.routing == routing.FREE else routing.experts_of(dump.tensors)
        return experts if experts is not None and routing.blocks_of(self.model) else None

    def _forced(self, experts: Tensor | None, where: Any) -> AbstractContextManager[Any]:
        """Force the experts of the tokens `where`, an index of [B, S], inside the block."""
        return nullcontext() if experts is None else routing.routed(self.model, experts[where], force=True)

    def _call(self, dump: Dump) -> ReplayedCall:
        return text_call(dump, self.resolved["vocab_size"], self._device)

    def _temperature(self, dump: Dump) -> float:
        return float(first_of(self.config.temperature, dump.record.temperature, self.choices.temperature))

    def _against_formulas(self, call: ReplayedCall) -> FormulaCheck | None:
        """Compare the model's modules with the formulas of their papers, on the longest row."""
        sequences = call.arguments["sequences"]
        attended = attended_tokens(call.arguments.get("attention_mask"), sequences)
        row = int(attended.sum(-1).argmax())
        return against_formulas(self.model, sequences[row, attended[row]])

    def _shown(self, given: Mapping[str, Any], pictures: images.Images | None, row: int, ids: Tensor) -> dict[str, Tensor | None]:
        """Return the model's arguments for the images of a row with tokens `ids` [n]; none if it has none."""
        shown: dict[str, Tensor | None] = {} if pictures is None else {**pictures.of_rows(given, [row])}
        if shown and (name := images.types_name(self.model)):
            shown[name] = images.types_of(self.model.config, ids[None])
        return {**shown, "position_ids": None} if images.GRID in shown else shown  # the model counts in three dimensions

    def _logits(
        self, ids: Tensor, chosen: Tensor, own: Tensor | None = None, seen: Tensor | None = None,
        shown: Mapping[str, Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the logits [len(chosen), V] of one row's tokens `ids` [n] at the places `chosen`, in the truth's dtype.

        own: other positions than 0, 1, 2, .... A mask keeps transformers from looking for borders in them. seen: the tokens that
        attention sees, if not all. shown: the arguments of the row's images.
        """
        positions = torch.arange(len(ids), device=self._device) if own is None else own
        mask = None if own is None else torch.ones_like(ids[None]) if seen is None else seen[None].long()
        few = {"logits_to_keep": chosen} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        with truth_model.in_double(self._dtype):
            given = {"attention_mask": mask, "position_ids": positions[None], "use_cache": False, **few, **(shown or {})}
            output = self.model(ids[None], **given)
        logits: Tensor = output.logits[0]
        return logits if few else logits[chosen]

    def _take_gradients(self, outcome: ForwardOutcome, *, keep: bool) -> None:
        """Store the norm over all parameters, and with `keep` each parameter's gradient (see `GradientKeeper`)."""
        keeper, norms = self.keeper(keep), []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:  # the base of an adapter does not
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                norms.append(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)))
                keeper.take(name, gradient)
        outcome.tensors, outcome.gradients = keeper.tensors, keeper.facts
        outcome.grad_norm = math.hypot(*norms)

    def _describe(self) -> dict[str, Any]:
        return {
            **describe(self.model, self.choices, self._device),
            "oracle": self.config.truth,
            "experts": has_experts(self.model),
            "undropped": self._dropout,
            "shared_code": truth_model.shared_code(self.model),
            "dtype": self.choices.dtype,
            "packing": False,
            "temperature": self.choices.temperature,
            "rank": self._place.rank,
            "actor": None,
            "versions": dict(self._facts.versions),
            "model_path": inspect.getfile(type(self.model)),
            "backend": "plain",
            "compile": False,
            "deepcompile": False,
            "engine": None,
            "zero_stage": 0,
            "world_size": self._place.world_size,
        }


_MOST_AT_ONCE = 2**22
"""Logits that are in fp64 at once: those of a row with a large vocabulary would take several times the model's memory."""
MOST_TOGETHER = 4096
"""Tokens of one forward of rows that are arranged in another way: eager attention holds the square of them."""
