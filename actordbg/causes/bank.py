"""The table of causes: each is a row of `BANK`, and a recipe for another row is in docs/how-to/read-an-explanation.md.

A cause has a *size*, and the size at which nothing is wrong is the model's `own` (its epsilon, its theta, a factor of 1). The
truth's log-probs are computed at each of the sizes to try, in one of two ways:

* `closed`: from the logits of the truth's forward, in closed form: nothing else is computed;
* `planted`: the model is changed for one forward.

A continuous cause is fitted between the tried sizes too; others are tried at each size alone. `computations` has the functions.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from actordbg.actor.other_log_probs import Closed, Laid
from actordbg.causes import computations as by


@dataclass(frozen=True)
class Cause:
    """A way to be wrong. said: the sentence, with {amount} and {own}. thread: a public report of it, "" if none is known.

    own: the size at which nothing is wrong, or a function of the model that returns it; None if a model cannot have this cause.
    parts: from the model, where it can be: each is a cause of its own, `NAME: PART`, and `planted` gets the part for the size.
    sizes: to try, absolute; near: to try, times `own`. along: the scale, log or linear, in which a continuous size is fitted
    between these; "": the cause is there or not. laid: gets the attended tokens and the sampled ones, bool [B, S]. expected:
    healthy in rollouts. spreads: log-probs' noise grows by own / size. rounds: a run in bf16 does it, and is right.
    """

    name: str
    said: str
    remedy: str
    thread: str
    own: Callable[[Any], float | None] | float | None
    closed: Callable[[Any, float], Closed] | None = None
    planted: Callable[[Any, Any], AbstractContextManager[Any]] | None = None
    parts: Callable[[Any], list[str]] | None = None
    laid: Callable[[Any, Any, float], Laid] | None = None
    sizes: tuple[float, ...] = ()
    near: tuple[float, ...] = ()
    along: str = ""
    expected: bool = False
    spreads: bool = False
    rounds: bool = False

    def tried(self, own: float) -> list[float]:
        """Return the sizes to try beside a model's own, in order."""
        return sorted({*self.sizes, *(own * factor for factor in self.near)} - {own})


SHIFT, ROWS, PLACEHOLDER, WEIGHTS, NAN = "shift", "other rows", "placeholder", "weights", "not finite"
PRECISION, OLDER, DROPPED = "precision", "older policy", "dropout"
UNKNOWN_POLICY, UNKNOWN_PRECISION = "unknown policy", "unknown precision"
"""What is not a side's fault: the dtype that it computes in, a policy that was updated since, and what it drops at random."""

BANK: tuple[Cause, ...] = (
    Cause(
        "temperature",
        "the temperature was {amount}, not {own}",
        "give both sides the same temperature, and log-probs after it (vLLM: logprobs_mode processed_logprobs)",
        "trl#4159",
        1.0, closed=by.temperature, near=tuple(2 ** (step / 12) for step in range(-13, 14)),
        sizes=(0.1, 0.2, 0.3, 3, 5, 10), along="log", spreads=True,
    ),
    Cause(
        "top-p",
        "log-probs were renormalized to the nucleus of top-p {amount}",
        "request log-probs before top-p, or train on the same nucleus",
        "trl#6789",
        1.0, closed=by.top_p, sizes=(0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999),
    ),
    Cause(
        "top-k",
        "log-probs were renormalized to the {amount} likeliest tokens (top-k)",
        "request log-probs before top-k, or set top-k to -1",
        "trl#6789",
        0.0, closed=by.top_k, sizes=(1, 5, 10, 20, 32, 40, 50, 64, 100, 128, 200, 256),
    ),
    Cause(
        "min-p",
        "log-probs were renormalized to tokens above min-p {amount}",
        "request log-probs before min-p, or set min-p to 0",
        "trl#6789",
        0.0, closed=by.min_p, sizes=(0.01, 0.02, 0.05, 0.1, 0.2),
    ),
    Cause(
        "min-tokens",
        "the first token was sampled without the end token (min_tokens)",
        "nothing to fix: -log(1 - p_eos) is what min_tokens=1 adds; pass min_tokens=0 to remove it",
        "",
        lambda model: 0.0 if by.end_ids(model) else None, closed=by.no_end, sizes=(1,), expected=True,
    ),
    Cause(
        "no normalization",
        "logits stand for log-probs: they were not normalized",
        "subtract the logsumexp of the logits (log_softmax), in fp32",
        "verl#2656",
        0.0, closed=by.unnormalised, sizes=(1,),
    ),
    Cause(
        "next row's label",
        "a row's last label is the next packed row's first",
        "shift labels within each row, or leave the end of each row out of the loss",
        "verl#6475",
        0.0, closed=by.next_row, sizes=(1,),
    ),
    Cause(
        "packed rows",
        "packed rows saw each other: attention ignored where rows begin",
        "pass the borders of rows (cu_seqlens) or positions that restart, use_cache=False and no mask; or do not pack",
        "AReaL#1442",
        0.0, laid=by.together, sizes=(1,),
    ),
    Cause(
        "positions run on",
        "positions ran on over packed rows, which saw each other",
        "let positions begin at 0 in each packed row",
        "verl#1381",
        0.0, laid=by.running_on, sizes=(1,),
    ),
    Cause(
        "padding",
        "rows saw their padding: the attention mask was not applied",
        "pass the attention mask of the whole batch to the model",
        "verl#6280",
        0.0, laid=by.with_padding, sizes=(1, 2, 3),
    ),
    Cause(
        "mask of another row",
        "the attention mask was another row's",
        "pass rows and their attention masks in one order",
        "",
        0.0, laid=by.with_mask_of, sizes=(1, -1),
    ),
    Cause(
        "loss mask",
        "attention had the loss mask: answers saw no prompt",
        "build the attention mask from the padding, not from the loss mask",
        "verl#6278",
        0.0, laid=by.without_prompts, sizes=(1,),
    ),
    Cause(
        "norm epsilon",
        "the norms' epsilon was {amount}, not {own}",
        "load the norms' epsilon from the checkpoint's config.json",
        "",
        lambda model: by.first_value(by.norms(model)), planted=by.epsilon, sizes=(1e-6, 1e-5, 1e-4, 1e-3), along="linear",
    ),
    Cause(
        "attention scale",
        "the attention's scale was {amount} times the model's",
        "compare the softmax scale of the attention kernel with 1/sqrt(head_dim), or the config's own",
        "",
        lambda model: 1.0 if by.scaled(model) else None, planted=by.attention, near=(0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.4, 2),
        along="log",
    ),
    Cause(
        "rope theta",
        "rope theta was {amount}, not {own}",
        "compare rope_theta of both sides (config.json, and overrides of the engine)",
        "",
        by.theta_of, planted=by.theta, sizes=(1e4, 1e5, 5e5, 1e6, 5e6, 1e7), near=(0.9, 1.1),
        along="log",
    ),
    Cause(
        "rope scaling",
        "positions were divided by {amount}",
        "compare rope_scaling of both sides (config.json, and overrides of the engine)",
        "",
        lambda model: 1.0 if by.ropes(model) else None, planted=by.angles,
        sizes=(0.25, 0.5, 0.97, 1.03, 1.5, 2, 3, 4, 8, 16, 32), along="log",
    ),
    Cause(
        "inv_freq in bf16",
        "the rotary embedding's inv_freq was rounded to bf16",
        "keep the buffer in fp32: cast parameters, not the whole module",
        "",
        lambda model: 0.0 if by.ropes(model) else None, planted=by.rounded_angles, sizes=(1,),
    ),
    Cause(
        "head in bf16",
        "the output head was computed in bf16",
        "compute lm_head in fp32 on both sides (vLLM: hf_overrides head_dtype)",
        "vLLM PR#48390",
        lambda model: None if model.get_output_embeddings() is None else 0.0, planted=by.narrow_head, sizes=(1,), rounds=True,
    ),
    Cause(
        "logits in bf16",
        "the log-softmax was taken of logits in bf16",
        "convert the logits to fp32 before the log-softmax, and keep autocast off there",
        "",
        0.0, closed=by.rounded_logits, sizes=(1,), rounds=True,
    ),
    Cause(
        "log-softmax in bf16",
        "the log-softmax was computed in bf16",
        "convert the logits to fp32 before the log-softmax, and keep autocast off there",
        "",
        0.0, closed=by.narrow_softmax, sizes=(1,), rounds=True,
    ),
    Cause(
        "log-probs in bf16",
        "log-probs were rounded to bf16",
        "keep log-probs in fp32: a difference of two of them is the ratio's logarithm",
        "",
        0.0, closed=by.rounded_scores, sizes=(1,), rounds=True,
    ),
    Cause(
        "sliding window",
        "the attention's window of {own} tokens was not applied",
        "compare sliding_window of both sides; an engine may drop it",
        "",
        by.window_of, planted=by.window, sizes=(2**30,),
    ),
    Cause(
        "soft cap",
        "logits were not soft-capped",
        "use an attention kernel and a head that apply the model's soft caps",
        "",
        by.cap_of, planted=by.uncapped, sizes=(1,),
    ),
    Cause(
        "activation",
        "the MLPs used gelu for silu, or silu for gelu",
        "compare hidden_act of both sides (config.json, and fused kernels)",
        "",
        lambda model: 0.0 if by.activations(model) else None, planted=by.other_activation, sizes=(1, 2),
    ),
    Cause(
        "adapter",
        "the adapter was not applied: these are the base model's",
        "merge the adapter, or send it to the engine at each sync",
        "verl#7495",
        lambda model: 0.0 if by.adapters(model) else None, planted=by.without_adapters, sizes=(1,),
    ),
    Cause(
        "adapter of",
        "the adapter of {part} was not applied",
        "compare the target modules of both sides; an engine may take an adapter without those that it does not know",
        "vllm#51594",
        0.0, planted=by.without_adapters, parts=by.adapted, sizes=(1,),
    ),
    Cause(
        "adapter scale",
        "the adapter's scale was {amount} times the saved one",
        "compare lora_alpha, r and use_rslora of both sides (adapter_config.json)",
        "",
        lambda model: 1.0 if any(by.scales(model)) else None, planted=by.adapter_scale,
        sizes=(1 / 16, 1 / 8, 1 / 4, 1 / 2, 0.7, 0.85, 1.15, 1.4, 2, 3, 4, 6, 8, 16, 32, 64), along="log",
    ),
    Cause(
        "adapter alpha",
        "an adapter of alpha 0, without effect, had scale {amount}",
        "save adapter_config.json with the alpha of the training, or the replay is of the base model",
        "",
        lambda model: None if any(by.scales(model)) or not by.scales(model) else 0.0, planted=by.adapter_scale,
        sizes=tuple(2 ** (step / 2) for step in range(-4, 13)),
    ),
    Cause(
        SHIFT,
        "{what} are shifted by {amount} tokens in their rows",
        "align log-probs with tokens: the log-prob at t is of the id at t + 1",
        "ms-swift PR#8196",
        None,
    ),
    Cause(
        ROWS,
        "{amount} rows have the {what} of other rows",
        "match rollouts and rows by id, not by order",
        "open-instruct#1473",
        None,
    ),
    Cause(
        PLACEHOLDER,
        "0.0 stands for {amount} log-probs under the action mask",
        "mask tokens that were not sampled, such as an appended end token",
        "SkyRL PR#2148",
        None,
    ),
    Cause(
        WEIGHTS,
        "the weights were those of {part}",
        "synchronize the weights before each rollout, and check that they arrive",
        "trl#5312",
        None,
    ),
    Cause(
        NAN,
        "no log-prob is finite: a weight was NaN or infinite",
        "these weights give finite ones: go back to the checkpoint before, and look at the loss and norm of the step after it",
        "OpenRLHF#1120",
        None,
    ),
    Cause(
        PRECISION,
        "right to the rounding of {part}, its dtype",
        "",
        "",
        None,
    ),
    Cause(
        OLDER,
        "of the policy before an update: {amount} nats from old_log_probs",
        "",
        "",
        None,
    ),
    Cause(
        UNKNOWN_POLICY,
        "{amount} nats from old_log_probs, whose policy has no truth",
        "give the checkpoint before the update: --other-model PATH",
        "",
        None,
    ),
    Cause(
        UNKNOWN_PRECISION,
        "perhaps the rounding of {part}: too few tokens to tell",
        "replay more inputs, or with the dtype of the engine",
        "",
        None,
    ),
    Cause(
        DROPPED,
        "its model drops {part} at random, the truth drops nothing",
        "train without dropout, as log-probs of the rollout have none",
        "",
        None,
    ),
)  # fmt: skip
"""All causes. The last move log-probs without a model, or are given as further models, dtypes, policies: `fit` knows how."""
BY_NAME = {cause.name: cause for cause in BANK}


@cache
def all_causes() -> str:
    """Return what asks for every cause of this bank as it is: another bank has other results."""
    sources = (Path(str(module.__file__)).read_bytes() for module in (sys.modules[__name__], by))
    return f"all of {zlib.crc32(b''.join(sources)):08x}"


def cause_and_part(name: str) -> tuple[Cause, str]:
    """Return the cause of a fit's name, and its part: of "adapter of: lm_head", `adapter of` and lm_head; "" without one."""
    cause, _, part = name.partition(": ")
    return BY_NAME[cause], part
