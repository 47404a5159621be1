"""Figures of one input's outputs, which a result keeps instead of the tensors.

**The outputs** (`summarise`). Every figure is over the tokens that `mask` selects; log-probs are in nats. A value
that is not finite fails the input wherever it is, because multiplying by the mask does not remove it. The digest is the SHA-256
of *all* log-probs' float32 bytes in C order: with equal masks, equal digests mean equal log-probs.

**Recorded outputs** (`against_golden`). A dump holds log-probs, entropies and RNG state if the run was recorded with
`--with-outputs` or `--with-rng`. They are compared token by token under the same mask, and only if both describe the same thing:
the embedded tiny model is not the run's, and another shape is another call. Whatever was recorded but not compared is listed
with the reason. A difference is a figure, never a failure: only the user knows whether weights, dtype and kernels match the run.

Pure: tensors in, fields of a ResultRecord out. `log_probs_of` and `of_the_masked` also take numpy arrays, and nothing here
imports torch: commands compare without it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from actordbg.base.units import plural, some
from actordbg.records.replay_record import FAILED, PASSED

if TYPE_CHECKING:
    from torch import Tensor

    from actordbg.actor.forward_outcome import ForwardOutcome
    from actordbg.store.payload import Dump

NON_FINITE = "non-finite-output"
T = TypeVar("T")


def summarise(outcome: ForwardOutcome) -> dict[str, Any]:
    """Return ResultRecord fields of an outcome's figures, with its `status` and, if one of them is not finite, why it failed.

    log_probs: [B, A] (float), mask: bool, the same shape. A NaN outside the mask counts too: training multiplies by the mask.
    """
    values, mask, entropy = outcome.log_probs.detach().float().contiguous(), outcome.mask.bool(), outcome.entropy
    chosen = values[mask].double()
    finite = chosen[chosen.isfinite()]
    masked_out = ~values.isfinite() & ~mask
    nonfinite, outside = chosen.numel() - finite.numel(), int(masked_out.sum())
    fields: dict[str, Any] = {
        "logprob_count": chosen.numel(),
        "nonfinite": nonfinite,
        "output_digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
        "status": PASSED,
    }
    if finite.numel():
        low, high = finite.aminmax()
        fields |= {"logprob_mean": float(finite.mean()), "logprob_min": float(low), "logprob_max": float(high)}
        fields["logprob_std"] = float(finite.std(correction=0))
    if entropy is not None and entropy.shape == mask.shape:
        entropies = entropy[mask]
        entropies = entropies[entropies.isfinite()]
        fields["entropy_mean"] = float(entropies.double().mean()) if entropies.numel() else None
    wrong = [f"{nonfinite} of {chosen.numel()} log-probs are"] if nonfinite else []
    wrong += [f"{outside} log-probs outside the mask are"] if outside else []
    totals = {"loss": outcome.loss, "gradient norm": outcome.grad_norm}
    wrong += [f"the {name} is" for name, value in totals.items() if value is not None and not math.isfinite(value)]
    if wrong:
        error = f"{' and '.join(wrong)} not finite"
        fields |= {"status": FAILED, "error_class": "NonFiniteOutput", "error": error, "signature": NON_FINITE}
    return fields


def nonfinite_weights(model: Any) -> str:
    """Name the first parameters with values that are not finite, of this rank; "" if there is none."""
    shards = {name: getattr(each, "to_local", lambda each=each: each)().detach() for name, each in model.named_parameters()}
    counts = {name: int((~shard.isfinite()).sum()) for name, shard in shards.items()}
    named = [f"the weight {name} has {plural(count, 'value')} not finite" for name, count in counts.items() if count]
    return f"; {some(named)}" if named else ""


LOG_PROBS, ENTROPY, GENERATORS = "log-probs", "entropies", "generators"
"""Kinds of recorded outputs, as `not_compared` names them."""

_OTHER_MODEL = "the embedded tiny model is not the run's: name that with --model"


def against_golden(dump: Dump, outcome: ForwardOutcome, *, own_model: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Compare the results that `dump` recorded with `outcome`. `own_model`: the loaded model may be the run's.

    Returns fields of the ResultRecord, and for LOG_PROBS, ENTROPY or GENERATORS, why it was not compared.
    """
    fields: dict[str, Any] = {}
    not_compared: dict[str, str] = {}

    def take(what: str, prefix: str, values: Tensor | None, golden: Tensor) -> None:
        if not own_model:
            not_compared[what] = _OTHER_MODEL
        elif values is None:
            not_compared[what] = f"the replayed call returned no {what}"
        elif golden.shape != values.shape:
            not_compared[what] = f"the run's are {list(golden.shape)}, the replay's {list(values.shape)}"
        else:
            fields.update(_differences(values, golden, outcome.mask, prefix))

    log_probs, entropy, randomness = log_probs_of(dump.outputs), dump.outputs.get("entropy"), outcome.randomness
    if log_probs is not None:
        take(LOG_PROBS, "golden", outcome.log_probs, log_probs)
    if entropy is not None:
        take(ENTROPY, "golden_entropy", outcome.entropy, of_the_masked(entropy, outcome.mask, dump.record.seq_len))
    if randomness is not None and (reason := randomness.why if own_model else _OTHER_MODEL):
        not_compared[GENERATORS] = reason
    elif randomness is not None:
        fields["rng_match"] = randomness.match
    return fields, not_compared


def log_probs_of(outputs: Mapping[str, T]) -> T | None:
    """Return the recorded call's log-probs, if they were recorded: of the actions [B, A], or of all next tokens.

    The recorder names them `action_log_probs` where the call had an action mask (PPO's do), else `log_probs` [B, S-1].
    """
    return outputs.get("action_log_probs", outputs.get("log_probs"))


def of_the_masked(entropy: Any, mask: Any, seq_len: int) -> Any:
    """Return the entropies of the tokens that `mask` covers: a trainer returns those of all next tokens, [B, S-1]."""
    of_all = (mask.shape[0], seq_len - 1)
    return entropy[:, -mask.shape[1] :] if tuple(entropy.shape) == of_all else entropy


def _differences(values: Tensor, golden: Tensor, mask: Tensor, prefix: str) -> dict[str, Any]:
    """Return `<prefix>_count`, `_max_abs` and `_mean_abs` of two float tensors of the mask's shape, over the masked-in tokens.

    Equal values differ by 0, even if both are infinite or NaN. A value that is finite on one side only makes the figure
    non-finite.
    """
    ours, theirs = values.double()[mask.bool()], golden.double()[mask.bool()]
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = (ours - theirs).abs().masked_fill(same, 0.0)
    if not difference.numel():
        return {f"{prefix}_count": 0}
    return {
        f"{prefix}_count": difference.numel(),
        f"{prefix}_max_abs": float(difference.max()),
        f"{prefix}_mean_abs": float(difference.mean()),
    }
