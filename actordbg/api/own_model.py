"""Judge a model of transformers and a batch in memory: does packing leak, does padding matter, are these log-probs right?

    model = AutoModelForCausalLM.from_pretrained("/models/qwen3.5-0.8b")
    actordbg.check_model(model, tokenizer(texts, return_tensors="pt", padding=True)).raise_if_wrong()

The model is saved into a temporary store, where the batch is a dump. What then runs is `actordbg check`, in this process: the
laws and the forced forward through the model itself, once padded and once packed, and the truth: the saved weights in a wider
dtype. So a fault of the model in memory (an attribute, a replaced function, a kernel) is not in the truth. Afterwards the model,
its gradients, the random generators and torch's switches are as before.
"""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.forward_outcome import GradientKeeper, plain_name
from actordbg.actor.truth_session import TruthSession
from actordbg.api.checks import check_answer
from actordbg.api.desk import DumpSelection, planned
from actordbg.api.in_process import run_here, undisturbed
from actordbg.api.recording import Caller, batch_rows, encoded, in_memory, required
from actordbg.base.errors import Unsupported
from actordbg.capture.facts import unwrap
from actordbg.config import consent
from actordbg.config.replay_config import DTYPES, WIDER, ReplayConfig
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Block, Heading, Verdict, verdict_in
from actordbg.document.command_result import CommandResult, in_python
from actordbg.formats.encoding import pack
from actordbg.judge.check import run_check
from actordbg.locate.clean_models import flags_restored
from actordbg.records.comparison_record import MISMATCH, MODEL
from actordbg.records.finding import NotChecked
from actordbg.store.layout import Store
from actordbg.trainers.find_adapter import installed
from actordbg.trainers.rows_actor import resolved_attention, resolved_dtype
from actordbg.trainers.seam import Rows, Scores

WORST_FIRST = (FAILED, WRONG, UNCHECKED, RIGHT)
NAMES = {False: "padded", True: "packed"}
"""Names of the two layouts of a batch, by whether its rows are packed into one."""


def check_model(
    model: Any,
    batch: Mapping[str, Any],
    *,
    packing: bool | None = None,
    log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    temperature: float = 1.0,
    backward: bool = True,
) -> CommandResult:
    """Judge a causal language model of transformers on a batch by the laws, the clean model and the truth.

    batch: `input_ids` int [B, S]; `attention_mask` [B, S]; `labels` [B, S], whose tokens count where they are not -100; or packed
    rows with `position_ids`. packing: check the rows padded (False), packed into one (True), or both. log_probs, and with them
    entropy: what a trainer computed for this batch, [B, S-1], nats; they are held against the truth as well. backward: also judge
    gradients.

    The answer has the record of each layout under "padded" and "packed". Raises Unsupported for a sharded model, for one with
    images, and for a batch without rows.
    """
    _plain(model)
    rows = batch_rows(model, batch, temperature)
    if packing is False and rows.packed:
        raise Unsupported("the batch's rows are packed already", hint="leave packing out, or pass padded rows")
    return judged(rows, Scores(log_probs, entropy), packing=packing, backward=backward)


def judged(
    rows: Rows, scores: Scores, *, packing: bool | None = None, backward: bool = True, caller: Caller | None = None
) -> CommandResult:
    """Judge the model of a call in its current state. scores: what the call returned. caller: who made it."""
    model = _plain(rows.model)
    required(rows, scores, model.config.get_text_config().vocab_size)
    unlike = ["torch.compile: the model inside it ran"] if hasattr(rows.model, "_orig_mod") else []
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        unlike.append("the autocast around this call, which was off")
    layouts = (False, True) if packing is None and not rows.packed else (bool(packing) or rows.packed,)
    answers: dict[str, CommandResult] = {}
    far = False
    with _saved(model) as (store, config):
        record, data = encoded(replace(rows, entropy=True), scores, caller or _caller(rows), "memory")
        store.put_dump(record, pack(record, data), hint="make room in the folder of temporary files")
        trains = backward and any(parameter.requires_grad for parameter in model.parameters())
        for packed in layouts:
            asked = replace(config, packing=packed, backward=trains, keep_tensors=True, keep_gradients=trains, laws=1)
            spec = planned(store, asked, DumpSelection(), "actordbg.check_model(model, batch)").spec
            checked = run_check(
                store,
                spec,
                recorded=scores.log_probs is not None,
                run=partial(run_here, model=model),
            )
            answers[NAMES[packed]] = check_answer(store, checked, of=1)
            unnamed = checked.local is None or checked.local.word != WRONG
            far |= unnamed and checked.comparison is not None and checked.comparison.verdict == MISMATCH
    return _together(answers, _EAGER if far and resolved_attention(model) != "eager" else "", unlike)


_EAGER, _PADDED = 'model.set_attn_implementation("eager")', "actordbg.check_model(model, batch, packing=False)"
"""What to try next: if the model is right then, the kernel, or the packing, is at fault."""


def _together(answers: Mapping[str, CommandResult], other_kernel: str, unlike: Sequence[str]) -> CommandResult:
    """Join the answers of both layouts: the worst decides, and the others are named. unlike: what ran otherwise than the call."""
    verdicts = {name: verdict for name, answer in answers.items() if (verdict := verdict_in(answer.blocks)) is not None}
    worst = min(verdicts, key=lambda name: WORST_FIRST.index(verdicts[name].word))
    others = "".join(f"; {name}: {verdict.word}" for name, verdict in verdicts.items() if name != worst)
    left = [NotChecked(MODEL, what) for what in unlike]
    left += [replace(each, by=in_python(f"({each.by})")[1:-1]) for verdict in verdicts.values() for each in verdict.not_checked]
    packs = worst == NAMES[True] and NAMES[False] in verdicts
    following = "" if verdicts[worst].good else _PADDED if packs else other_kernel
    whole = replace(
        verdicts[worst],
        said=f"{worst}: {verdicts[worst].said}{others}",
        not_checked=tuple(dict.fromkeys(left)),
        figures=verdicts[worst].figures[:1],
        next=following,
    )
    page: list[Block] = [Heading("actordbg.check_model", 1), whole]
    for name, answer in answers.items():
        page += [Heading(name, 2), *(block for block in answer.page if not isinstance(block, Verdict))]
    data = {"good": whole.good, **{name: answer.record for name, answer in answers.items()}}
    return CommandResult(whole.good, data, (whole,), page)


@dataclass(frozen=True, eq=False)
class Truth:
    """The truth of a batch, on the CPU. log_probs, entropy: float32 [B, S-1], nats, 0 where no token counts (`mask`, bool).

    loss: the mean of -log_probs over the mask, and grad_norm, gradients: its gradient by parameter, float32, whole. dtype: in
    which it was computed. notes: where it is not the batch's, in words.
    """

    log_probs: Tensor
    entropy: Tensor
    mask: Tensor
    loss: float | None
    grad_norm: float | None
    gradients: dict[str, Tensor]
    dtype: str
    notes: tuple[str, ...] = ()


class WholeGradients(GradientKeeper):
    """Keeps whole gradients instead of samples."""

    def take(self, name: str, gradient: Tensor) -> None:
        """Keep a parameter's full gradient."""
        if self.records:
            self.tensors[plain_name(name)] = gradient.detach().float().cpu().clone()


def truth(
    model: Any, batch: Mapping[str, Any], *, dtype: str | None = None, temperature: float = 1.0, backward: bool = True
) -> Truth:
    """Compute the truth of a batch: each row alone, unpadded, eager attention, the model's weights in a wider dtype.

    batch: as of `check_model`. dtype: "fp32" or "fp64"; by default the next wider one than the model's.
    """
    plain = _plain(model)
    rows, own = batch_rows(model, batch, temperature), resolved_dtype(plain)
    required(rows, Scores(), plain.config.get_text_config().vocab_size)
    if dtype is not None and (dtype not in ("fp32", "fp64") or own == "fp32" != dtype == "fp32"):
        raise Unsupported(
            f"{dtype!s:.40} cannot be the truth of a model in {own}", hint="pass fp64, or fp32 for a half precision model"
        )
    with _saved(plain) as (store, config), flags_restored():
        dump = in_memory(replace(rows, entropy=True), Scores(), _caller(rows))
        asked = replace(config, attn=None, through=None, truth=dtype or WIDER[config.dtype or "fp32"], keep_gradients=backward)
        session = TruthSession(asked, dump.record, store.models)
        session.keeper = WholeGradients
        outcome = session.run(dump, backward=backward, keep=True)
        session.close()
    assert outcome.entropy is not None and asked.truth is not None
    kept = outcome.tensors if backward else {}
    return Truth(
        outcome.log_probs,
        outcome.entropy,
        outcome.mask,
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        gradients={name: tensor for name, tensor in kept.items() if name not in ("log_probs", "mask", "entropy")},
        dtype=asked.truth,
        notes=outcome.notes,
    )


def _plain(model: Any) -> Any:
    """Return the model of transformers inside DDP or `torch.compile`. Raises Unsupported for a sharded one, or another module."""
    inner = unwrap(model) if isinstance(model, torch.nn.Module) else model
    if not isinstance(inner, torch.nn.Module) or not hasattr(inner, "save_pretrained"):
        raise Unsupported(f"{type(inner).__name__} is not a model of transformers", hint="pass the model inside it")
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise Unsupported("the model has no weights: it is on the meta device", hint="load it with its weights")
    if any(hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor") for parameter in inner.parameters()):
        raise Unsupported("the model is sharded over ranks", hint="check a whole copy of it, or record and replay it")
    if (dtype := resolved_dtype(inner)) not in DTYPES:
        raise Unsupported(f"a model in {dtype} has no truth", hint=f"load it in {', '.join(DTYPES)}")
    return inner


def _caller(rows: Rows) -> Caller:
    adapter = installed("plain")
    return Caller(rows, adapter.seams[0], adapter)


@contextlib.contextmanager
def _saved(model: Any) -> Iterator[tuple[Store, ReplayConfig]]:
    """Save the model into a temporary store; provide the store, and the configuration of the model as it is."""
    with TemporaryDirectory(prefix="actordbg-") as folder, undisturbed(model):
        store, path = Store(Path(folder) / "store").create(), Path(folder) / "model"
        with contextlib.redirect_stdout(io.StringIO()):  # what it imports prints
            model.save_pretrained(path)
        if type(model).__module__.startswith("transformers_modules."):  # its code runs in this process already
            consent.give(str(path))
        try:
            yield (
                store,
                ReplayConfig(model=str(path), through="rows", attn=resolved_attention(model), dtype=resolved_dtype(model)),
            )
        finally:
            consent.withhold()
