"""What must hold of a replay's model and of its modules, and what to do where it does not."""

from __future__ import annotations

from actordbg.records.finding import ISOLATION, Rule
from actordbg.records.locate_record import (
    BACK,
    GRADIENT,
    INTO,
    OUT,
    ROUNDED,
    TIE,
    ModelDifference,
    Operation,
    PlaceResult,
    is_backward,
)

EAGER = "replay with `--attn eager`; if that is right, the attention kernel or its mask is wrong; else look at what runs before"
SAME_MODEL = Rule(
    "identity",
    "the model's tensors and attributes are the checkpoint's",
    remedy="find what sets it after the checkpoint is loaded, or load the weights again",
)
FORMULA = Rule(
    "formula",
    "modules of transformers follow the formulas of their papers",
    remedy="update transformers, or patch that module: the truth runs it as well",
)
KERNEL = Rule(
    "kernel",
    "the attention kernel computes this model's attention",
    remedy="replay with `--attn eager`, or a kernel that computes this model's attention",
)
OPERATION = Rule("operation", "operations between modules are transformers' own")
PLACES = {
    OUT: Rule(
        "module",
        "a module's output is the truth's to rounding",
        fails="{module} computes something else than transformers",
    ),
    INTO: Rule(
        "between modules", "what comes into a module is the truth's to rounding", fails="the input of {module} is wrong already"
    ),
    BACK[OUT]: Rule(
        "gradient of an output",
        "what comes back to a module's output is the truth's to rounding",
        fails="the gradient is wrong already where it reaches {module}",
    ),
    BACK[INTO]: Rule(
        "gradient of an input",
        "what goes back through a module is the truth's to rounding",
        remedy="look for a custom kernel, autograd.Function or hook in it, and run it in plain PyTorch",
        fails="the backward of {module} is wrong",
    ),
    GRADIENT: Rule(
        "gradient",
        "a parameter's gradient is the truth's to rounding",
        fails="the gradient of {module} is wrong",
    ),
}
"""By the kind of a place."""
_MASK = "look at what makes this layer's mask: padding, borders of packed rows, causality, the window"
_OF_OPERATION = {
    "rotary embedding": "compare what turns queries and keys, and the cosines and sines that reach it, with transformers'",
    "attention mask": _MASK,
    "sliding window": _MASK,
    "softmax scale": "pass the module's own `scaling` to the attention kernel, and check that nothing scales twice",
    "soft cap": "use a kernel that applies attn_logit_softcapping (`--attn eager` does)",
    "order of operations": "call norms, rotary embeddings and activations in the order of transformers' own code",
    "activation": "use the activation that the configuration names (hidden_act)",
}
"""By the word of an operation that differs: what to do."""


def of_difference(difference: ModelDifference) -> str:
    """Return what to do about what the model is; "" for the rule's own remedy."""
    if difference.kind == TIE:
        return "let `tie_word_embeddings` in config.json be as the checkpoint is: transformers goes by it under ZeRO-3 alone"
    if difference.kind != ROUNDED:
        return ""
    if not difference.name.endswith("inv_freq"):
        return (
            "keep it in fp32, as transformers does: a DeepSpeed engine in bf16 rounds every parameter (`--dtype fp32` does not)"
        )
    return "keep it in fp32: `model.bfloat16()` rounds it, and ZeRO-3 makes it in the model's dtype (`--zero-stage 2` does not)"


def of_operation(operation: Operation) -> str:
    """Return what to do where an operation between modules differs."""
    return ISOLATION if operation.other_rows else _OF_OPERATION.get(operation.word, _code_of(operation.module))


def of_place(place: PlaceResult) -> str:
    """Return what to try where a place is wrong without a difference in what the model is."""
    if 0 < len(place.rows) < place.of_rows and 0 not in place.rows:
        return ISOLATION
    if place.kind == BACK[OUT]:
        return f"look between the output of {place.module} and the loss: a hook, a detached value, a reduction over ranks"
    if is_backward(place.kind):
        return f"look for what changes gradients at {place.module}: a hook, a detached value, a reduction over ranks"
    if place.kind == INTO:
        return EAGER
    return _code_of(place.module)


def _code_of(module: str) -> str:
    return f"read the code that {module} runs: a patched class, a fused kernel, a hook"
