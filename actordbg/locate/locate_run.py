"""Run the forced forward and backward of one input through a loaded Actor, and judge each place.

    located = LocateRun(session, dump, outcome, backward, together, tell).run()

The truth runs row by row, then the clean model runs all rows at once, padded on the right; of either, one decoder layer at a time
lies beside the suspect (`streaming`). Then the suspect runs once, through the very call of the Actor that every
replay makes, so its packing, its masks and its kernels are judged. If ranks compute together, all of them do this at the same
time, each for its own input, once all agree that they can.

The loss is the mean of -log-prob over the judged tokens. Its backward is the backend's own: gradients of parameters are averaged
and gathered as in any replay, and so are the truth's and the clean model's before they are compared (`samples_of`).

A compiled model is judged at its border too, the log-probs: its graph has no places inside, where it runs eagerly. The unit is
the same model without its graph. Both run freely, on their own values, and are held against the truth's log-probs (`border_of`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from actordbg.actor import changes
from actordbg.actor.forward_outcome import PREFIX, ForwardOutcome, GradientKeeper, plain_name, release
from actordbg.actor.from_papers import against_formulas
from actordbg.actor.routing import EXPERTS, FREE
from actordbg.actor.session import ActorSession
from actordbg.base.errors import machine_errno
from actordbg.base.units import human_bytes
from actordbg.locate.clean_models import clean_attention, clean_model, dtype_of, one_line, samples_of, truth, without_gradient
from actordbg.locate.forced_forward import Forcing, Recording
from actordbg.locate.identity import identities_of
from actordbg.locate.inside import layout_of, looked_into, suspicious
from actordbg.locate.judgement import hold_against_eager, judge, kernel_in_words
from actordbg.locate.places import Key, Sums, Tape, places_of
from actordbg.records.locate_record import EVERYTHING, GRADIENT, IDENTITY, LOCATED, OUT, FormulaCheck, Located, Operation
from actordbg.replay.instruments import Examined, Examiner
from actordbg.store.payload import Dump
from actordbg.trainers.rows_actor import drawn_share, follow_adapters

MOST_TOKENS = 1024
"""Tokens of a row that are judged: later ones run, with their own values."""


@dataclass
class LocateRun:
    """The forced forward of one input that `outcome` has run, with `backward` also its backward. together: other ranks compute
    with this rank. tell: called with the name of each next step. out_of_step: why this process has to be replaced afterwards.
    """

    session: ActorSession
    dump: Dump
    outcome: ForwardOutcome
    backward: bool
    together: bool
    tell: Callable[[str], None] = lambda name: None
    out_of_step: str = ""
    _floor: dict[Key, Sums] = field(default_factory=dict)
    _eager: dict[Key, Sums] = field(default_factory=dict)
    _unchecked: dict[str, str] = field(default_factory=dict)
    _formulas: FormulaCheck | None = None
    _lost: dict[str, str] = field(default_factory=dict)
    _kernel: str = ""
    _memory: str = ""
    _resident: int = 0

    def run(self) -> Located:
        """Judge every place. What cannot be judged is named in `unchecked`; no error of it fails the input."""
        began = time.monotonic()
        try:
            return replace(self._located(), seconds=time.monotonic() - began)
        finally:
            release(self.session.device)  # the peaks of later inputs are their own

    def _located(self) -> Located:
        tape, why = Tape(), self._unsupported()
        if not why:
            why = self._guarded(lambda: self._prepare(tape))
        if why := self._agreed(why):
            return Located(unchecked=(f"{EVERYTHING}: {why}",))
        forcing = self._forcing(tape)
        if why := self._guarded(lambda: self._force(forcing)) or self._guarded(lambda: self._border(forcing)):
            if self.together or self.session.tainted:
                self.out_of_step = f"the forced forward failed ({why}), and its leftovers cannot be cleaned up"
            return Located(unchecked=(f"{EVERYTHING}: {why}",))
        notes: tuple[str, ...] = ()
        if self.session.config.compiles:
            notes += ("a compiled graph was judged at its border, the log-probs; all other places ran eagerly",)
        given = int(self.call.inputs["attention_mask"].sum())
        left = given - sum(tape.lengths)
        if left > 0:
            self._unchecked["later tokens"] = f"{left:,} of them, since at most {MOST_TOKENS:,} of a row are judged"
        if not self.backward:
            notes += ("judged without a backward (--backward judges gradients too)",)
        notes += tuple(filter(None, [self._memory]))
        if tape.spill.spilled:
            notes += (f"{human_bytes(tape.spill.spilled)} of the truth's values were in temporary files",)
        forcing.unchecked = self._unchecked | forcing.unchecked
        ranks = dist.get_world_size() if self.together else 1
        located = judge(
            tape, forcing, self._floor, dtype_of(self.session), self._features,
            notes=notes, ranks=ranks, lost=self._lost, eager=self._eager,
        )  # fmt: skip
        located = replace(located, formulas=self._formulas, kernel=self._kernel, operation=self._inside(located, forcing))
        return replace(located, resident_bytes=self._resident, spilled_bytes=tape.spill.spilled)

    def _inside(self, located: Located, forcing: Forcing) -> Operation | None:
        """Look into the layer that is wrong, in one more forward; all ranks that compute together look into the same."""
        missing = sorted({key[0] for key in self._floor if key not in forcing.sums})
        target = self._agreed("" if self._kernel else suspicious(located, missing, self.session.model))
        if not target:
            return None
        self.tell("locate: operations")
        operations: list[Operation | None] = []
        layout = layout_of(self.session, self.call, self.outcome.packing, forcing.valid)
        if why := self._guarded(lambda: operations.append(looked_into(self.session, target, self.call, layout))):
            if self.together or self.session.tainted:
                self.out_of_step = f"a forward whose operations are listed failed ({why})"
            return Operation(target, "", why)
        return operations[0]

    def _unsupported(self) -> str:
        """Return why this configuration or this input has no clean counterpart, or ""."""
        session = self.session
        if why := changes.unsupported(self.dump):
            return why
        if getattr(session.model.config, "vision_config", None) is not None:
            return "places are judged of text models only, and this model takes images"
        if EXPERTS in self.dump.tensors and session.config.routing != FREE:
            return "places are judged of a router's own experts (--routing free)"
        if session.config.deepcompile:
            return "DeepCompile has put its own graph into the engine"
        if self.outcome.training and drawn_share(session.model):
            return "the call draws random numbers"
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
        columns = [of_row.nonzero().flatten() for of_row in real]
        self._columns = [of_row[:MOST_TOKENS] for of_row in columns]
        weights = (changes.next_tokens(self.call) & (real.cumsum(1)[:, 1:] <= MOST_TOKENS)).double()
        self._log_probs = torch.full(weights.shape, torch.nan, dtype=torch.float64)
        self._weights = weights / weights.sum().clamp(min=1)
        if self.backward and dtype_of(self.session) is torch.float16:
            self._unchecked["the backward"] = "the loss scale of fp16 is in its gradients"
        self._follows = self.backward and not self._unchecked
        named = self.session.model.named_parameters()
        self._trained = trained = {plain_name(name) for name, each in named if each.requires_grad and self._follows}
        rows = [ids[row, columns].to(device) for row, columns in enumerate(self._columns)]
        terms = [self._weights[row, columns[:-1]] for row, columns in enumerate(self._columns)]
        self.tell("locate: truth")
        most = tape.spill.memory + tape.spill.room()
        with truth(self.session, device) as loaded, torch.set_grad_enabled(self._follows):
            model, graphs = loaded.model, self._follows and loaded.streamed is not None
            self._memory, self._resident = loaded.note, loaded.resident
            follow_adapters(model, record.actor)
            self._truths = samples_of(model, trained)
            for number, row in enumerate(rows):
                if tape.spill.nbytes < most and len(row):
                    with loaded.under(Recording(tape, len(row), graphs)):
                        log_probs = self._run(model, row[None], terms[number][None])
                    if log_probs is not None:
                        self._log_probs[number, self._columns[number][:-1]] = log_probs[0].detach().double().cpu()
                else:
                    tape.lengths.append(0)
                    self._weights[number] = 0
            tape.leave_out_positions()
            self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            with torch.no_grad():
                self._formulas = against_formulas(model, max(rows, key=len))
        del model, loaded  # before the clean model is loaded
        self._features = self._known_of([own[:length] for own, length in zip(self._columns, tape.lengths, strict=True)])
        run = [number for number, length in enumerate(tape.lengths) if length]
        batch, index, padded = (
            pad_sequence(parts, batch_first=True, padding_value=fill)
            for parts, fill in (
                ([rows[number] for number in run], 0),
                (list(torch.split(torch.arange(sum(tape.lengths)), [tape.lengths[number] for number in run])), -1),
                ([terms[number] for number in run], 0),
            )
        )
        self.tell("locate: healthy")
        with clean_model(self.session, device) as loaded, torch.set_grad_enabled(self._follows):
            model, attended = loaded.model, (index >= 0).long().to(device)
            follow_adapters(model, record.actor)
            samples = samples_of(model, trained)

            def forced() -> dict[Key, Sums]:
                forcing = Forcing(tape, index.flatten())
                with self.session.autocast(record), loaded.under(forcing):
                    self._run(model, batch, padded, attended)
                return forcing.sums

            self._floor, self._healthy = forced(), dict(samples)
            attn, dtype = clean_attention(self.session), dtype_of(self.session)
            if attn != "eager":
                model.set_attn_implementation("eager")
                self._eager = forced()
                if count := hold_against_eager(self._floor, self._eager, dtype):
                    self._kernel = kernel_in_words(attn, model.config.get_text_config(), *count)
            with torch.no_grad():
                narrow = against_formulas(model, max(rows, key=len))
            self._formulas = narrow if narrow and narrow.differs else self._formulas

    def _run(self, model: Any, ids: Tensor, weights: Tensor, real: Tensor | None = None) -> Tensor | None:
        """Run rows [R, n] padded on the right, and the backward of -sum(weights [R, n - 1] * log-probs) if gradients are on.

        Return the log-probs [R, n - 1] if they were needed.
        """
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        logits = model(ids, attention_mask=real, position_ids=positions, use_cache=False).logits
        if not torch.is_grad_enabled() and not self.session.config.compiles:
            return None
        wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)) / self.outcome.temperature
        log_probs: Tensor = torch.log_softmax(wide, -1).gather(-1, ids[:, 1:, None])[..., 0]
        if torch.is_grad_enabled():
            (-(log_probs * weights.to(log_probs)).sum()).backward()  # type: ignore[no-untyped-call]
        return log_probs

    def _known_of(self, columns: list[Tensor]) -> dict[str, Any]:
        """Return what is known of each of the truth's tokens, numpy [T] by feature. columns: those of each row."""
        row = torch.repeat_interleave(torch.arange(len(columns)), torch.tensor([len(own) for own in columns], dtype=torch.int64))
        padded = ~changes.attended(self.call).all(1)
        known = {"packed": row > 0} if self.outcome.packing else {}
        known |= {"row": row, "position": torch.cat(columns), "padded": padded[row]}
        return {name: values.numpy() for name, values in known.items()}

    def _numbers(self, tape: Tape) -> Tensor:
        """Return which of the truth's tokens lies at each place of the call, int [B, S], -1 for none."""
        numbers = torch.full(changes.attended(self.call).shape, -1)
        start = 0
        for row, length in enumerate(tape.lengths):
            numbers[row, self._columns[row][:length]] = torch.arange(start, start + length)
            start += length
        return numbers

    def _forcing(self, tape: Tape) -> Forcing:
        """Build the hooks for the suspect: which of the truth's tokens lies at each position that it computes."""
        numbers = self._numbers(tape)
        rows, columns = changes.places(self.call, self.outcome.packing, *self.session.ring).unbind(1)
        index, size = numbers[rows, columns].masked_fill(rows < 0, -1), self.session.config.tp
        return Forcing(tape, index, part=(int(self.session.resolved["rank"]) % size, size), ring=self.session.ring[1])

    def _force(self, forcing: Forcing) -> None:
        self.tell("locate: forced forward")
        model, keeper = self.session.model, GradientKeeper()
        with changes.eagerly(model), forcing.on(places_of(model)):
            if not self._follows:
                self.session.probe(self.call, lambda *_: None, backward=self.backward)
                return self._join(forcing)
            self.session.gradient(self.call, self._weights, keeper=keeper)
        forcing.count_lost_gradients()
        self._join(forcing)
        for name in self._trained.difference(self._truths):  # such as a sparse attention's indexer, which runs without gradients
            if PREFIX + name in keeper.tensors and keeper.tensors[PREFIX + name].any():
                self._unchecked[f"the gradient of {name}"] = "transformers' model has no such gradient"
        for name in sorted(self._truths.keys() & self._healthy):
            want, healthy = (self._averaged(samples[name]) for samples in (self._truths, self._healthy))
            key = (name, GRADIENT, 0, 0)
            own = keeper.tensors.get(PREFIX + name, torch.zeros(()))
            forcing.sums[key] = Sums.of(own.expand_as(want), want)
            if "expert" in name and (experts := without_gradient(own.expand_as(want), want, self._shapes[name])):
                self._lost[name] = f"no gradient reaches {experts} of {name}"
            self._floor[key] = Sums.of(healthy.to(dtype_of(self.session)), want)

    def _border(self, forcing: Forcing) -> None:
        """Judge a compiled model's log-probs."""
        if self.session.config.compiles:
            errors = border_of(self.session, self.call, self._log_probs, self._numbers(forcing.tape))
            forcing.sums[BORDER], self._floor[BORDER] = errors
            forcing.tape.values[BORDER] = [torch.zeros(0)]

    def _join(self, forcing: Forcing) -> None:
        """Put together what the ranks of a ring computed: each has a part of the tokens."""
        if (group := self.session.ring_group) is not None:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, (forcing.sums, forcing.wrong, forcing.unchecked), group=group)
            forcing.take_parts(parts)

    def _averaged(self, values: Tensor) -> Tensor:
        """Average over the ranks that compute together, as their backward does."""
        if not self.together:
            return values
        values = values.to(self.session.device)
        dist.all_reduce(values)
        return (values / dist.get_world_size()).cpu()


BORDER: Key = ("the compiled model", OUT, 0, 0)


def border_of(session: ActorSession, call: Dump, truth: Tensor, numbers: Tensor) -> tuple[Sums, Sums]:
    """Run a call with and without the graph; return the errors of both.

    truth: log-probs [B, S - 1], NaN for other tokens. numbers: of the truth's tokens, int [B, S], -1 for none.
    """

    def log_probs() -> Tensor:
        return session.probe(call, lambda values, _: values.detach().double().cpu(), backward=False)

    compiled = log_probs()
    with changes.eagerly(session.model):
        eager = log_probs()
    judged = changes.next_tokens(call) & ~truth.isnan()
    want, tokens = truth[judged], numbers[:, :-1][judged]

    def sums(have: Tensor) -> Sums:
        errors = torch.zeros(int(numbers.max()) + 1, dtype=torch.float64)
        errors[tokens] = (have[judged] - want).square().nan_to_num(torch.inf, torch.inf)
        return Sums(errors, 1, len(tokens), float((have[judged] * want).sum()), float(want.square().sum()))

    return sums(compiled), sums(eager)


class LocateInWorker(Examiner):
    """What the loaded model is, and each of its places, judged in a worker.

    The model is compared when it is loaded, and once more after the last input.
    """

    def __init__(self, session: ActorSession, *, together: bool) -> None:
        super().__init__(session, together=together)
        self._identities = identities_of(session)

    def examine(self, run: Examined) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if run.asked:
            locating = LocateRun(self.session, run.dump, run.outcome, run.backward, together=self.together, tell=run.tell)
            found[LOCATED] = asdict(locating.run())
            self.out_of_step = locating.out_of_step
        if run.at_end and not self.out_of_step:
            run.tell("what the model is")
            self._identities += identities_of(self.session, ran=True, alone=not self.together)
        if self._identities:
            found[IDENTITY], self._identities = self._identities, []
        return found
