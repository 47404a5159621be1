"""What `check` says of one input, in the process of the model: laws, the model itself, module by module, and the truth.

A check starts workers; hundreds of cells cannot. The truth and what the dtype costs are computed once for each dump (and kept in
a folder, for processes of several ranks, which have none of their own), then a loaded Actor is judged by the very functions of
the product: `LawRun`, `identities_of`, `LocateRun`, and a comparison under measured limits.

    truths = Truths(cache, model, "bf16", backward=True)
    judged = judge(session, dump, truths.of(dump))
    judged.word, judged.said          # "WRONG", "model.layers.1.mlp.down_proj.weight is ..."
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch
from actorcases import opened

from actordbg.compare.dump_figures import measure, unlike
from actordbg.compare.measured_limits import Rounding
from actordbg.compare.sides import Values
from actordbg.compare.thresholds import applied_to, judge as judge_figures
from actordbg.config.choices import short_dtype
from actordbg.config.replay_config import WIDER
from actordbg.laws.law_run import LawRun
from actordbg.locate.clean_models import flags_restored
from actordbg.locate.identity import identities_of
from actordbg.locate.locate_run import LocateRun
from actordbg.locate.verdict import LocalVerdict, lines_of, verdict_of
from actordbg.records.comparison_record import GOOD, MISMATCH, DumpComparison
from actordbg.records.locate_record import IDENTITY, LOCATED
from actordbg.records.replay_record import LAWS, PASSED, LawAnswer, ResultRecord, in_words, violations


def values_of(outcome, folder, dtype):
    """The outcome of an input as a side of a comparison; its gradients lie in a file of the folder."""
    gradients = ()
    plain = {name: tensor.contiguous().numpy() for name, tensor in outcome.tensors.items() if name.startswith("grad/")}
    if plain:
        folder.mkdir(parents=True, exist_ok=True)
        gradients = (folder / "gradients.safetensors",)
        gradients[0].write_bytes(safetensors.numpy.save(plain, metadata={"gradients": json.dumps(outcome.gradients)}))
    return Values(
        outcome.log_probs.numpy(),
        outcome.mask.numpy(),
        None if outcome.entropy is None else outcome.entropy.numpy(),
        outcome.loss,
        outcome.grad_norm,
        gradients,
        outcome.gradient_over,
        dtype,
        outcome.folded,
        outcome.temperature,
        outcome.training,
    )


@dataclass
class Truths:
    """The truth of dumps of a model, and what its dtype costs them, computed where they are not in the folder yet."""

    folder: Path
    model: str
    dtype: str
    backward: bool = False

    def of(self, dump, cache):
        """The truth's values, those of lone rows in the dtype, and whether the model has experts."""
        path = self.folder / f"{dump.record.dump_id}-{self.dtype}.pt"
        if not path.is_file():
            kept = []
            with flags_restored():
                for truth in (WIDER[self.dtype], self.dtype):
                    with opened(
                        cache,
                        self.model,
                        dtype=self.dtype,
                        truth=truth,
                        backward=self.backward,
                        keep_gradients=self.backward,
                        defaults=dump.record,
                    ) as session:
                        outcome = session.run(dump, backward=self.backward, keep=True)
                        kept.append(values_of(outcome, path.with_suffix(f".{truth}"), truth))
                        experts = bool(session.resolved["experts"])
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save((*kept, experts), part := path.with_suffix(".part"))
            part.rename(path)
        found = torch.load(path, weights_only=False)
        return found


@dataclass
class Judged:
    """The verdict on an input. word: RIGHT, WRONG or NOT CHECKED. said: the cause as the terminal shows it; lines: everything.

    by: which of laws, modules and truth said WRONG. bits: what the Actor computed, to see whether a fault changed anything.
    """

    word: str
    said: str
    by: tuple[str, ...]
    lines: tuple[str, ...]
    local: LocalVerdict
    truth: DumpComparison
    bits: tuple[Any, ...]


def judge(session, dump, against, folder, together=False):
    """Judge a loaded Actor on one dump. Ranks that compute together have to call this at the same time."""
    truth, lone, experts = against
    dtype, backward = session.config.dtype, session.backward_for(dump.record)
    outcome = session.run(dump, backward=backward, keep=True)
    answers = [each.to_dict() for each in LawRun(session, dump, outcome, backward, together).run()]
    located = asdict(LocateRun(session, dump, outcome, backward, together).run())
    extra = {IDENTITY: identities_of(session, ran=True), LOCATED: located, LAWS: answers}
    extra = ResultRecord("r", "d", PASSED, extra=extra).to_dict()["extra"]  # through JSON's types
    local = verdict_of([ResultRecord("r", "d", PASSED, extra=extra)])
    assert local is not None
    ours = values_of(outcome, folder, str(short_dtype(dtype) or dtype))
    if ours.gradient_over:  # the average over lanes has a truth of several dumps
        ours = replace(ours, gradients=(), grad_norm=None, gradient_over=())
    compared = _against_truth(dump, ours, truth, lone, experts)
    broken = [in_words(law) for law in violations([LawAnswer.from_dict(each) for each in extra[LAWS]])]
    by = {"laws": bool(broken), "modules": local.word == "WRONG", "truth": compared.verdict == MISMATCH}
    reds = tuple(name for name, red in by.items() if red)
    said = "; ".join([*broken[:1], *[local.said] * (local.word == "WRONG")])
    if not said:  # the sentence goes on with what was not judged
        said = "; ".join([*compared.reasons[:1], *local.unchecked[:1]]) or local.said
    lines = (*broken, *lines_of(local), *compared.reasons)
    bits = (outcome.log_probs, outcome.entropy, outcome.loss, {name: outcome.tensors[name] for name in sorted(outcome.tensors)})
    word = "WRONG" if reds else "RIGHT" if compared.verdict in GOOD else "NOT CHECKED"
    return Judged(word, said, reds, lines, local, compared, bits)


def _against_truth(dump, ours, truth, lone, experts):
    dump_id, dtype = dump.record.dump_id, str(ours.dtype)
    if why := unlike(ours, truth):
        return DumpComparison(dump_id, MISMATCH, (why,))
    rounded = Rounding("lone", {dump_id: measure(dump_id, None, lone, truth)}, dtype, str(truth.dtype), experts)
    applied = applied_to(dtype, {})
    found = rounded.limited(applied, measure(dump_id, None, ours, truth))
    found, _ = judge_figures(found, found.limits, {})
    bias = rounded.bias([found])
    if bias is not None and bias.excessive:
        return replace(found, verdict=MISMATCH, reasons=(*found.reasons, f"biased by {bias.ours:+.3g} nats"))
    return found


def same_bits(left, right):
    """Check whether two runs computed the same log-probs, entropies, loss and gradients, bit for bit."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.nan_to_num(nan=9e9).numpy().tobytes()
        return {name: plain(each) for name, each in value.items()} if isinstance(value, dict) else value

    return [plain(each) for each in left.bits] == [plain(each) for each in right.bits]
