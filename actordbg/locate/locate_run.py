"""Run the forced forward of one input through a loaded Actor, and judge each place.

    located = LocateRun(session, dump, outcome, backward, together, tell).run()

The truth and the clean model run row by row in this process, one after the other, so only one of them lies beside the suspect.
Then the suspect runs once, through the very call of the Actor that every replay makes, so its packing, its masks and its kernels
are judged. If ranks compute together, all of them do this at the same time, each for its own input, once all agree that they can.

A place is wrong if one of these holds:

    ratio over all tokens > LIMIT[dtype] + SPREAD / sqrt(elements)
    ratio over one row    > ROW[dtype] + SPREAD / sqrt(elements of the row)

Two healthy kernels differ by chance where there are few elements, and in fp32 by their order of summation, so fp32's limits are
wide; a fault there reads thousands. Where the clean model has no error at all (an embedding copies), the unit is 1/64 of the
dtype's rounding of the truth. Ranks that split a matrix round their partial sums, which the clean model does not have, so
with N of them the limits are sqrt(N) times as wide.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actordbg.actor.forward_outcome import ForwardOutcome, release
from actordbg.actor.from_papers import against_formulas
from actordbg.actor.session import ActorSession
from actordbg.base.errors import machine_errno
from actordbg.base.units import human_bytes
from actordbg.laws import changes
from actordbg.locate.clean_models import clean_model, dtype_of, one_line, truth
from actordbg.locate.forced_forward import Forcing, Key, Recording, Sums, Tape, places_of
from actordbg.locate.token_patterns import pattern_of
from actordbg.records.locate_record import EVERYTHING, INTO, MOST, OUT, FormulaCheck, Located, PlaceResult
from actordbg.store.payload import Dump
from actordbg.trainers.rows_actor import drawn_share, follow_adapters

LIMIT = {torch.bfloat16: 1.1, torch.float16: 1.1, torch.float32: 4.0}
ROW = {torch.bfloat16: 1.25, torch.float16: 1.25, torch.float32: 8.0}
SPREAD = 4.0
MOST_TOKENS = 1024
"""Tokens of a row that are judged: later ones run, with their own values."""
MOST_BYTES = 4 * 2**30
"""Bytes of the truth's values that are held; rows beyond run, with their own values."""
MOST_FIELDS, MOST_RATIO = 96, 1e9
"""Fields of tokens that a heat map has, and the largest ratio that it shows."""
_COPIED = 1 / 64


@dataclass
class LocateRun:
    """The forced forward of one input that `outcome` has run. together: other ranks compute with this rank. tell: called with
    the name of each next step. out_of_step: why this process has to be replaced afterwards.
    """

    session: ActorSession
    dump: Dump
    outcome: ForwardOutcome
    backward: bool
    together: bool
    tell: Callable[[str], None] = lambda name: None
    out_of_step: str = ""
    _floor: dict[Key, Sums] = field(default_factory=dict)
    _formulas: FormulaCheck | None = None

    def run(self) -> Located:
        """Judge every place. What cannot be judged is named in `unchecked`; no error of it fails the input."""
        try:
            return self._located()
        finally:
            release(self.session.device)  # the peaks of later inputs are their own

    def _located(self) -> Located:
        tape, why = Tape(), self._unsupported()
        if not why:
            why = self._guarded(lambda: self._prepare(tape))
        if why := self._agreed(why):
            return Located(unchecked=(f"{EVERYTHING}: {why}",))
        found = self._forcing(tape)
        if why := self._guarded(lambda: self._force(found)):
            if self.together or self.session.tainted:
                self.out_of_step = f"the forced forward failed ({why}), and its leftovers cannot be cleaned up"
            return Located(unchecked=(f"{EVERYTHING}: {why}",))
        notes: tuple[str, ...] = ()
        if self.session.config.compiles:
            notes += ("run eagerly: a compiled graph has no places inside",)
        if sum(tape.lengths) < int(self.call.inputs["attention_mask"].sum()):
            notes += (f"judged {sum(tape.lengths):,} tokens: at most {MOST_TOKENS:,} of a row",)
        located = judge(tape, found, self._floor, dtype_of(self.session), self._features, notes)
        return replace(located, formulas=self._formulas)

    def _unsupported(self) -> str:
        """Return why this configuration or this input has no clean counterpart, or ""."""
        session = self.session
        if why := changes.unsupported(self.dump):
            return why
        if session.ring_group is not None:
            return "a ring's attention has no clean counterpart in one process"
        if session.config.deepcompile:
            return "DeepCompile has put its own graph into the engine"
        if self.outcome.training and drawn_share(session.model):
            return "the call draws random numbers"
        size = int(session.resolved["parameters"]) * (8 if dtype_of(session) is torch.float32 else 4)
        if (free := _free_bytes(session.device)) is not None and size > free:
            return f"the truth's model needs {human_bytes(size)}, {human_bytes(free)} are free"
        return ""

    def _guarded(self, step: Callable[[], None]) -> str:
        """Return the error that the step raised, in a line, or ""."""
        try:
            step()
        except Exception as error:
            if machine_errno(error):
                raise
            return one_line(error)
        return ""

    def _agreed(self, why: str) -> str:
        """Return why this rank, or a rank that computes with it, cannot run the forced forward."""
        if not self.together:
            return why
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, why)
        return next(filter(None, reasons), "")

    def _prepare(self, tape: Tape) -> None:
        """Record the truth of every row, then measure the clean model's error in each place."""
        device, record = self.session.device, self.dump.record
        self.call = changes.plain_call(self.dump, int(self.session.resolved["vocab_size"]))
        ids, real = self.call.inputs["sequences"], changes.attended(self.call)
        columns = [real[row].nonzero().flatten()[:MOST_TOKENS] for row in range(len(ids))]
        self._rows: list[Tensor] = [ids[row, own].to(device) for row, own in enumerate(columns)]
        self.tell("locate: truth")
        with truth(self.session, device) as model, torch.no_grad():
            follow_adapters(model, record.actor)
            for row in self._rows:
                if tape.nbytes < MOST_BYTES:
                    with Recording(tape, len(row)).on(places_of(model)):
                        _forward(model, row) if len(row) else None
            self._formulas = against_formulas(model, max(self._rows, key=len))
        self._features = self._known_of(columns[: len(tape.lengths)])
        self.tell("locate: healthy")
        with clean_model(self.session, device) as model, torch.no_grad(), self.session.autocast(record):
            follow_adapters(model, record.actor)
            start = 0
            for number, length in enumerate(tape.lengths):
                index = torch.arange(start, start + length)
                with Forcing(tape, index, self._floor, number).on(places_of(model)):
                    _forward(model, self._rows[number])
                start += length

    def _known_of(self, columns: list[Tensor]) -> dict[str, Any]:
        """Return what is known of each of the truth's tokens, numpy [T] by feature. columns: those of each row."""
        row = torch.repeat_interleave(torch.arange(len(columns)), torch.tensor([len(own) for own in columns], dtype=torch.int64))
        padded = ~changes.attended(self.call).all(1)
        known = {"packed": row > 0} if self.outcome.packing else {}
        known |= {"row": row, "position": torch.cat(columns), "padded": padded[row]}
        return {name: values.numpy() for name, values in known.items()}

    def _forcing(self, tape: Tape) -> Forcing:
        """Build the hooks for the suspect: which of the truth's tokens lies at each position that it computes."""
        real = changes.attended(self.call)
        numbers = torch.full(real.shape, -1)
        start = 0
        for row, length in enumerate(tape.lengths):
            columns = real[row].nonzero().flatten()[:length]
            numbers[row, columns] = torch.arange(start, start + length)
            start += length
        rows, columns = changes.places(self.call, self.outcome.packing).unbind(1)
        size = self.session.config.tp
        return Forcing(tape, numbers[rows, columns], {}, part=(int(self.session.resolved["rank"]) % size, size))

    def _force(self, forcing: Forcing) -> None:
        self.tell("locate: forced forward")
        model = self.session.model
        with changes.eagerly(model), forcing.on(places_of(model)):
            self.session.probe(self.call, lambda *_: None, backward=self.backward)


def judge(
    tape: Tape,
    found: Forcing,
    floor: dict[Key, Sums],
    dtype: torch.dtype,
    features: Mapping[str, Any],
    notes: tuple[str, ...] = (),
) -> Located:
    """Hold the suspect's errors against the clean model's, place by place. features: of each token, for `pattern_of`."""
    unchecked = dict(found.unchecked)
    judged_whole = {module for module, kind, *_ in floor if kind == OUT}
    for module in sorted(tape.strange):  # an activation inside experts is judged by what they give
        if module.rpartition(".")[0] not in judged_whole:
            unchecked.setdefault(module, "its tokens cannot be told apart")
    missing = {key[0] for key in floor if key not in found.sums}
    partly = {_layer(module) for module in missing}
    judged: list[PlaceResult] = []
    heat: dict[str, Tensor] = {}
    for key, clean in floor.items():
        if key[0] in missing:
            unchecked.setdefault(key[0], "this model has no such module, or does not call it")
        elif _layer(key[0]) in partly and (key[1] == INTO or key[0] in partly):
            unchecked.setdefault(key[0], "it also has the error of modules in its layer that could not be forced")
        else:
            ratios = _token_ratios(found.sums[key], clean, tape.lengths, dtype)
            layer = _layer(key[0])
            heat[layer] = torch.maximum(heat.get(layer, ratios), ratios)
            judged.append(_place(key, found.sums[key], clean, tape.lengths, dtype, math.sqrt(found.part[1]), ratios, features))
    judged += [_wrong_integers(key, tokens, features) for key, tokens in found.wrong.items()]
    wrong = [place for place in judged if place.rows or place.ratio is None or place.ratio > place.limit]
    wrong.sort(key=lambda place: math.inf if place.ratio is None else place.ratio, reverse=True)
    return Located(
        places=len(judged),
        wrong=tuple(wrong[:MOST]),
        count=len(wrong),
        largest=max((place.ratio for place in judged if place.ratio is not None), default=None),
        unchecked=tuple(f"{module}: {why}" for module, why in unchecked.items()),
        dtype=str(dtype).removeprefix("torch."),
        tokens=sum(tape.lengths),
        notes=notes,
        **(_heat(heat, features) if wrong else {}),
    )


def _heat(by_layer: Mapping[str, Tensor], features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Located` that are drawn: each row in fields of so many tokens that there are about MOST_FIELDS."""
    rows, positions = features["row"], features["position"]
    width = max(1, -(-len(rows) // MOST_FIELDS))
    in_row = np.arange(len(rows)) - np.searchsorted(rows, rows)
    starts = np.flatnonzero(in_row % width == 0).tolist()
    parts = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]
    return {
        "heat": {
            layer: tuple(float(f"{min(MOST_RATIO, float(ratios[part].max())):.3g}") for part in parts)
            for layer, ratios in by_layer.items()
        },
        "fields": tuple((int(rows[part.start]), int(positions[part.start]), int(positions[part.stop - 1])) for part in parts),
    }


def _layer(module: str) -> str:
    """Return the name of the decoder layer that a module is in, up to the first number; its own name outside of layers."""
    parts = module.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _least(clean: Sums, dtype: torch.dtype) -> float:
    """Return the squared error of an element below which no error is worth a word: what a copy would cost."""
    power = clean.truths / max(1, clean.tokens * clean.width)
    return max((_COPIED * torch.finfo(dtype).eps) ** 2 * power, 1e-300)


def _token_ratios(own: Sums, clean: Sums, lengths: list[int], dtype: torch.dtype) -> Tensor:
    """Return the error of each token, in units of its row's healthy error: float64 [T]."""
    healthy = torch.cat([part.mean().expand(len(part)) for part in torch.split(clean.errors / clean.width, lengths)])
    return (own.errors / own.width / healthy.clamp_min(_least(clean, dtype))).sqrt()


def _place(
    key: Key,
    own: Sums,
    clean: Sums,
    lengths: list[int],
    dtype: torch.dtype,
    wider: float,
    ratios: Tensor,
    features: Mapping[str, Any],
) -> PlaceResult:
    """Judge a place over all tokens, and over each row; tokens count where twice the row's healthy error is exceeded.

    wider: a factor of the limits. ratios: those of each token.
    """
    least = _least(clean, dtype)
    errors, healthy = own.errors / own.width, clean.errors / clean.width

    def ratio_of(part: slice) -> float:
        return math.sqrt(float(errors[part].mean()) / max(float(healthy[part].mean()), least))

    rows, start, above = [], 0, torch.zeros(len(ratios), dtype=torch.bool)
    for row, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        if length and ratio_of(part) > wider * ROW[dtype] + SPREAD / math.sqrt(length * own.width):
            rows.append(row)
            above[part] = ratios[part] > 2
    elements, ratio = own.tokens * own.width, ratio_of(slice(None))
    gain = own.own / own.truths if own.truths else math.nan
    pattern = pattern_of(above.numpy(), features)
    return PlaceResult(
        module=key[0],
        kind=key[1],
        what=words_of(key),
        ratio=ratio if math.isfinite(ratio) else None,
        limit=wider * LIMIT[dtype] + SPREAD / math.sqrt(elements),
        gain=gain if math.isfinite(gain) else None,
        rows=tuple(rows),
        of_rows=len(lengths),
        tokens=int(above.sum()),
        of_tokens=own.tokens,
        position=int(features["position"][int(above.nonzero()[0])]) if bool(above.any()) else None,
        pattern=pattern.sentence if pattern else "",
    )


def _wrong_integers(key: Key, tokens: Tensor, features: Mapping[str, Any]) -> PlaceResult:
    """Build the place of token ids or positions that are not the input's. tokens: which."""
    rows, above = features["row"], np.zeros(len(features["row"]), bool)
    above[tokens.numpy()] = True
    pattern = pattern_of(above, features)
    return PlaceResult(
        module=key[0],
        kind=INTO,
        what=f"the token ids or positions that come into {key[0]}",
        ratio=None,
        limit=1.0,
        rows=tuple(np.unique(rows[above]).tolist()),
        of_rows=int(rows[-1]) + 1,
        tokens=len(tokens),
        of_tokens=len(rows),
        position=int(features["position"][int(tokens[0])]),
        pattern=pattern.sentence if pattern else "",
    )


def words_of(key: Key) -> str:
    """Name a place: the module, or the operations between modules whose result comes into it."""
    module, kind, *_ = key
    if kind != INTO:
        return module
    parent, _, leaf = module.rpartition(".")
    if leaf in _BEHIND_ATTENTION and any(part in parent.rpartition(".")[2] for part in ("attn", "attention", "mixer")):
        return f"the attention of {parent}"
    return f"the gated product of {parent}" if leaf == "down_proj" else f"what comes into {module}"


_BEHIND_ATTENTION = ("o_proj", "out_proj", "c_proj", "dense", "norm")


def _forward(model: Any, ids: Tensor) -> None:
    """Run one row [n] alone."""
    positions = torch.arange(len(ids), device=ids.device)
    model(ids[None], position_ids=positions[None], use_cache=False)


def _free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on the device, in bytes; None if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    return None
