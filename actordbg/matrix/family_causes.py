"""Why a family is wrong, where that is known: what a reader needs to know who sees the finding for the first time. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actordbg.formats.matrix_record import MatrixCell
from actordbg.matrix.family_matrix import FamilyFinding, FamilyResult


@dataclass(frozen=True)
class Cause:
    """A known cause. applies: whether it explains this finding of this family."""

    title: str
    meaning: str
    applies: Callable[[FamilyResult, FamilyFinding], bool]


def cause_of(result: FamilyResult, finding: FamilyFinding) -> Cause | None:
    """The first cause that explains a finding; None for one that nobody has looked into."""
    return next((one for one in CAUSES if one.applies(result, finding)), None)


def _cells(result: FamilyResult, finding: FamilyFinding) -> list[MatrixCell]:
    return [cell for cell in result.cells if cell.name in finding.cells]


def _rows_meet(result: FamilyResult, finding: FamilyFinding) -> bool:
    """Rows see each other, and only where they are packed."""
    packed = all(cell.config.get("packing") for cell in _cells(result, finding))
    return packed and ("jacobian broken: row" in finding.words or "neighbour broken" in finding.words)


def _has_a_state(result: FamilyResult, finding: FamilyFinding) -> bool:
    """The model has a recurrent state or a convolution along the sequence."""
    kinds = {str(kind) for value in result.config.values() if isinstance(value, list) for kind in value}
    return bool(kinds & {"linear_attention", "conv", "mamba", "hybrid"}) or any(
        "mamba" in name or "conv" in name or name == "state_size" for name in result.config
    )


def _no_soft_cap(result: FamilyResult, finding: FamilyFinding) -> bool:
    sdpa = all(cell.config.get("attn") == "sdpa" for cell in _cells(result, finding))
    return sdpa and bool(result.config.get("attn_logit_softcapping"))


CAUSES = (
    Cause(
        "A state runs on into the next packed row",
        "These models have layers with a state along the sequence: a recurrence or a convolution. transformers sets it back at "
        "the border of a row only where it is told of the borders (cu_seq_lens_q or seq_idx), or not at all. OpenRLHF packs all "
        "rows into one and passes position ids only. Every row after the first begins with what the row before left. Train these "
        "without packing.",
        lambda result, finding: _rows_meet(result, finding) and _has_a_state(result, finding),
    ),
    Cause(
        "Attention does not know where a packed row ends",
        "With sdpa and eager attention, transformers finds the borders of packed rows in the position ids, and builds its mask "
        "from them. The code of these models does not hand its position ids to the mask. So each packed row attends to all rows "
        "before it. Train these without packing.",
        _rows_meet,
    ),
    Cause(
        "sdpa leaves the soft cap of the attention's logits out",
        "The configuration caps attention logits (attn_logit_softcapping). sdpa has no such cap and drops it without a word; "
        "eager attention has it. How much it matters grows with the logits. Use eager attention, or flash attention where it "
        "takes a soft cap.",
        _no_soft_cap,
    ),
    Cause(
        "Experts are drawn at random in a training pass",
        "The router samples its experts in training mode (transformers' sparsemixer): without jitter among those of equal "
        "score, and in bf16 there are some. So the log-probs of a training pass depend on the seed.",
        lambda result, finding: result.model_type == "phimoe" and finding.words.startswith("rerun nondeterministic"),
    ),
    Cause(
        "The model has no such attention",
        "The model's code has no sdpa. OpenRLHF's Actor is then not built. Use eager attention.",
        lambda result, finding: "does not support an attention implementation" in finding.words,
    ),
)
"""In this order; the first one that applies is said."""
